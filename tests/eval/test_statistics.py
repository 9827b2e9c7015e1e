"""The chi-square test: its p-values are uniform under the hypothesis, small beside it. Intervals hold the truth as often as
they say, also where a prompt's turns are alike."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.eval.report.parts import ratio_text
from eagle.eval.statistics import (
    ChiSquare,
    bootstrap_interval,
    chi_square,
    chi_square_p_value,
    drawn,
    paired_ratio,
    pooled_interval,
)


def test_the_textbook_value() -> None:
    """Statistic 4.214, 2 degrees of freedom."""
    assert abs(chi_square_p_value([50, 30, 20], [0.4, 0.35, 0.25]) - 0.121585) < 1e-6


def test_p_values_are_uniform_when_the_hypothesis_holds_even_with_rare_cells() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.full(30, 0.3))
    values = [
        chi_square_p_value(generator.multinomial(300, probabilities).tolist(), probabilities.tolist())
        for _ in range(1000)
    ]
    assert np.abs(np.quantile(values, [0.05, 0.25, 0.5, 0.75]) - [0.05, 0.25, 0.5, 0.75]).max() < 0.05


def test_a_wrong_distribution_is_found_and_an_impossible_count_is_certain() -> None:
    counts = np.random.default_rng(1).multinomial(2000, [0.3, 0.3, 0.4]).tolist()
    assert chi_square_p_value(counts, [0.25, 0.35, 0.4]) < 1e-4
    assert chi_square_p_value([5, 0, 1], [0.5, 0.5, 0.0]) == 0.0


def test_too_few_counts_say_nothing_and_have_no_degree_of_freedom() -> None:
    assert chi_square_p_value([3, 1], [0.5, 0.5]) == 1.0
    assert chi_square([3, 1], [0.5, 0.5]) == ChiSquare(p_value=1.0, degrees=0)
    assert chi_square([400, 0], [0.999, 0.001]).degrees == 0, "a cold setting: one cell expects nearly all"
    assert chi_square([50, 30, 20], [0.4, 0.35, 0.25]).degrees == 2
    assert chi_square([50, 30, 3, 2], [0.6, 0.35, 0.03, 0.02]).degrees == 1, "rare cells are one, with the next"
    assert chi_square([5, 0, 1], [0.5, 0.5, 0.0]).degrees > 0, "the impossible is no lack of rows"


def _prompts_of_alike_turns(generator: np.random.Generator) -> tuple[list[float], list[int]]:
    """Log ratios of 20 prompts with 5 turns each, whose median is 0: most of a turn's luck is its prompt's."""
    values_PT = generator.normal(0.0, 1.0, (20, 1)) + generator.normal(0.0, 0.5, (20, 5))
    return values_PT.flatten().tolist(), np.repeat(np.arange(20), 5).tolist()


@pytest.mark.slow
def test_intervals_over_prompts_hold_the_truth_where_those_over_single_turns_do_not() -> None:
    generator, held = np.random.default_rng(0), {"prompts": 0, "turns": 0, "pooled": 0}
    for _ in range(300):
        values, prompts = _prompts_of_alike_turns(generator)
        intervals = {
            "prompts": bootstrap_interval(values, units=prompts, resamples=400),
            "turns": bootstrap_interval(values, resamples=400),
            "pooled": pooled_interval([(value, 1.0) for value in values], units=prompts, resamples=400),
        }
        for name, (low, high) in intervals.items():
            held[name] += low <= 0.0 <= high
    assert held["prompts"] >= 0.90 * 300
    assert held["pooled"] >= 0.88 * 300, "of a mean over 20 units a percentile interval covers some 93%"
    assert held["turns"] <= 0.75 * 300, "it takes a hundred turns for a hundred independent ones"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=12))
def test_a_resample_holds_whole_prompts_and_its_median_is_numpys(turns: list[tuple[int, int]]) -> None:
    prompts, values = [prompt for prompt, _ in turns], [float(value) for _, value in turns]
    times_Rn = drawn(prompts, resamples=50, seed=3)
    for row_n in times_Rn:
        assert len({(prompt, int(count)) for prompt, count in zip(prompts, row_n)}) == len(set(prompts))
        assert sum(dict(zip(prompts, row_n.tolist())).values()) == len(set(prompts)), "as many as there are"
    medians = [np.median(np.repeat(values, row_n)) for row_n in times_Rn]
    expected = np.quantile(medians, [0.025, 0.975])
    assert bootstrap_interval(values, units=prompts, resamples=50, seed=3) == pytest.approx(tuple(expected))


def test_an_estimate_says_how_many_prompts_its_interval_drew() -> None:
    ratio = paired_ratio([1.0] * 10, [0.5] * 10, tokens=[8] * 10, units=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4], unit="prompt")
    assert ratio is not None
    assert (ratio.samples, ratio.units) == (10, 5)
    assert ratio_text(dataclasses.replace(ratio, low=1.9, high=2.1)) == "2.00x", "five prompts have no interval"
    wide = dataclasses.replace(ratio, low=1.9, high=2.1, units=6)
    assert ratio_text(wide) == "2.00x [1.90, 2.10]"
