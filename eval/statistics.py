"""Medians, ratios and their bootstrap intervals; the chi-square test.

n values, U units: what a bootstrap draws with replacement. Values of one unit (the turns of a prompt) go together, so they
are drawn together: an interval over single turns would be too narrow. R resamples.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch

Unit = Literal["prompt", "group", "turn"]
"""prompt: a prompt with all its turns; group: rows decoded together; turn: one request, of older results alone."""

FEWEST = 6
"""Units from which on a 95% interval of a median exists: even the whole range of 5 misses it in 2 / 2^5 = 6% of cases."""
RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median with its bootstrap interval, and the pooled ratio beside it."""

    median: float
    low: float
    high: float
    pooled: float
    """The baseline's seconds for as many tokens as the method's / the method's seconds: long answers count for more."""
    samples: int
    """Ratios that the median is of"""
    units: int
    """Units that the interval was drawn from; fewer than FEWEST: it says nothing, and is not shown"""
    unit: Unit


def median(values: Sequence[float]) -> float | None:
    """The median, None of nothing."""
    return float(np.median(values)) if len(values) else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` (0..1) of the values do not exceed, linear between neighbours; None of nothing."""
    return float(np.quantile(values, share)) if len(values) else None


def drawn(units: Sequence[Hashable], *, resamples: int, seed: int) -> np.ndarray:
    """int64 [R, n]: how often each value is in each resample. units: whose value each is; units are drawn with replacement,
    as many as there are, each with all its values. The same units and seed give the same resamples."""
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    draws_RU = np.random.default_rng(seed).integers(0, len(places), size=(resamples, len(places)))
    times_RU = np.stack([np.bincount(draw, minlength=len(places)) for draw in draws_RU])
    return times_RU[:, [places[unit] for unit in units]]


def bootstrap_interval(
    values: Sequence[float],
    *,
    units: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median. units: whose each value is (None: every value is a unit of its own).

    The same values and seed give the same interval. One unit gives an interval without width: it says nothing.
    """
    assert len(values) > 0
    assert 0.0 < confidence < 1.0
    array_n = np.asarray(values, dtype=np.float64)
    order = np.argsort(array_n)
    times_Rn = drawn(range(len(array_n)) if units is None else units, resamples=resamples, seed=seed)[:, order]
    upto_Rn, counts_R = times_Rn.cumsum(axis=1), times_Rn.sum(axis=1)
    middle_R2 = [(upto_Rn > half_R[:, None]).argmax(axis=1) for half_R in ((counts_R - 1) // 2, counts_R // 2)]
    medians_R = np.mean([array_n[order][place_R] for place_R in middle_R2], axis=0)
    return _percentiles(medians_R, confidence)


def pooled_interval(
    parts: Sequence[tuple[float, float]], *, units: Sequence[Hashable], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """95% percentile bootstrap interval of sum of numerators / sum of denominators. parts: (numerator, denominator) each."""
    sums_R2 = drawn(units, resamples=resamples, seed=seed) @ np.asarray(parts, dtype=np.float64)
    return _percentiles(sums_R2[:, 0] / np.maximum(sums_R2[:, 1], 1e-300))


def _percentiles(found_R: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    low, high = np.quantile(found_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_ratio(
    baseline: Sequence[float],
    method: Sequence[float],
    *,
    tokens: Sequence[int],
    units: Sequence[Hashable] | None = None,
    unit: Unit,
    seed: int = 0,
) -> Estimate | None:
    """The speed-up over pairs: the median of baseline / method with its 95% interval, and pooled.

    baseline, method: seconds per token of each pair; tokens: the method's. Pooled, a pair counts by the method's tokens on both
    sides: the baseline's text may be a longer or a shorter one. units: the `unit` that each pair is of, such as its prompt
    (None: each is one of its own). None when there is no pair.
    """
    units = range(len(baseline)) if units is None else units
    assert len(baseline) == len(method) == len(tokens) == len(units)
    if not len(baseline):
        return None
    ratios = np.asarray(baseline, dtype=np.float64) / np.asarray(method, dtype=np.float64)
    low, high = bootstrap_interval(ratios.tolist(), units=units, seed=seed)
    pooled = float(np.dot(baseline, tokens) / np.dot(method, tokens))
    return Estimate(
        median=float(np.median(ratios)),
        low=low,
        high=high,
        pooled=pooled,
        samples=len(ratios),
        units=len(set(units)),
        unit=unit,
    )


def falls_through_one(points: Sequence[tuple[float, float | None]]) -> float | None:
    """Where a curve of speed-ups falls through 1 for good, linear between the points around it.

    points: (x, y) by ascending x, y None where it is not known. None: it does not fall, or a point needed is not known
    (eagle/eval/ledger/crossing.py says which).
    """
    for (low, above), (high, below) in reversed(list(itertools.pairwise(points))):
        if above is None or below is None or below >= 1:
            return None
        if above >= 1:
            return low + (above - 1) / (above - below) * (high - low)
    return None


def paired_difference(
    pairs: Sequence[Sequence[tuple[float, float]]], *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, float]:
    """Difference of two pooled ratios over the same prompts, with its 95% percentile bootstrap interval over them.

    pairs: per prompt ((numerator, denominator) of one method, the same of the other); the figure of a method is the sum of
    its numerators / the sum of its denominators. Keys: difference (first - second), low, high, pairs.
    """
    assert len(pairs) > 0
    parts_P22 = np.asarray(pairs, dtype=np.float64)

    def difference(sums_x22: np.ndarray) -> np.ndarray:
        ratios_x2 = sums_x22[..., 0] / np.maximum(sums_x22[..., 1], 1e-300)
        return np.asarray(ratios_x2[..., 0] - ratios_x2[..., 1])

    times_RP = drawn(range(len(pairs)), resamples=resamples, seed=seed)
    low, high = _percentiles(difference(np.einsum("rp,pij->rij", times_RP, parts_P22)))
    whole = float(difference(parts_P22.sum(axis=0)))
    return {"difference": whole, "low": low, "high": high, "pairs": len(pairs)}


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
