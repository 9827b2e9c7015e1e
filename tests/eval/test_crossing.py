"""What is said of a curve and 1: no more than was measured."""

import pytest

from eagle.eval.ledger.crossing import against_one


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(1, 1.5), (2, 1.25), (4, 0.75)], "falls through 1 at batch 3.0"),
        ([(1, 1.5), (2, 1.25)], "stays at or above 1 at all of these batch sizes"),
        ([(1, 0.9), (2, 0.8)], "stays below 1 at all of these batch sizes"),
        ([(1, 1.5), (2, None), (4, 0.5)], "is not known at batch 2, so nothing can be said of where it crosses 1"),
        ([(1, 0.8), (2, 0.9), (4, 1.2)], "rises through 1 or dips: it is below 1 at batch 1, 2, not at batch 4"),
        ([(1, 1.2), (2, 0.9), (4, 1.1)], "rises through 1 or dips: it is below 1 at batch 2, not at batch 1, 4"),
        ([(1, 0.9), (2, 1.1), (4, 0.9)], "falls through 1 at batch 3.0 for good, but is below it at batch 1 too"),
        ([(1, None), (2, 1.1), (4, 0.9)], "falls through 1 at batch 3.0 for good, but is not known at batch 1"),
        ([(1, None), (2, None)], ""),
    ],
)
def test_a_curve_is_said_to_do_what_it_does(points: list[tuple[float, float | None]], said: str) -> None:
    assert against_one(points) == said
