"""The chi-square test: its p-values are uniform under the hypothesis, small beside it."""

import numpy as np
import pytest

from eagle.errors import EagleError
from eagle.eval.chi_square import main
from eagle.eval.statistics import ChiSquare, chi_square, chi_square_p_value


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


@pytest.mark.parametrize(
    ("option", "value"),
    [("--rows", "0"), ("--batch", "0"), ("--temperature", "0"), ("--top-k", "0"), ("--top-k", "50"), ("--prompt", " ")],
)
def test_what_the_command_cannot_measure_is_told_before_anything_is_loaded(option: str, value: str) -> None:
    with pytest.raises(EagleError, match=rf"{option} is"):
        main(["--target", "/nowhere", "--head", "/nowhere", option, value])
