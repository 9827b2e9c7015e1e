"""Medians, ratios and their bootstrap intervals; the chi-square test."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

FEWEST = 6
"""Samples from which on a 95% interval of a median exists: even the whole range of 5 misses it in 2 / 2^5 = 6% of cases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median with its bootstrap interval, and the pooled ratio beside it."""

    median: float
    low: float
    high: float
    pooled: float
    """The baseline's seconds for as many tokens as the method's / the method's seconds: long answers count for more."""
    samples: int


def median(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return float(np.median(values)) if len(values) else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` (0..1) of the values do not exceed, linear between neighbours; None of nothing."""
    return float(np.quantile(values, share)) if len(values) else None


def bootstrap_interval(
    values: Sequence[float], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median: values are drawn with replacement `resamples` times.

    The same values and seed give the same interval. One value gives an interval without width: it says nothing.
    """
    assert len(values) > 0
    assert 0.0 < confidence < 1.0
    array_n = np.asarray(values, dtype=np.float64)
    draws_rn = np.random.default_rng(seed).integers(0, len(array_n), size=(resamples, len(array_n)))
    medians_r = np.median(array_n[draws_rn], axis=1)
    low, high = np.quantile(medians_r, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_ratio(
    baseline: Sequence[float], method: Sequence[float], *, tokens: Sequence[int], seed: int = 0
) -> Estimate | None:
    """The speed-up over pairs: the median of baseline / method with its 95% interval, and pooled.

    baseline, method: seconds per token of each pair; tokens: the method's. Pooled, a pair counts by the method's tokens on both
    sides: the baseline's text may be a longer or a shorter one. None when there is no pair.
    """
    assert len(baseline) == len(method) == len(tokens)
    if not len(baseline):
        return None
    ratios = np.asarray(baseline, dtype=np.float64) / np.asarray(method, dtype=np.float64)
    low, high = bootstrap_interval(ratios.tolist(), seed=seed)
    pooled = float(np.dot(baseline, tokens) / np.dot(method, tokens))
    return Estimate(median=float(np.median(ratios)), low=low, high=high, pooled=pooled, samples=len(ratios))


def falls_through_one(points: Sequence[tuple[float, float | None]]) -> float | None:
    """Where a curve of speed-ups falls through 1 for good, linear between the points around it.

    points: (x, y) by ascending x, y None where it is not known. None: it does not fall, or a point needed is not known
    (eagle/eval/crossing.py says which).
    """
    for (low, above), (high, below) in reversed(list(itertools.pairwise(points))):
        if above is None or below is None or below >= 1:
            return None
        if above >= 1:
            return low + (above - 1) / (above - below) * (high - low)
    return None


def paired_difference(
    pairs: Sequence[Sequence[tuple[float, float]]], *, resamples: int = 2000, seed: int = 0
) -> dict[str, float]:
    """Difference of two pooled ratios over the same requests, with its 95% percentile bootstrap interval over them.

    pairs: per request ((numerator, denominator) of one method, the same of the other); the figure of a method is the sum of
    its numerators / the sum of its denominators. Keys: difference (first - second), low, high, pairs.
    """
    assert len(pairs) > 0
    parts_P22 = np.asarray(pairs, dtype=np.float64)
    draws_rP = np.random.default_rng(seed).integers(0, len(pairs), size=(resamples, len(pairs)))

    def difference(sums_x22: np.ndarray) -> np.ndarray:
        ratios_x2 = sums_x22[..., 0] / np.maximum(sums_x22[..., 1], 1e-300)
        return np.asarray(ratios_x2[..., 0] - ratios_x2[..., 1])

    low, high = np.quantile(difference(np.stack([parts_P22[draw].sum(axis=0) for draw in draws_rP])), [0.025, 0.975])
    whole = float(difference(parts_P22.sum(axis=0)))
    return {"difference": whole, "low": float(low), "high": float(high), "pairs": len(pairs)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """What Pearson's chi-square test says."""

    p_value: float
    degrees: int
    """Of freedom: cells that were compared, less one. 0: a single cell; nothing was tested, and p_value is 1"""


def chi_square(counts_V: Sequence[int], probabilities_V: Sequence[float]) -> ChiSquare:
    """Pearson's chi-square test that the counts were drawn with the probabilities.

    Cells that expect fewer than 5 are pooled, the smallest first. A count where the probability is 0 gives 0.
    """
    counts = np.asarray(counts_V, dtype=np.float64)
    expected = np.asarray(probabilities_V, dtype=np.float64)
    assert counts.shape == expected.shape
    if counts[expected == 0].sum():
        return ChiSquare(p_value=0.0, degrees=int((expected > 0).sum()))  # the impossible is one more cell
    expected = expected / expected.sum() * counts.sum()
    order = np.argsort(expected)
    pooled = max(int((np.cumsum(expected[order]) < 5).sum()) + 1, int((expected < 5).sum()))
    group = np.maximum(np.arange(len(order)) - pooled + 1, 0)
    counts_G, expected_G = np.bincount(group, counts[order]), np.bincount(group, expected[order])
    degrees = len(counts_G) - 1
    if not degrees:
        return ChiSquare(p_value=1.0, degrees=0)
    statistic = ((counts_G - expected_G) ** 2 / expected_G).sum()
    half = torch.tensor([degrees, statistic], dtype=torch.float64) / 2
    return ChiSquare(p_value=float(torch.special.gammaincc(half[0], half[1])), degrees=degrees)


def chi_square_p_value(counts_V: Sequence[int], probabilities_V: Sequence[float]) -> float:
    """The p-value of `chi_square`."""
    return chi_square(counts_V, probabilities_V).p_value
