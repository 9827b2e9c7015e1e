"""Confidence is fitted to acceptance monotonically, as the definition of isotonic regression says."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.eval.tuner.calibration import ConfidenceCounts, isotonic


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=6),
)
@settings(deadline=None)
def test_the_fit_is_the_best_of_all_monotone_ones(pairs: list[tuple[int, int]]) -> None:
    values, weights = [float(v) for v, _ in pairs], [float(w) for _, w in pairs]
    fitted = isotonic(values, weights)
    assert all(low <= high for low, high in itertools.pairwise(fitted))

    def loss(candidate: list[float]) -> float:
        return sum(w * (v - c) ** 2 for v, w, c in zip(values, weights, candidate))

    # The optimum is constant on runs, with the run's weighted mean: try every way to cut into runs.
    best = np.inf
    for cuts in itertools.product([False, True], repeat=len(values) - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(values)]
        means = []
        for start, end in itertools.pairwise(ends):
            mean = np.average(values[start:end], weights=weights[start:end])
            means += [float(mean)] * (end - start)
        if all(low <= high + 1e-12 for low, high in itertools.pairwise(means)):
            best = min(best, loss(means))
    assert loss(fitted) == pytest.approx(best, abs=1e-9)


def test_nodes_are_counted_by_confidence_and_acceptance_is_read_off_between_the_bins() -> None:
    counts = ConfidenceCounts()
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.01, 1.0, 20_000)
    # A head that believes twice as much as it should.
    counts.add(np.log(confidence), rng.uniform(size=20_000) < confidence / 2)
    counts.add(np.array([-np.inf, 0.0]), np.array([False, True]))
    fit = counts.fitted()
    assert sum(fit.nodes) == 20_002
    assert fit.calibrated == sorted(fit.calibrated)
    assert fit.probability(np.array([0.2, 0.5, 0.8])) == pytest.approx([0.1, 0.25, 0.4], abs=0.03)
    assert fit.error == pytest.approx(np.mean(confidence) / 2, abs=0.02)
    assert ConfidenceCounts().fitted().nodes == []
