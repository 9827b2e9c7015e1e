"""The batch sweep: every row's text is the same at every batch size, and a method that is not exact gets no ratio."""

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval import throughput
from eagle.eval.batch_answer import BatchAnswer
from eagle.eval.settings import parse_setting
from eagle.eval.statistics import Estimate
from eagle.eval.throughput import BatchPoint, crossing, measure
from eagle.eval.tuner.confirm import _measured
from eagle.eval.tuner.tree_search import NO_DRAFTING
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = Target.from_pretrained(tiny_model())
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()
    return SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(budget=6, top_k=2, depth=3))


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["T=0", "T=0.9 top_p=0.9"])
def test_every_batch_size_answers_every_prompt_with_the_same_tokens(decoder: SpeculativeDecoder, setting: str) -> None:
    points = measure(decoder, PROMPTS, batches=[1, 2, 4], setting=parse_setting(setting), max_new_tokens=12)
    assert [point.batch for point in points] == [1, 2, 4]
    for point in points:
        assert point.different == 0
        assert point.tau >= 1
        assert point.speedup is not None
        assert point.tokens_per_second > 0


@pytest.mark.slow
def test_a_batch_size_whose_tokens_differ_gets_no_ratio(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = throughput._answer

    def lying(which: SpeculativeDecoder, prompts: list[list[int]], *rest: object) -> BatchAnswer:
        group = honest(which, prompts, *rest)
        if which.drafter is not None and len(prompts) == 2:
            group.tokens[1][0] += 1
        return group

    monkeypatch.setattr(throughput, "_answer", lying)
    points = measure(decoder, PROMPTS, batches=[1, 2], setting=parse_setting("T=0"), max_new_tokens=8)
    assert [point.different for point in points] == [0, 2]
    assert points[0].speedup is not None
    assert points[1].speedup is None


def test_the_crossing_is_between_the_sizes_where_the_gain_turns_into_a_loss() -> None:
    def point(batch: int, pooled: float) -> BatchPoint:
        ratio = Estimate(median=pooled, low=pooled, high=pooled, pooled=pooled, samples=1, units=1, unit="group")
        return BatchPoint(
            batch=batch,
            plain_tokens_per_second=1.0,
            tokens_per_second=1.0,
            tau=2.0,
            tau_raw=2.0,
            different=0,
            speedup=ratio,
        )

    assert crossing([point(1, 1.5), point(2, 1.25), point(4, 0.75)]) == pytest.approx(3.0)
    assert crossing([point(1, 1.5), point(2, 1.2)]) is None
    assert crossing([point(1, 0.9), point(2, 0.8)]) is None
    assert crossing([point(1, 0.9), point(2, 1.1), point(4, 0.9)]) == pytest.approx(3.0)
    assert crossing([point(1, 1.2), point(2, 0.9), point(4, 1.1)]) is None, "it does not stay below 1"


def test_nothing_to_time_is_told(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(EagleError, match="there is no prompt to answer"):
        measure(decoder, [], batches=[1], setting=parse_setting("T=0"), max_new_tokens=4)
    with pytest.raises(EagleError, match=r"eval\.max_new_tokens is 1, expected 2"):
        measure(decoder, PROMPTS, batches=[1], setting=parse_setting("T=0"), max_new_tokens=1)


def answered(tokens: int, seconds: float) -> BatchAnswer:
    """One row with so many tokens behind the prefill's."""
    return BatchAnswer(tokens=[[0] * (tokens + 1)], stats=[DecodeStats(accepted=[0] * tokens)], seconds=seconds)


def test_pooled_the_baseline_counts_for_as_many_tokens_as_the_method_said() -> None:
    """Behind a tie the texts may be of different lengths."""
    pairs = [(answered(10, 10.0), answered(20, 10.0)), (answered(10, 10.0), answered(10, 10.0))]
    pooled = pytest.approx((1.0 * 20 + 1.0 * 10) / (10 + 10))
    assert throughput._point(1, pairs, 0).speedup.pooled == pooled  # type: ignore[union-attr]
    plain, drafted = ([pair[which] for pair in pairs] for which in (0, 1))
    assert _measured(NO_DRAFTING, drafted, plain).speedup.pooled == pooled


def test_batch_sizes_must_divide_the_prompts(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(EagleError, match="batch size 3 does not divide the 4 prompts"):
        measure(decoder, PROMPTS, batches=[3], setting=parse_setting("T=0"), max_new_tokens=4)
