"""Every figure on hand-made answers whose values can be checked by hand."""

import numpy as np
import pytest

from eagle.eval.answers import Answer, Request
from eagle.eval.checks.found import Exactness
from eagle.eval.figures import acceptance_per_depth, figures
from eagle.eval.statistics import bootstrap_interval, paired_ratio
from eagle.eval.summarise import summarise_setting
from eagle.sample.stats import DecodeStats

CHECKS = {"hf": "none", "plain": "hf", "eagle2": "plain", "chain": "plain"}


def answer(
    tokens: int, seconds: float, accepted: list[int] | None = None, first: float = 0.5, drafting: bool = True
) -> Answer:
    """`accepted`: drafts per verify step, counted per depth by DecodeStats; a path of 3 drafts ends at a leaf."""
    stats = DecodeStats()
    for count in accepted or []:
        stats.count_step(path_length=count + 1, at_leaf=count == 3 or not drafting)
    return Answer(
        tokens=list(range(tokens)),
        seconds=seconds,
        first_token_seconds=first,
        accepted=stats.accepted,
        attempts_per_depth=stats.attempts_per_depth,
        accepted_per_depth=stats.accepted_per_depth,
        prefill_seconds=first,
        draft_seconds=0.25,
        verify_seconds=0.75,
    )


def request(name: str, *, slow: float = 1.0, category: str = "c", divergences: dict | None = None) -> Request:
    answers = {
        "hf": answer(7, 7.0 * slow),
        "plain": answer(7, 3.5 * slow, [0] * 6, drafting=False),
        # One token from prefill, then (2 + 1) + (0 + 1) + (1 + 1): the walk's 6 tokens, all kept.
        "eagle2": answer(7, 2.0 * slow, [2, 0, 1]),
        "chain": answer(7, 2.8 * slow, [1, 2, 0, 0]),
    }
    return Request(
        prompt=name,
        turn=0,
        category=category,
        setting="T=0",
        seed=0,
        prompt_tokens=5,
        order=list(answers),
        answers=answers,
        divergences=divergences or {},
    )


def test_tau_counts_accepted_plus_one_per_verify_step_and_not_the_prefill_token() -> None:
    values = figures([request("a"), request("b")], "eagle2", baselines=["plain", "hf"])
    assert values.verify_steps == 6
    assert values.tau == pytest.approx(1 + 3 / 3) == values.tau_raw


def test_tau_leaves_out_what_eos_or_the_limit_cut_off_and_the_raw_one_beside_it_does_not() -> None:
    cut = request("a")
    cut.answers["eagle2"] = answer(4, 2.0, [2, 3])
    values = figures([cut], "eagle2", baselines=[])
    assert (values.tau, values.tau_raw) == (pytest.approx(1.5), pytest.approx(3.5))
    assert values.tau * values.verify_steps == values.new_tokens - values.requests


def test_acceptance_is_conditional_on_the_depth_before_it_and_pooled_over_answers() -> None:
    # Four steps: all stand at the root, two go on; of these two one goes on, and it stops at depth 2.
    assert acceptance_per_depth([answer(7, 1.0, [1, 2, 0, 0])]) == [0.5, 0.5, 0.0]
    assert acceptance_per_depth([answer(7, 1.0, [1]), answer(7, 1.0, [2, 0, 0])]) == [0.5, 0.5, 0.0]
    assert acceptance_per_depth([answer(7, 1.0, [3, 3])]) == [1.0, 1.0, 1.0], "a leaf at depth 3 counts as no attempt"
    assert acceptance_per_depth([answer(7, 1.0, [0], drafting=False)]) == []


def test_speed_figures() -> None:
    values = figures([request("a"), request("b", slow=3.0)], "eagle2", baselines=["plain", "hf"])
    assert values.new_tokens == 14
    assert values.tokens_per_second == pytest.approx(14 / 8)
    assert values.ms_per_token == pytest.approx(1e3 * (2 / 7 + 6 / 7) / 2)
    assert values.decode_ms_per_token == pytest.approx(1e3 * (1.5 / 6 + 5.5 / 6) / 2)
    assert values.first_token_ms == pytest.approx(500)
    assert values.step_ms == pytest.approx(1e3 * (1.5 + 5.5) / 6)
    assert values.shares == pytest.approx({"verify": 1.5 / 7, "draft": 0.5 / 7, "host": 5.0 / 7})


