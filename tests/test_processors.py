"""Logits processors of every kind - pure, in place, with a state - under every rule: what they see, and what comes out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.sample.processing import own_copy
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.oracles import answers, padded
from tests.tiny import tiny_model

RULES = ["coupled", "rejection", "block", "top_k", "typical"]
VOCAB = 96


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB, num_hidden_layers=2))


def drafting(target: Target, rule: str) -> SpeculativeDecoder:
    """The target's own weights draft: much is accepted."""
    tree: dict[str, Any] = dict(top_k=1) if rule == "block" else dict(top_k=2, budget=9)
    decode = decode_config(drafter="model", rule=rule, depth=4, **tree)
    return SpeculativeDecoder.from_pretrained(target, draft_model=Target(target.model), decode=decode)


def favoured(ids_MT: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [M, 1]: the token that the processors below favour; it depends on every position."""
    return (ids_MT[:, -1:] * 5 + length * 7) % VOCAB


class Pure:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (0.7 * scores).scatter_add(1, favoured(ids, ids.shape[1]), torch.full((len(ids), 1), 3.0))


class InPlace:
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.mul_(0.7).scatter_add_(1, favoured(ids, ids.shape[1]), torch.full((len(ids), 1), 3.0))


class Stateful:
    """Knows the length from its calls alone, as Hugging Face makes them: one for every token."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.length = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(ids.shape[1])
        self.length = self.length + 1 if self.length else ids.shape[1]
        return (0.7 * scores).scatter_add(1, favoured(ids, self.length), torch.full((len(ids), 1), 3.0))


def closure() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    length = 0

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal length
        length = length + 1 if length else ids.shape[1]
        return scores.mul_(0.7).scatter_add_(1, favoured(ids, length), torch.full((len(ids), 1), 3.0))

    return process


class EveryFifth(StoppingCriteria):
    """Ends a text with the fifth token that it is asked about."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked += 1
        return torch.full((len(input_ids),), self.asked == 5)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_processors_of_every_kind_give_one_text_in_every_batch(rule: str, target: Target) -> None:
    """Pure, in place, stateful object, stateful closure: one function of the prefix. What a row says does not depend on the
    kind, on its mates, or (coupled) on drafting; a processor sees every prefix once, in order, and none behind the end."""
    drafted, plain = drafting(target, rule), SpeculativeDecoder(target)

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(
        st.lists(st.lists(st.integers(3, VOCAB - 1), min_size=2, max_size=6), min_size=1, max_size=3),
        st.sampled_from([0.0, 0.8]),
        st.sampled_from([[], list(range(4, VOCAB, 9))]),
        st.booleans(),
        st.integers(0, 99),
    )
    def check(prompts: list[list[int]], temperature: float, eos: list[int], stop: bool, seed: int) -> None:
        ids, mask = padded(prompts, "left")

        def text(
            decoder: SpeculativeDecoder, *processors: Any, rows: slice = slice(None), seeds: Any = seed
        ) -> tuple[list[list[int]], list[int]]:
            own = {"temperature": temperature, "do_sample": True} if temperature else {}
            out = decoder.generate(
                ids[rows],
                mask[rows],
                logits_processor=processors,
                stopping_criteria=[EveryFifth()] if stop else None,
                max_new_tokens=9,
                eos_token_id=eos,
                seed=seeds,
                **own,
            )
            return answers(out, ids.shape[1]), [stats.seed for stats in out.stats or ()]

        expected, seeds = text(drafted, Pure())
        stateful = Stateful()
        for processor in (InPlace(), stateful, closure()):
            assert text(drafted, processor)[0] == expected
        if rule == "coupled":
            for processor in (Pure(), InPlace(), Stateful(), closure()):
                assert text(plain, processor)[0] == expected
        if rule != "block":  # which looks ahead, and has copies look
            assert stateful.seen == list(range(len(prompts[0]), len(prompts[0]) + len(expected[0])))
        for b in range(len(prompts)):
            assert text(drafted, Stateful(), rows=slice(b, b + 1), seeds=[seeds[b]])[0] == expected[b : b + 1]

    check()


def test_a_stateful_processor_on_a_batch_says_what_hugging_face_says(target: Target) -> None:
    ids = torch.randint(3, VOCAB, (3, 7), generator=torch.Generator().manual_seed(2))
    arguments: dict[str, Any] = dict(max_new_tokens=12, eos_token_id=[])
    theirs = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList([Stateful()]),
        stopping_criteria=StoppingCriteriaList([EveryFifth()]),
        pad_token_id=2,
        **arguments,
    )
    for decoder in (SpeculativeDecoder(target), drafting(target, "coupled")):
        out = decoder.generate(ids, logits_processor=[Stateful()], stopping_criteria=[EveryFifth()], **arguments)
        assert torch.equal(out.sequences, theirs)


def test_processors_get_a_copy_of_the_logits() -> None:
    logits_V = torch.arange(VOCAB, dtype=torch.float32)
    sampler = RowSampler(sampling=Sampling(), processors=[InPlace()])
    first = sampler.processed(logits_V, [3, 4], [])
    assert torch.equal(logits_V, torch.arange(VOCAB, dtype=torch.float32))
    assert torch.equal(sampler.processed(logits_V, [3, 4], []), first)


def test_the_first_row_has_the_given_processor_and_models_are_not_copied() -> None:
    held = Stateful()
    held.model = torch.nn.Linear(2, 2)  # type: ignore[attr-defined]
    copied = own_copy(held)
    assert copied is not held
    assert copied.seen is not held.seen
    assert copied.model is held.model


def test_what_cannot_be_copied_is_refused_for_several_rows(target: Target) -> None:
    class Locked(Pure):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle a lock")

    ids = torch.randint(3, VOCAB, (2, 4))
    with pytest.raises(EagleError, match=r"Locked cannot be copied .*one row at a time"):
        SpeculativeDecoder(target).generate(ids, logits_processor=[Locked()], max_new_tokens=2)
    SpeculativeDecoder(target).generate(ids[:1], logits_processor=[Locked()], max_new_tokens=2)


class Breaks:
    """From a length of the text on, a token's score becomes `value` (token None: every token's)."""

    def __init__(self, value: float, *, token: int | None = 40, length: int = 9):
        self.value, self.token, self.length = value, token, length

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] < self.length:
            return scores
        if self.token is None:
            return torch.full_like(scores, self.value)
        return scores.index_fill(-1, torch.tensor([self.token]), self.value)


NAN, INF = float("nan"), float("inf")
UNSOUND = [(NAN, 40, "token 40 is nan"), (INF, 40, "token 40 is inf"), (-INF, None, "every token is -inf")]


@pytest.mark.slow
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", [None, *RULES])
def test_scores_that_leave_nothing_to_choose_name_step_token_and_processor(
    rule: str | None, greedy: bool, target: Target
) -> None:
    """Hugging Face raises where it samples; its greedy decoding emits the first nan (or token 0 of all -inf) without a word,
    and takes an inf for the best, as is done here."""
    decoder = SpeculativeDecoder(target) if rule is None else drafting(target, rule)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    ask: dict[str, Any] = dict(max_new_tokens=9, eos_token_id=[], do_sample=not greedy, seed=1)
    for value, token, found in UNSOUND:
        processors = [Pure(), Breaks(value, token=token), Stateful()]
        if greedy and value == INF:
            out = decoder.generate(ids, logits_processor=processors[:2], **ask)
            if rule != "top_k":  # which accepts the second best
                assert out.sequences[0, 9:].tolist() == [40] * 5
            continue
        with pytest.raises(EagleError, match=f"^step 5: the logit of {found} after Breaks"):
            decoder.generate(ids, logits_processor=processors, **ask)
        ended = decoder.generate(ids, logits_processor=processors, **{**ask, "max_new_tokens": 4})
        assert ended.sequences.shape == (1, 9)


@pytest.mark.parametrize("rule", [None, *RULES])
def test_nobody_asks_a_processor_behind_the_end(rule: str | None, target: Target) -> None:
    """Though all that is drafted is accepted: the length limit, and an EOS."""

    def grammar(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[1] < 9, "the text is over"
        return scores

    decoder = SpeculativeDecoder(target) if rule is None else drafting(target, rule)
    ids, ask = torch.tensor([[5, 6, 7, 8, 9]]), dict(seed=1, logits_processor=[grammar])
    out = decoder.generate(ids, max_new_tokens=4, eos_token_id=[], **ask)
    assert out.sequences.shape == (1, 9)
    out = decoder.generate(ids, max_new_tokens=9, eos_token_id=int(out.sequences[0, 8]), **ask)
    assert out.sequences.shape[1] <= 9


@pytest.mark.parametrize("beams", [1, 3])
def test_a_search_names_them_too(beams: int, target: Target) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 1]])
    for value in (NAN, INF)[: 1 if beams == 1 else 2]:
        with pytest.raises(EagleError, match=f"^step 5: the logit of token 40 is {value} after Breaks"):
            SpeculativeDecoder(target).generate(
                ids, logits_processor=[Breaks(value)], num_beams=beams, max_new_tokens=9, eos_token_id=[]
            )


def test_a_broken_target_or_draft_is_named() -> None:
    ids, ask = torch.tensor([[5, 6, 7]]), dict(max_new_tokens=6, eos_token_id=[])
    whole, broken = tiny_model(vocab_size=VOCAB, num_hidden_layers=2), tiny_model(vocab_size=VOCAB, num_hidden_layers=2)
    with torch.no_grad():
        broken.lm_head.weight[33] = NAN
    decoder = SpeculativeDecoder(Target(broken, probe=False))
    with pytest.raises(
        EagleError, match=r"^step 1: the logit of token 33 is nan after the target.*remove_invalid_values"
    ):
        decoder.generate(ids, **ask)
    assert decoder.generate(ids, remove_invalid_values=True, **ask).sequences.shape == (1, 9)
    for rule in RULES:
        for sampled in (False, True):
            decode = decode_config(drafter="model", rule=rule, top_k=1, depth=3)
            drafted = SpeculativeDecoder.from_pretrained(
                Target(whole), draft_model=Target(broken, probe=False), decode=decode
            )
            with pytest.raises(EagleError, match=r"^step 2: the drafter's logits after token"):
                drafted.generate(ids, do_sample=sampled, seed=1, **ask)


@pytest.mark.parametrize("rule", [None, *RULES, "beams"])
def test_greedy_decoding_leaves_torchs_generator_alone(rule: str | None, target: Target) -> None:
    plain = rule in (None, "beams")
    decoder = SpeculativeDecoder(target) if plain else drafting(target, str(rule))
    ids, ask = torch.tensor([[5, 6, 7], [8, 9, 10]]), dict(max_new_tokens=4, eos_token_id=[])
    before = torch.get_rng_state()
    decoder.generate(ids, num_beams=2 if rule == "beams" else 1, **ask)
    if rule != "beams":
        decoder.generate(ids, do_sample=True, temperature=[0, 0], **ask)
    assert torch.equal(torch.get_rng_state(), before)
    if rule != "beams":
        decoder.generate(ids, do_sample=True, **ask)
        assert not torch.equal(torch.get_rng_state(), before)
