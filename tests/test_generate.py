"""`generate` beside Hugging Face's on the same settings, and beside plain decoding on random ones, with blocks that are
really accepted."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteria, TextStreamer

from eagle.config import DecodeConfig
from eagle.decode import SpeculativeDecoder, SpeculativeOutput
from eagle.errors import EagleError
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.noise import row_seeds
from eagle.rows import Row
from eagle.target import Target
from eagle.tree import DraftTree
from tests.oracles import BatchOracle, Chain
from tests.tiny import tiny_model, tiny_tokenizer

NEW = 24


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def targets(target: Target) -> dict[str, Target]:
    """Rotary, learned and windowed positions."""
    return {"llama": target, "gpt2": Target(tiny_model("gpt2")), "mistral": Target(tiny_model("mistral-window"))}


def head_of(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


def prompt(length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: Sequence[list[int]], side: str, pad: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        place = slice(longest - len(one), longest) if side == "left" else slice(0, len(one))
        ids[row, place], mask[row, place] = torch.tensor(one), 1
    return ids, mask


def answers(out: SpeculativeOutput, width: int) -> list[list[int]]:
    assert out.stats is not None
    return [row[width : width + stats.new_tokens].tolist() for row, stats in zip(out.sequences, out.stats)]


def with_oracle(
    target: Target,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    kind: type[BatchOracle] = BatchOracle,
    nodes: int = 40,
    **arguments: Any,
) -> tuple[SpeculativeOutput, SpeculativeOutput]:
    """The same call plainly, and with a drafter that knows the plain answer and what would have followed it."""
    plain = SpeculativeDecoder(target).generate(ids, mask, **arguments)
    # What follows an end is drafted too, so that a stop really lies inside accepted blocks.
    endless = {
        **arguments,
        "eos_token_id": [],
        "stop_strings": None,
        "stopping_criteria": None,
        "exponential_decay_length_penalty": None,
    }
    endless["max_new_tokens"] = max(map(len, answers(plain, ids.shape[1]))) + 8
    if target.max_positions is not None:
        endless["max_new_tokens"] = min(endless["max_new_tokens"], target.max_positions - ids.shape[1])
    longer = SpeculativeDecoder(target).generate(ids, mask, **endless)
    mask = torch.ones_like(ids) if mask is None else mask
    copies = len(plain.sequences) // len(ids)
    prompts = [one[keep].tolist() for one, keep in zip(ids, mask.bool()) for _ in range(copies)]
    ends = answers(plain, ids.shape[1])
    truths = [
        [*before, *end, *more[len(end) :]] for before, end, more in zip(prompts, ends, answers(longer, ids.shape[1]))
    ]
    drafter = kind(truths, vocab=target.vocab_size, nodes=nodes)
    return plain, SpeculativeDecoder(target, drafter).generate(ids, mask, **arguments)


def stops_everywhere(target: Target, ids: torch.Tensor) -> list[int]:
    return SpeculativeDecoder(target).generate(ids, max_new_tokens=NEW, eos_token_id=[]).sequences[0].tolist()


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


# --- stopping -------------------------------------------------------------------------------------------------------


def _text_across_tokens(target: Target, ids: torch.Tensor) -> tuple[str, int]:
    """A stop string that begins in one token of the plain answer and ends in the next; how many tokens it takes."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    answer = stops_everywhere(target, ids)[ids.shape[1] :]
    for place in range(4, len(answer) - 1):
        one, other = tokenizer.decode(answer[place]), tokenizer.decode(answer[place + 1])
        string = one[-1:] + other[:1]
        if len(string) == 2 and string.isascii() and string not in tokenizer.decode(answer[: place + 1]):
            return string, place + 2
    raise AssertionError("no such place; take another prompt")


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_stop_string_across_tokens_inside_an_accepted_block(target: Target, seed: int) -> None:
    ids = prompt(seed=seed)
    string, count = _text_across_tokens(target, ids)
    arguments = {"max_new_tokens": NEW, "eos_token_id": [], "stop_strings": ["nowhere", string]}
    theirs = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=2, tokenizer=target.tokenizer, **arguments
    )
    assert theirs.shape[1] == 9 + count
    plain, drafted = with_oracle(target, ids, kind=Chain, nodes=8, **arguments)
    for out in (plain, drafted):
        assert torch.equal(out.sequences, theirs)
        assert out.stats is not None
        assert (out.stats[0].finish_reason, out.stats[0].new_tokens) == ("stop", count)
    assert drafted.stats is not None
    assert sum(drafted.stats[0].accepted) + drafted.stats[0].verify_steps + 1 > count  # it lay inside a block