def test_speed_up_is_the_median_of_paired_ratios_so_one_slow_request_does_not_tilt_it() -> None:
    requests = [request("a"), request("b"), request("c")]
    requests[2].answers["hf"] = answer(7, 700.0)
    values = figures(requests, "eagle2", baselines=["plain", "hf"])
    assert values.speedup_hf.median == pytest.approx(3.5)
    assert values.speedup_hf.pooled == pytest.approx(714 / 6)
    assert values.speedup_plain.median == pytest.approx(1.75)


def test_the_pooled_speed_up_counts_a_shorter_text_of_the_baseline_for_as_many_tokens() -> None:
    """Sampled texts of two loops end at different places."""
    one = request("a")
    one.answers["hf"] = answer(2, 2.0)  # 1 s per token; the tree's seven tokens take 2 s
    values = figures([one], "eagle2", baselines=["hf"])
    assert values.speedup_hf.pooled == pytest.approx(7 / 2)
    assert values.speedup_hf.pooled == pytest.approx(values.speedup_hf.median)


def test_plain_and_hugging_face_have_no_acceptance() -> None:
    for name in ("plain", "hf"):
        values = figures([request("a")], name, baselines=["hf"])
        assert (values.tau, values.acceptance) == (None, [])


def test_no_ratio_is_given_for_a_method_that_is_not_exact() -> None:
    different = {"tie": False, "versus": "plain", "index": 3, "margin": 0.5}
    result = summarise_setting([request("a"), request("b", divergences={"eagle2": different})], CHECKS, seed=0)
    tree = result.methods["eagle2"].overall
    assert tree.speedup_hf is None
    assert tree.speedup_plain is None
    assert result.methods["chain"].overall.speedup_plain is not None
    assert tree.exact == Exactness(requests=2, equal=1, ties=0, different=1)
    assert len(result.errors) == 1
    assert "eagle2 is NOT exact" in result.errors[0]


def test_a_method_that_was_not_compared_is_not_called_exact() -> None:
    checks = {name: check for name, check in CHECKS.items() if name != "hf"}
    result = summarise_setting([request("a")], checks, seed=0)
    assert result.methods["plain"].overall.exact is None, "its reference, Hugging Face's loop, did not run"
    assert result.methods["eagle2"].overall.exact.equal == 1


@pytest.mark.parametrize(
    ("method", "found", "over_hf"),
    [
        ("eagle2", {"tie": True, "versus": "plain", "index": 3, "margin": 1e-6}, 3.5),
        # When plain decoding differs from Hugging Face, nobody is compared with Hugging Face.
        ("plain", {"tie": False, "versus": "hf", "index": 1, "margin": 0.5}, None),
    ],
)
def test_a_tie_takes_no_ratio_away_and_a_difference_of_plain_decoding_only_those_over_hugging_face(
    method: str, found: dict, over_hf: float | None
) -> None:
    result = summarise_setting([request("a", divergences={method: found})], CHECKS, seed=0)
    tree = result.methods["eagle2"].overall
    assert (result.errors == []) == found["tie"]
    assert (tree.speedup_hf and tree.speedup_hf.median) == (over_hf and pytest.approx(over_hf))
    assert tree.speedup_plain.median == pytest.approx(1.75)


def test_categories_and_overall_are_pooled_separately() -> None:
    result = summarise_setting([request("a", category="x"), request("b", category="y", slow=2.0)], CHECKS, seed=0)
    tree = result.methods["eagle2"]
    assert set(tree.categories) == {"x", "y"}
    assert tree.overall.requests == 2
    assert tree.categories["y"].tokens_per_second == pytest.approx(7 / 4)


def test_n_alpha_comes_from_the_chain() -> None:
    assert summarise_setting([request("a")], CHECKS, seed=0).n_alpha == [0.5, 0.5, 0.0]


def test_the_bootstrap_interval_covers_the_median_narrows_with_data_and_repeats_with_its_seed() -> None:
    few = np.random.default_rng(0).normal(2.0, 0.5, 20).tolist()
    many = np.random.default_rng(0).normal(2.0, 0.5, 500).tolist()
    low, high = bootstrap_interval(few)
    assert low < np.median(few) < high
    low_many, high_many = bootstrap_interval(many)
    assert high_many - low_many < high - low
    assert bootstrap_interval(few) == (low, high)


def test_the_ratio_of_nothing_is_none() -> None:
    assert paired_ratio([], [], tokens=[], unit="prompt") is None
