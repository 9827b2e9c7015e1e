"""Which dynamic tree is the fastest: every size in question, walked through a recording and priced by what was timed.

Milliseconds per token and row = mean over verify steps of (T_draft(top_k, levels) + T_target(n) + rest) / tau.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from eagle.draft.tuning import TreeSettings
from eagle.eval.ledger.cost import DraftCost, TargetCost
from eagle.eval.tuner.replay import Replay

TOP_KS = (1, 2, 3, 4, 6, 8, 10)
BUDGETS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 60)
LEVEL_COSTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
REFINED = 24
"""Trees of fixed depth that are tried with every level cost, best first."""
NO_DRAFTING = TreeSettings(drafter="none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What a cycle of one batch size costs on this machine, in milliseconds."""

    batch: int
    target: TargetCost
    draft: DraftCost
    rest_ms: float
    """Commits of the drafter and the host's work, per cycle"""
    plain_rest_ms: float

    @property
    def plain_ms(self) -> float:
        """A step of plain decoding."""
        return self.target.at(1) + self.plain_rest_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of one tree."""

    tree: TreeSettings
    tau: float
    """On the recorded texts: exact"""
    nodes: float
    """Mean nodes per verification"""
    levels: float
    cycle_ms: float
    speedup: float
    """Over plain decoding, prefills left out"""


def forecast(tree: TreeSettings, replay: Replay, prices: Prices) -> Forecast:
    """Replays a dynamic tree (or no drafting) and prices it."""
    if tree.drafter == "none":
        return Forecast(tree=tree, tau=1.0, nodes=1.0, levels=0.0, cycle_ms=prices.plain_ms, speedup=1.0)
    outcome = replay.outcome(tree)
    kinds, counts = np.unique(np.stack([outcome.levels, outcome.nodes]), axis=1, return_counts=True)
    each = [
        prices.draft.at(tree.top_k, int(levels)) + prices.target.at(int(nodes)) for levels, nodes in kinds.T.tolist()
    ]
    cycle = float(np.average(each, weights=counts)) + prices.rest_ms
    return Forecast(
        tree=tree,
        tau=outcome.tau,
        nodes=float(outcome.nodes.mean()),
        levels=float(outcome.levels.mean()),
        cycle_ms=cycle,
        speedup=outcome.tau * prices.plain_ms / cycle,
    )


def sizes(replay: Replay) -> Iterator[TreeSettings]:
    """Trees of fixed depth that the recording holds, each once."""
    for k in replay.top_ks:
        for depth in range(1, replay.depth + 1):
            most = 1 + k + (depth - 1) * k * k
            for budget in sorted({*(b for b in BUDGETS if b < most), min(most, BUDGETS[-1])}):
                if budget > depth:  # a smaller tree has no node at the deepest level
                    yield TreeSettings(budget=budget, top_k=k, depth=depth)


def search(replay: Replay, prices: Prices) -> list[Forecast]:
    """All trees, and no drafting, the fastest first.

    Dynamic depth is tried for single rows only: a batch goes on while any of its rows wants to.
    """
    found = [forecast(tree, replay, prices) for tree in sizes(replay)]
    found.sort(key=lambda one: -one.speedup)
    if prices.batch == 1:
        for one in found[:REFINED]:
            if one.tree.depth > 1:
                found += [
                    forecast(dataclasses.replace(one.tree, level_cost=cost), replay, prices) for cost in LEVEL_COSTS
                ]
    found.append(forecast(NO_DRAFTING, replay, prices))
    return sorted(found, key=lambda one: -one.speedup)


def different(found: Sequence[Forecast], count: int) -> list[Forecast]:
    """The best `count` trees that differ in width, or in the nodes they verify by a quarter or more; no drafting left out."""
    chosen: list[Forecast] = []
    for one in found:
        alike = [
            other
            for other in chosen
            if other.tree.top_k == one.tree.top_k and abs(np.log(other.nodes / one.nodes)) < np.log(1.25)
        ]
        if one.tree.drafter != "none" and not alike:
            chosen.append(one)
        if len(chosen) == count:
            break
    return chosen


def budget_curve(found: Sequence[Forecast]) -> list[dict[str, float]]:
    """Per budget the best forecast: how speed-up and tau go with the nodes verified."""
    best: dict[int, Forecast] = {}
    for one in found:
        if one.tree.drafter == "eagle2" and one.tree.level_cost == 0:
            best.setdefault(one.tree.budget, one)  # found is sorted
    return [
        {"budget": budget, "top_k": one.tree.top_k, "depth": one.tree.depth, "tau": one.tau, "speedup": one.speedup}
        for budget, one in sorted(best.items())
    ]
