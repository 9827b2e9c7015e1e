"""With the engine cudagraph nothing is captured within a timed answer: every capacity of buffers is met before."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.make import make_drafter
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuning import TreeSettings
from eagle.eval import throughput
from eagle.eval.answers import Answer, AnswerLog
from eagle.eval.methods import make_methods
from eagle.eval.runner import SHORT_REPLY, Runner
from eagle.eval.settings import parse_setting
from eagle.eval.suites.prompt import Prompt
from eagle.eval.tuner import confirm as confirming
from eagle.eval.tuner.confirm import confirm
from eagle.eval.tuner.tree_search import NO_DRAFTING
from eagle.eval.warm_up import capacity, warm_ups
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.progress import ProgressBar
from eagle.target import fixed_cache as static_cache
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
DECODE = decode_config(engine="cudagraph", budget=6, top_k=2, depth=3)
SHORT, LONG = [5, 6, 7], [5 + i % 200 for i in range(210)]


@pytest.fixture
def target() -> Target:
    target = Target.from_pretrained(tiny_model(), tiny_tokenizer())
    target.use_engine("cudagraph", capture="none")
    return target


@pytest.fixture
def made(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Capacities of buffers in the order they are made: what is recorded on new ones is recorded anew."""
    seen: list[int] = []

    class Noted(static_cache.Buffers):
        def __init__(self, **sizes: int):
            seen.append(sizes["capacity"])
            super().__init__(**sizes)

    monkeypatch.setattr(static_cache, "Buffers", Noted)
    return seen


def head_of(target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


def prompt(target: Target, *, tokens: int, turns: int = 1) -> Prompt:
    """One whose first turn has at least so many tokens, and hardly more."""
    text = "hello"
    while len(prompt_ids(target.tokenizer, [{"role": "user", "content": text}])) < tokens:
        text += " cat"
    return Prompt(id=f"p/{tokens}", category="c", turns=(text, "the dog")[:turns], reference=(), source="p")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "turns", "why"),
    [
        (150, 1, "a warm-up of 16 tokens would need the smaller buffers"),
        (100, 2, "the first turn needs the smaller buffers, the second the larger ones for its long reply"),
    ],
)
def test_no_request_needs_buffers_that_were_not_warmed_up(
    target: Target, made: list[int], tmp_path: Path, tokens: int, turns: int, why: str
) -> None:
    asked, first = prompt(target, tokens=tokens, turns=turns), prompt(target, tokens=20)
    methods = make_methods(("plain", "eagle2"), target, head_of(target), decode=DECODE, chain_depth=2)
    runner = Runner(target, methods, [parse_setting("T=0")], max_new_tokens=40)
    runner.warm_up([first], [first, asked])
    warm = len(made)
    with AnswerLog(tmp_path / "answers.jsonl", {}) as log, ProgressBar("", total=0, unit="", quiet=True) as bar:
        runner.answer(first, log, bar)
        runner.answer(asked, log, bar)
        lengths = [request.prompt_tokens for request in log.requests.values()]
    assert {capacity(length, 40) for length in lengths} == {256, 512}, why
    if turns > 1:
        said = {"role": "assistant", "content": SHORT_REPLY}
        messages = [{"role": "user", "content": turn} for turn in asked.turns]
        messages.insert(1, said)
        assert capacity(len(prompt_ids(target.tokenizer, messages)), 40) == 256, "a short reply would not do"
    assert made[warm:] == []


def test_on_other_engines_one_short_answer_warms_up() -> None:
    target = Target.from_pretrained(tiny_model(), tiny_tokenizer())
    calls: list[int] = []
    methods = make_methods(("plain",), target, None, decode=decode_config(), chain_depth=2)

    def run(ids_1T: torch.Tensor, limit: int, setting: object, seed: int) -> Answer:
        calls.append(limit)
        return Answer(tokens=[1], seconds=1.0, first_token_seconds=1.0)

    one = prompt(target, tokens=20)
    methods = {"plain": dataclasses.replace(methods["plain"], run=run)}
    runner = Runner(target, methods, [parse_setting("T=0")], max_new_tokens=40)
    runner.warm_up([one], [one, prompt(target, tokens=300)])
    assert calls == [16]
    assert warm_ups(target, [[SHORT], [LONG]], few=8, max_new_tokens=40) == [(0, 8)]


def test_of_the_groups_of_one_capacity_the_longest_warms_up_with_a_whole_answer(target: Target) -> None:
    groups = [[SHORT], [SHORT, SHORT * 2], [LONG, SHORT], [LONG * 3]]
    assert warm_ups(target, groups, few=8, max_new_tokens=12) == [(1, 12), (2, 12), (3, 12)]


def noting(answer: Callable[..., Any], made: list[int]) -> tuple[Callable[..., Any], list[list[int]]]:
    """An answering function that notes what buffers each call made."""
    calls: list[list[int]] = []

    def noted(*arguments: Any, **named: Any) -> Any:
        before = len(made)
        result = answer(*arguments, **named)
        calls.append(made[before:])
        return result

    return noted, calls


@pytest.mark.slow
def test_a_batch_size_is_timed_on_buffers_that_are_there(
    target: Target, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(target, head_of(target), decode=DECODE)
    noted, calls = noting(throughput._answer, made)
    monkeypatch.setattr(throughput, "_answer", noted)
    throughput.measure(decoder, [SHORT, LONG], batches=[1], setting=parse_setting("T=0"), max_new_tokens=12)
    assert len(calls) == 8, "two capacities and two prompts, by two decoders"
    assert {slots for one in calls for slots in one} >= {256, 512}
    assert [one for one in calls[-4:] if one] == []


@pytest.mark.slow
def test_candidates_are_confirmed_on_buffers_that_are_there(
    target: Target, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(target, DECODE, head=head_of(target))
    assert isinstance(drafter, HeadDrafter)
    noted, calls = noting(confirming.decoded, made)
    monkeypatch.setattr(confirming, "decoded", noted)
    confirm(
        SpeculativeDecoder(target, drafter),
        drafter,
        [SHORT, LONG],
        [NO_DRAFTING, TreeSettings(budget=6, top_k=2, depth=3)],
        setting=parse_setting("T=0"),
        batch=1,
        max_new_tokens=12,
    )
    assert len(calls) == 8
    assert [one for one in calls[-4:] if one] == []