@pytest.mark.parametrize("eos_at", range(1, 12))
def test_an_end_anywhere_in_a_block_is_found_and_nothing_leaks_behind_it(target: Target, eos_at: int) -> None:
    """EOS mid-block (transformers 47912); a length limit must not beat an earlier stop (sglang 31599)."""
    ids = prompt(seed=7)
    answer = stops_everywhere(target, ids)[9:]
    eos = answer[eos_at]
    count = answer.index(eos) + 1
    for limit in (count, count + 1, NEW):
        plain, drafted = with_oracle(target, ids, kind=Chain, nodes=6, max_new_tokens=limit, eos_token_id=[eos, 380])
        for out in (plain, drafted):
            assert out.sequences[0, 9:].tolist() == answer[:count]
            assert out.stats is not None
            assert out.stats[0].finish_reason == "eos"


def test_the_earliest_of_several_stops_wins(target: Target) -> None:
    ids = prompt(seed=7)
    plain = stops_everywhere(target, ids)
    answer = plain[9:]
    reached: list[int] = []

    class Counting(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            reached.append(input_ids.shape[1])
            return input_ids[:, -1] == answer[5]

    first = answer.index(answer[5]) + 1
    arguments: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": [answer[8]], "stopping_criteria": [Counting()]}
    for out in with_oracle(target, ids, kind=Chain, nodes=10, **arguments):
        assert out.sequences[0, 9:].tolist() == answer[:first]
        assert out.stats is not None
        assert out.stats[0].finish_reason == "stop"
    assert reached == [*range(10, 10 + first)] * 2  # after every token, and never beyond the stop


def test_criteria_see_scores_as_hugging_face_gives_them(target: Target) -> None:
    seen: list[Any] = []

    class Looking(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(scores)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {"max_new_tokens": 6, "eos_token_id": [], "stopping_criteria": [Looking()]}
    plain, _ = with_oracle(target, prompt(), output_scores=True, **arguments)
    assert [len(scores) for scores in seen] == [1, 2, 3, 4, 5, 6] * 2
    assert [tuple(score.shape) for score in seen[5]] == [(1, 384)] * 6
    assert all(torch.equal(one, other) for one, other in zip(seen[5], plain.scores))
    seen.clear()
    SpeculativeDecoder(target).generate(prompt(), **arguments)
    assert seen == [None] * 6


def test_a_time_limit_ends_the_text(target: Target) -> None:
    out = SpeculativeDecoder(target).generate(prompt(), max_new_tokens=400, eos_token_id=[], max_time=1e-9)
    assert out.stats is not None
    assert (out.stats[0].finish_reason, out.stats[0].new_tokens) == ("stop", 1)


# --- streaming ------------------------------------------------------------------------------------------------------


class _Recorder(TextStreamer):
    def __init__(self, target: Target, **arguments: Any):
        super().__init__(target.tokenizer, **arguments)
        self.text, self.ids = "", [].copy()

    def put(self, value: torch.Tensor) -> None:
        self.ids.extend(value.flatten().tolist())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_stream_is_the_decoded_text_with_nothing_behind_a_stop(target: Target, do_sample: bool) -> None:
    assert target.tokenizer is not None
    ids = prompt(seed=7)
    arguments: dict[str, Any] = {"do_sample": do_sample, "seed": 3, "max_new_tokens": NEW}
    free = SpeculativeDecoder(target).generate(ids, eos_token_id=[], **arguments).sequences[0, 9:].tolist()
    arguments["eos_token_id"] = free[11]
    plain, _ = with_oracle(target, ids, kind=Chain, nodes=7, **arguments)
    recorder = _Recorder(target, skip_prompt=True)
    truth = [[*ids[0].tolist(), *free]]
    decoder = SpeculativeDecoder(target, Chain(truth, nodes=7))
    out = decoder.generate(ids, streamer=recorder, **arguments)
    assert torch.equal(out.sequences, plain.sequences)
    assert recorder.ids == out.sequences[0].tolist()
    assert recorder.text == target.tokenizer.decode(out.sequences[0, 9:])
    assert "".join(decoder.stream(ids, **arguments)) == target.tokenizer.decode(
        out.sequences[0, 9:], skip_special_tokens=True
    )


def test_streams_take_one_row_and_refuse_at_the_call(target: Target) -> None:
    decoder = SpeculativeDecoder(target)
    with pytest.raises(EagleError, match="streamer takes one row, the batch has 2"):
        decoder.generate(torch.tensor([[5, 6], [7, 8]]), streamer=_Recorder(target))
    with pytest.raises(EagleError, match="streamed for one row, the batch has 2"):
        decoder.stream(torch.tensor([[5, 6], [7, 8]]))
    with pytest.raises(EagleError, match="does not support typical_p"):
        decoder.stream(prompt(), typical_p=0.5)
    with pytest.raises(EagleError, match="needs the tokenizer"):
        SpeculativeDecoder(Target(target.model)).stream(prompt())


# --- ends of the positions, self-drafting ----------------------------------------------------------------------------


def test_ragged_rows_up_to_the_last_position_of_a_position_table() -> None:
    """Trees of different shapes: a row's nodes must not reach past the table because another row's tree is broad."""
    target = Target(tiny_model("gpt2", n_positions=30))
    ids, mask = padded([list(range(3, 13)), list(range(20, 25)), list(range(40, 50))], "left")
    for seed in range(6):
        plain, drafted = with_oracle(target, ids, mask, max_new_tokens=20, eos_token_id=[], do_sample=True, seed=seed)
        assert torch.equal(plain.sequences, drafted.sequences)


def test_text_beyond_the_heads_positions_is_still_the_targets(target: Target) -> None:
    """vllm 48894 crashed there."""
    torch.manual_seed(1)
    config = EagleHeadConfig.for_target(target.config, initializer_range=0.2, max_position_embeddings=16)
    decoder = SpeculativeDecoder.from_pretrained(target, EagleHead(config).eval())
    out = decoder.generate(prompt(12), max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(
        out.sequences, decoder.plain().generate(prompt(12), max_new_tokens=NEW, eos_token_id=[]).sequences
    )


class _SelfDrafter(BatchOracle):
    """The target drafts a chain for itself, with the coupled scores of its own logits."""

    def __init__(self, target: Target, depth: int):
        super().__init__([])
        self.target, self.depth = target, depth

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        self.rows = list(rows)
        self.running = [[] for _ in rows]

    def propose(self) -> DraftTree:
        chains = []
        for row in self.rows:
            ids = list(row.tokens)
            for _ in range(self.depth):
                with torch.no_grad():
                    logits_V = self.target.model(torch.tensor([ids])).logits[0, -1]
                processed_V = row.sampler.processed(logits_V, ids, [])
                ids.append(int(row.sampler.draft_scores(processed_V[None], len(ids)).argmax()))
            chains.append(ids[len(row.tokens) - 1 :])
        tokens = torch.tensor(chains)
        return DraftTree.from_parents(tokens, torch.arange(-1, self.depth).expand(len(chains), -1).contiguous())


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_the_target_drafting_for_itself_has_everything_accepted(target: Target, temperature: float) -> None:
    ids, mask = padded([[5, 6, 7], [8, 9]], "left")
    arguments: dict[str, Any] = {
        "do_sample": True,
        "temperature": temperature,
        "top_k": 30,
        "top_p": 0.95,
        "seed": 2,
        "repetition_penalty": 1.3,
    }
    decoder = SpeculativeDecoder(target, _SelfDrafter(target, depth=3))
    out = decoder.generate(ids, mask, max_new_tokens=17, eos_token_id=[], **arguments)
    assert [stats.accepted for stats in out.stats or ()] == [[3, 3, 3, 3]] * 2
    assert [stats.tau for stats in out.stats or ()] == [4.0, 4.0]


# --- sampling --------------------------------------------------------------------------------------------------------


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


# --- random configurations -------------------------------------------------------------------------------------------


def _per_row(values: Sequence[Any], rows: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(values), st.lists(st.sampled_from(values), min_size=rows, max_size=rows))


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    rows = draw(st.integers(1, 5))
    token = st.integers(3, 300)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=rows, max_size=rows))
    arguments: dict[str, Any] = {
        "max_new_tokens": draw(st.integers(1, NEW)),
        "eos_token_id": draw(st.sampled_from([[], list(range(3, 300, 23))])),
        "seed": draw(st.integers(0, 2**40)),
    }
    if draw(st.booleans()):
        arguments |= {
            "do_sample": True,
            "temperature": draw(_per_row([0.0, 0.4, 1.0, 1.8], rows)),
            "top_k": draw(_per_row([0, 4, 60], rows)),
            "top_p": draw(_per_row([1.0, 0.9, 0.4], rows)),
            "min_p": draw(_per_row([0.0, 0.05], rows)),
            "filter_order": draw(st.sampled_from(["sequential", "joint"])),
            "num_return_sequences": draw(st.sampled_from([1, 1, 2])),
        }
    processors: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: draw(st.sampled_from([0.8, 1.4])),
        "no_repeat_ngram_size": lambda: draw(st.integers(1, 3)),
        "presence_penalty": lambda: 1.5,
        "frequency_penalty": lambda: 0.7,
        "bad_words_ids": lambda: [[5], [6, 7], [40, 41, 42]],
        "min_new_tokens": lambda: draw(st.integers(1, 20)),
        "min_length": lambda: draw(st.integers(1, 30)),
        "suppress_tokens": lambda: list(range(10, 30)),
        "forced_eos_token_id": lambda: 300,
    }
    for name in draw(st.lists(st.sampled_from(sorted(processors)), max_size=3, unique=True)):
        arguments[name] = processors[name]()
    return {
        "family": draw(st.sampled_from(["llama", "llama", "gpt2", "mistral"])),
        "prompts": prompts,
        "side": draw(st.sampled_from(["left", "right"])),
        "arguments": arguments,
        "tree": {
            "budget": draw(st.integers(1, 40)),
            "top_k": draw(st.integers(1, 6)),
            "depth": draw(st.integers(1, 5)),
        },
        "nodes": draw(st.integers(1, 70)),
    }


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(calls())
def test_drafting_never_changes_the_text_nor_do_batch_mates(targets: dict[str, Target], call: dict[str, Any]) -> None:
    target, arguments = targets[call["family"]], call["arguments"]
    ids, mask = padded(call["prompts"], call["side"])
    plain, drafted = with_oracle(target, ids, mask, nodes=call["nodes"], **arguments)
    assert torch.equal(drafted.sequences, plain.sequences)
    head = SpeculativeDecoder.from_pretrained(target, head_of(target), decode=DecodeConfig(**call["tree"]))
    assert torch.equal(head.generate(ids, mask, **arguments).sequences, plain.sequences)
    assert plain.stats is not None
    copies = arguments.get("num_return_sequences", 1)
    for row, (answer, stats) in enumerate(zip(answers(plain, ids.shape[1]), plain.stats)):
        place = row // copies
        alone = {
            name: value[place : place + 1] if _is_per_row(name, value) else value for name, value in arguments.items()
        }
        alone |= {"seed": [stats.seed], "num_return_sequences": 1}
        out = head.generate(torch.tensor([call["prompts"][place]]), **alone)
        assert answers(out, len(call["prompts"][place])) == [answer]
        assert out.stats is not None
        assert out.stats[0].finish_reason == stats.finish_reason


def _is_per_row(name: str, value: Any) -> bool:
    return name in ("temperature", "top_k", "top_p", "min_p") and isinstance(value, list)
