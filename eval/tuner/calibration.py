"""From a draft's confidence to the probability that it is accepted: a monotone fit over what was seen.

Confidence is what the head believes of a node, the product of its probabilities along the path; acceptance is what the
target made of it. The fit is isotonic regression by pool-adjacent-violators (Barlow et al. 1972) over bins of log-confidence.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

EDGES = np.concatenate([[-np.inf], np.linspace(np.log(1e-4), 0.0, 49)])
"""Bins of log-confidence: one for everything below 1e-4, then 48 of equal width up to 1."""


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted squares. Weights above 0."""
    assert len(values) == len(weights)
    assert all(weight > 0 for weight in weights)
    pools: list[list[float]] = []  # [mean, weight, members], means strictly increasing
    for value, weight in zip(values, weights):
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, mass, members = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + mean * mass) / (before[1] + mass)
            before[1] += mass
            before[2] += members
    return [mean for mean, _, members in pools for _ in range(int(members))]


@dataclasses.dataclass
class ConfidenceCounts:
    """Nodes seen, by bin of log-confidence: how many, the sum of their confidences, and how many were accepted."""

    nodes: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(EDGES) - 1))
    confidence: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(EDGES) - 1))
    accepted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(EDGES) - 1))

    def add(self, log_confidence_M: np.ndarray, accepted_M: np.ndarray) -> None:
        """Counts M nodes; accepted_M: bool."""
        bins_M = np.clip(np.searchsorted(EDGES, log_confidence_M, side="left") - 1, 0, len(EDGES) - 2)
        size = len(EDGES) - 1
        self.nodes += np.bincount(bins_M, minlength=size)
        self.confidence += np.bincount(bins_M, weights=np.exp(log_confidence_M), minlength=size)
        self.accepted += np.bincount(bins_M, weights=accepted_M.astype(float), minlength=size)

    def fitted(self) -> "Calibration":
        """Raises nothing: of no nodes at all the calibration is empty."""
        seen = self.nodes > 0
        nodes, accepted = self.nodes[seen], self.accepted[seen]
        return Calibration(
            confidence=(self.confidence[seen] / nodes).tolist(),
            accepted=(accepted / nodes).tolist(),
            calibrated=isotonic((accepted / nodes).tolist(), nodes.tolist()),
            nodes=nodes.astype(int).tolist(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """One entry per bin that held a node, by ascending confidence."""

    confidence: list[float]
    """Mean confidence in the bin"""
    accepted: list[float]
    """Share of its nodes that the target accepted (whose whole path it took)"""
    calibrated: list[float]
    """The same, made monotone"""
    nodes: list[int]

    @property
    def error(self) -> float:
        """Mean absolute difference of confidence and acceptance over the nodes that say something (confidence above 1%)."""
        rows = [(c, a, n) for c, a, n in zip(self.confidence, self.accepted, self.nodes) if c > 0.01]
        return sum(abs(c - a) * n for c, a, n in rows) / max(1, sum(n for *_, n in rows))

    def probability(self, confidence: np.ndarray) -> np.ndarray:
        """Calibrated acceptance, linear between the bins' means."""
        return np.interp(confidence, self.confidence, self.calibrated)
