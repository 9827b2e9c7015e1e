"""`generate` beside Hugging Face's on the same settings, with blocks that are really accepted."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria

from eagle.decode.decoder import SpeculativeDecoder
from eagle.sample.noise import row_seeds
from eagle.target.target import Target
from tests.oracles import NEW, padded, prompt, stops_everywhere, with_oracle
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


class _Halve:
    """A caller's own processor: reads the whole prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids, scores.gather(1, input_ids) / 2)


class _SumOver(StoppingCriteria):
    def __init__(self, limit: int):
        self.limit = limit

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(1) > self.limit


def _settings(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Every setting beside Hugging Face; `plain`: prompt and answer without any, from which ids that matter are taken."""
    answer = plain[9:]
    return {
        "nothing": {},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[answer[3]], answer[6:8], [answer[10]]]},
        "sequence_bias": {"sequence_bias": [[[answer[2]], -5.0], [answer[4:6], -9.0], [[17], 2.0]]},
        "suppress_tokens": {"suppress_tokens": answer[:9:2]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [answer[0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 7},
        "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [answer[4], answer[8]]},
        "min_length": {"min_length": 9 + 12, "eos_token_id": answer[4]},
        "min_length and min_new_tokens": {"min_length": 30, "min_new_tokens": 7, "eos_token_id": answer[4]},
        "exponential decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 17},
        "several eos": {"eos_token_id": [answer[14], answer[11], 381]},
        "max_length": {"max_length": 9 + 13, "max_new_tokens": None},
        "own processor": {"logits_processor": LogitsProcessorList([_Halve()])},
        "own criterion": {"stopping_criteria": [_SumOver(sum(plain[: 9 + 14]) - 1)]},
        "remove_invalid_values": {"remove_invalid_values": True},
        "config": {"generation_config": GenerationConfig(max_new_tokens=11, repetition_penalty=1.3, eos_token_id=[])},
        "many": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "sequence_bias": [[[17], 1.0]],
            "suppress_tokens": [answer[1]],
            "min_new_tokens": 9,
            "eos_token_id": [answer[5], 17, 40, 80],
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", _settings([0] * 40))
def test_greedy_text_is_that_of_hugging_face_with_the_same_settings(target: Target, name: str) -> None:
    ids = prompt()
    plain = stops_everywhere(target, ids)
    arguments = {"max_new_tokens": NEW, "eos_token_id": [], **_settings(plain)[name]}
    if "generation_config" in arguments:
        arguments = {"generation_config": arguments["generation_config"]}
    theirs = target.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=2, **arguments)
    ours, drafted = with_oracle(target, ids, pad_token_id=2, **arguments)
    assert torch.equal(ours.sequences, theirs)
    assert torch.equal(drafted.sequences, theirs)
    if name != "nothing" and name != "remove_invalid_values" and name != "config":
        assert theirs[0].tolist() != plain  # the setting matters
    assert drafted.stats is not None
    assert drafted.stats[0].tau > 1.2


def test_scores_are_hugging_faces(target: Target) -> None:
    ids = prompt()
    for more in ({}, {"repetition_penalty": 1.5}, {"renormalize_logits": True, "suppress_tokens": [5]}):
        arguments = {"max_new_tokens": 12, "eos_token_id": [], "output_scores": True, **more}
        theirs = target.model.generate(
            ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments
        )
        for out in with_oracle(target, ids, return_dict_in_generate=True, **arguments):
            assert torch.equal(out.sequences, theirs.sequences)
            assert len(out.scores) == len(theirs.scores) == 12
            for mine, other in zip(out.scores, theirs.scores):
                torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
            transitions = target.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            assert transitions.shape == (1, 12)


def test_sampled_scores_have_temperature_and_filters_as_in_hugging_face(target: Target) -> None:
    """Teacher-forced: Hugging Face samples with top_k = 1 over processors that leave our tokens alone."""
    ids = prompt()
    arguments = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "output_scores": True}
    plain, drafted = with_oracle(target, ids, max_new_tokens=10, eos_token_id=[], seed=4, **arguments)
    for step, (one, other) in enumerate(zip(plain.scores, drafted.scores)):
        prefix = plain.sequences[:, : 9 + step]
        theirs = target.model.generate(
            prefix,
            attention_mask=torch.ones_like(prefix),
            max_new_tokens=1,
            eos_token_id=[],
            return_dict_in_generate=True,
            **arguments,
        ).scores[0]
        assert torch.equal(one.isfinite(), theirs.isfinite())
        kept = theirs.isfinite()
        torch.testing.assert_close(one[kept], theirs[kept], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(other[kept], theirs[kept], atol=1e-4, rtol=1e-4)
        assert bool(kept[0, plain.sequences[0, 9 + step]])


def test_scores_of_a_ragged_batch_are_plain_decodings_and_end_in_zeros(target: Target) -> None:
    ids, mask = padded([[5, 6, 7], [8, 9], [10, 11, 12, 13]], "left")
    plain = SpeculativeDecoder(target).generate(ids, mask, max_new_tokens=16, eos_token_id=[])
    eos = int(plain.sequences[1, 4 + 5])
    arguments = {"max_new_tokens": 16, "eos_token_id": eos, "output_scores": True, "do_sample": True}
    one, other = with_oracle(target, ids, mask, temperature=[0, 0, 0.8], seed=3, **arguments)
    assert torch.equal(one.sequences, other.sequences)
    assert one.stats is not None
    for step, (mine, theirs) in enumerate(zip(one.scores, other.scores, strict=True)):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        for row, stats in enumerate(one.stats):
            assert bool((mine[row] == 0).all()) == (step >= stats.new_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_layout_is_hugging_faces(target: Target, side: str) -> None:
    """The input as it came, padding and all, then the answers; rows that ended are filled with the pad token."""
    ids, mask = padded([[5, 6, 7, 30, 31], [8, 9], [10, 11, 12, 13]], side)
    left_ids, left_mask = padded([[5, 6, 7, 30, 31], [8, 9], [10, 11, 12, 13]], "left")
    free = target.model.generate(left_ids, attention_mask=left_mask, max_new_tokens=20, eos_token_id=[])
    eos = [int(free[0, 5 + 4]), int(free[2, 5 + 9])]
    theirs = target.model.generate(
        left_ids, attention_mask=left_mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=3
    )
    for out in with_oracle(target, ids, mask, max_new_tokens=20, eos_token_id=eos, pad_token_id=3):
        assert torch.equal(out.sequences[:, :5], ids)
        assert torch.equal(out.sequences[:, 5:], theirs[:, 5:])
        assert out.stats is not None
        assert sorted({stats.finish_reason for stats in out.stats}) in (["eos"], ["eos", "length"])


@pytest.mark.slow
def test_num_return_sequences_lie_together_and_differ(target: Target) -> None:
    ids, mask = padded([[5, 6, 7], [8, 9]], "left")
    arguments = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3, "max_new_tokens": 12, "seed": 5}
    plain, drafted = with_oracle(target, ids, mask, eos_token_id=[], **arguments)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert torch.equal(plain.sequences[:, :3], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row.tolist()) for row in plain.sequences}) == 6
    assert [stats.seed for stats in plain.stats or ()] == row_seeds(5, 6)


def test_manual_seed_governs_sampling_without_a_seed(target: Target) -> None:
    def text() -> list[int]:
        return SpeculativeDecoder(target).generate(prompt(), max_new_tokens=12, do_sample=True).sequences[0].tolist()

    torch.manual_seed(1)
    first, second = text(), text()
    torch.manual_seed(1)
    assert text() == first != second


@pytest.mark.slow
def test_each_setting_changes_the_text_that_is_drafted(target: Target) -> None:
    """vllm 10198, sglang 10617: settings that are dropped inside the tree. Every one must tell, and be the same as plainly."""
    ids = prompt(seed=3)
    base: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": 60, "seed": 6}
    plain, drafted = with_oracle(target, ids, eos_token_id=[], **base)
    usual = plain.sequences[0].tolist()
    assert drafted.sequences[0].tolist() == usual
    answer = usual[9:]
    assert len(set(answer)) < len(answer)
    changes: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 1.4},
        "top_k": {"top_k": 1},
        "top_p": {"top_p": 0.3},
        "min_p": {"min_p": 0.5},
        "seed": {"seed": 7},
        "logit bias": {"sequence_bias": [[[answer[6]], -20.0]]},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "presence_penalty": {"presence_penalty": 8.0},
        "frequency_penalty": {"frequency_penalty": 8.0},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [answer[6:8]]},
        "min_new_tokens": {"min_new_tokens": 60, "eos_token_id": [answer[5], answer[9]]},
    }
    for name, change in changes.items():
        one, other = with_oracle(target, ids, **{**base, "eos_token_id": [], **change})
        assert torch.equal(one.sequences, other.sequences), name
        assert one.sequences[0].tolist() != usual, name


def test_filter_order_joint_can_differ_and_is_the_same_drafted(target: Target) -> None:
    texts = {}
    for order in ("sequential", "joint"):
        one, other = with_oracle(
            target,
            prompt(),
            max_new_tokens=NEW,
            eos_token_id=[],
            do_sample=True,
            temperature=2.0,
            top_k=5,
            top_p=0.5,
            filter_order=order,
            seed=1,
        )
        assert torch.equal(one.sequences, other.sequences)
        texts[order] = one.sequences[0].tolist()
    assert texts["joint"] != texts["sequential"]
