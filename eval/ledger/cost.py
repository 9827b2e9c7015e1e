"""What a decode cycle's parts cost: T_target(n) by nodes and batch, and T_draft by width and level.

Everything is timed on the decoder's own code: a batch of real prompts stands before its next cycle, trees are proposed and
verified over and over, nothing is committed. Within a batch size all points are timed in turn, so a slow moment of the
machine hits all of them, and ratios stand. Times are milliseconds.

B rows, N nodes per row, n = B * N.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from eagle.decode.arguments import resolve
from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_level import LevelDrafter
from eagle.draft.drafter import Drafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.tree import DraftTree, best_connected
from eagle.draft.tuned import TunedDrafter
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.settings import Setting
from eagle.kernels.dispatch import using
from eagle.progress import ProgressBar
from eagle.verify.verifier import Verifier

Item = TypeVar("Item")
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
REPEATS = 4
STATES = 6
"""Batches of prompts that one point is measured on: their prefixes' lengths differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of something that was done several times, behind each of several prefixes."""

    median: float
    """Of one prefix's samples; over prefixes, the mean: what many cycles cost together"""
    low: float
    """10% quantile"""
    high: float
    """90% quantile"""
    samples: int

    @classmethod
    def of(cls, by_prefix: Sequence[Sequence[float]]) -> "Timing":
        every = np.concatenate(by_prefix)
        low, high = (float(x) for x in np.quantile(every, [0.1, 0.9]))
        median = float(np.mean([np.median(samples) for samples in by_prefix]))
        return cls(median=median, low=low, high=high, samples=len(every))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetCost:
    """T_target(n) of one batch size: forward over the trees, and the LM head on the nodes that are likely to be visited."""

    batch: int
    points: dict[int, Timing]
    """By nodes per row, ascending"""

    @property
    def alpha(self) -> float:
        """Intercept of the line through (n, T(n)), least squares of the relative error; not below 0."""
        return max(0.0, self._line[0])

    @property
    def slope(self) -> float:
        """The line's milliseconds per node."""
        return self._line[1]

    @property
    def _line(self) -> tuple[float, float]:
        n, ms = self._arrays
        if len(n) < 2:
            return float(ms[0]), 0.0
        rows = np.stack([np.ones_like(n), n], axis=1) / ms[:, None]
        (intercept, slope), *_ = np.linalg.lstsq(rows, np.ones_like(ms), rcond=None)
        return float(intercept), float(slope)

    def beta(self, nodes: int) -> float:
        """(T(n) - alpha) / n, n = batch * nodes."""
        return (self.at(nodes) - self.alpha) / (self.batch * nodes)

    def at(self, nodes: float) -> float:
        """T at so many nodes per row: measured, between two measured ones, or along the fitted line beyond them."""
        n, ms = self._arrays
        wanted = self.batch * nodes
        if wanted > n[-1]:
            return float(ms[-1] + max(0.0, self.slope) * (wanted - n[-1]))
        return float(np.interp(wanted, n, ms))

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        n = np.array([self.batch * nodes for nodes in self.points], dtype=float)
        return n, np.array([timing.median for timing in self.points.values()])

    def cheapest_above(self, nodes: float) -> dict[str, Any]:
        """Of the measured numbers of nodes above this one, the one with the least T, as fields of a Cycle."""
        above = [(timing.median, n) for n, timing in self.points.items() if n > nodes]
        return {} if not above else dict(zip(("more_nodes_ms", "more_nodes"), min(above)))

    def as_dict(self) -> dict[str, Any]:
        """JSON: alpha_ms, ms_per_node, and per point nodes, n, ms, low, high, beta_ms."""
        return {
            "batch": self.batch,
            "alpha_ms": self.alpha,
            "ms_per_node": self.slope,
            "points": [
                {
                    "nodes": nodes,
                    "n": self.batch * nodes,
                    "ms": timing.median,
                    "low": timing.low,
                    "high": timing.high,
                    "samples": timing.samples,
                    "beta_ms": self.beta(nodes),
                }
                for nodes, timing in self.points.items()
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCost:
    """Proposing a dynamic tree, by its width and its levels."""

    batch: int
    points: dict[tuple[int, int], Timing]
    """(top_k, levels) -> milliseconds"""

    def at(self, top_k: int, levels: float) -> float:
        """Milliseconds of a tree: along the levels of the nearest widths measured, between and beyond them linear in both."""
        widths = sorted({k for k, _ in self.points})
        return float(_line_through(widths, [self._along(k, levels) for k in widths], top_k))

    def _along(self, top_k: int, levels: float) -> float:
        measured = sorted(level for k, level in self.points if k == top_k)
        return _line_through(measured, [self.points[top_k, level].median for level in measured], levels)

    def as_dict(self) -> dict[str, Any]:
        points = [
            {"top_k": k, "levels": levels, "ms": t.median, "low": t.low, "high": t.high}
            for (k, levels), t in self.points.items()
        ]
        return {"batch": self.batch, "points": points}


class Standing:
    """A batch of rows that stands before its next cycle, to be timed there again and again."""

    def __init__(
        self, decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], setting: Setting, *, room: int
    ) -> None:
        """room: nodes of the largest tree to come."""
        self.decoder, self.target = decoder, decoder.target
        width = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        with bare_generation_config(self.target):
            call = resolve(
                self.target, ids_BT, mask_BT, max_new_tokens=1, seed=list(range(len(prompts))), **setting.arguments()
            )
        self.rows = call.rows
        lengths_B = torch.tensor([len(row.tokens) for row in self.rows])
        self.cache = self.target.new_cache(rows=len(self.rows), capacity=width + room)
        self._aux_layers = () if decoder.drafter is None else decoder.drafter.aux_layers
        self.verifier = Verifier(decoder.rule, self.target, self.rows)
        ids_BT = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.tokens) for row in self.rows], batch_first=True)
        states = self.target.prefill(ids_BT, lengths_B, self.cache, self._aux_layers)
        first = self.verifier.first(states.features_BNH[torch.arange(len(self.rows)), lengths_B - 1])
        if decoder.drafter is not None:
            decoder.drafter.reset(self.rows, capacity=self.cache.capacity)
            next_BT = torch.cat([ids_BT[:, 1:], torch.zeros(len(self.rows), 1, dtype=torch.int64)], dim=1)
            next_BT[torch.arange(len(self.rows)), lengths_B - 1] = torch.tensor(first)
            shown = states.features_BNH if states.aux_BNA is None else states.aux_BNA
            decoder.drafter.observe(shown, next_BT, lengths_B)
        for row, token in zip(self.rows, first):
            row.tokens.append(token)
        self.roots = DraftTree.roots(torch.tensor(first))

    def propose(self) -> DraftTree:
        return self.roots if self.decoder.drafter is None else self.decoder.drafter.propose()

    def proposing(self) -> float:
        """Milliseconds of a proposal."""
        with _stopwatch(self.target.device) as took:
            self.propose()
        return took[0]

    def verifying(self, tree: DraftTree) -> float:
        """Milliseconds of what DecodeStats.verify_ms counts: the forward and the LM head. Nothing is committed."""
        device, parts = self.target.device, []

        @contextmanager
        def clock() -> Iterator[None]:
            with _stopwatch(device) as took:
                yield
            parts.append(took)

        with clock():
            states = self.target.tree_forward(
                tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, self.cache, self._aux_layers
            )
        self.verifier.walks(tree, states.features_BNH, clock)
        return sum(took[0] for took in parts)


def measure_target(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    batches: Sequence[int],
    nodes: Sequence[int] = NODES,
    repeats: int = REPEATS,
) -> dict[int, TargetCost]:
    """T_target by batch size. Trees are the decoder's own proposals, cut or filled up to the sizes asked for.

    prompts: token ids, some of which are taken (`states`); their lengths are the prefixes'.
    """
    sizes = sorted({1, *nodes})
    costs = {}
    with ProgressBar("costs", total=len(set(batches)), unit="batch sizes", quiet=not batches) as bar:
        for batch in sorted(set(batches)):
            samples: dict[int, list[list[float]]] = {size: [] for size in sizes}
            for rows in states(prompts, batch):
                standing = Standing(decoder, rows, setting, room=max(sizes))
                trees = {size: resized(standing.propose(), size) for size in sizes}
                runs = {size: partial(standing.verifying, tree) for size, tree in trees.items()}
                for size, times in _timed(runs, decoder, repeats).items():
                    samples[size].append(times)
            costs[batch] = TargetCost(batch=batch, points={size: Timing.of(times) for size, times in samples.items()})
            bar.advance(1)
    return costs


def measure_draft(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    batch: int,
    shapes: Sequence[tuple[int, int]],
    budget: int = 60,
    repeats: int = REPEATS,
) -> DraftCost:
    """T_draft of dynamic trees by (top_k, levels). The decoder's drafter must grow trees level by level."""
    drafter = level_drafter(decoder.drafter)
    assert drafter is not None
    samples: dict[tuple[int, int], list[list[float]]] = {shape: [] for shape in shapes}
    before = drafter.shape
    try:
        for rows in states(prompts, batch):
            drafter.shape = DynamicTree(budget=budget, top_k=max(k for k, _ in shapes), depth=max(d for _, d in shapes))
            standing = Standing(with_drafter(decoder, drafter), rows, setting, room=budget)
            runs = {shape: _proposing(standing, drafter, shape, budget) for shape in shapes}
            for shape, times in _timed(runs, decoder, repeats).items():
                samples[shape].append(times)
    finally:
        drafter.shape = before
    return DraftCost(batch=batch, points={shape: Timing.of(times) for shape, times in samples.items()})


def measure_proposals(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    batches: Sequence[int],
    repeats: int = REPEATS,
) -> dict[int, tuple[Timing, int, int]]:
    """By batch size: milliseconds of the decoder's own proposals, and their largest tree's nodes and levels."""
    found = {}
    with ProgressBar("proposals", total=len(set(batches)), unit="batch sizes", quiet=len(set(batches)) == 1) as bar:
        for batch in sorted(set(batches)):
            samples: list[list[float]] = []
            nodes, levels = 1, 0
            for rows in states(prompts, batch):
                standing = Standing(decoder, rows, setting, room=64)
                tree = standing.propose()
                nodes, levels = max(nodes, tree.nodes), max(levels, int(tree.depths_BN.max()))
                samples.append(_timed({0: standing.proposing}, decoder, repeats)[0])
            found[batch] = (Timing.of(samples), nodes, levels)
            bar.advance(1)
    return found


def level_drafter(drafter: Drafter | None) -> LevelDrafter | None:
    """The drafter that grows trees level by level, if that is what it is (or wraps)."""
    inner = drafter.drafter if isinstance(drafter, TunedDrafter) else drafter
    return inner if isinstance(inner, LevelDrafter) else None


def with_drafter(decoder: SpeculativeDecoder, drafter: Drafter) -> SpeculativeDecoder:
    """The same decoder with another drafter."""
    return SpeculativeDecoder(decoder.target, drafter, decoder.rule, kernels=decoder.kernels)


def resized(tree: DraftTree, nodes: int) -> DraftTree:
    """The tree with so many nodes: its most confident ones, or all and, below the root, further unlikely ones."""
    rows, have = tree.tokens_BN.shape
    tokens_BN, parents_BN = tree.tokens_BN.cpu(), tree.parents_BN.cpu()
    scores_BN = tree.log_confidence_BN.cpu().float()
    if nodes < have:
        scores_BN = scores_BN.clone()
        scores_BN[:, 0] = torch.inf
        kept_BN = best_connected(scores_BN, nodes)
        place_BN = torch.zeros(rows, have, dtype=torch.int64)
        place_BN.scatter_(1, kept_BN, torch.arange(nodes).expand(rows, -1))
        old_BN = parents_BN.gather(1, kept_BN)
        parents_BN = torch.where(old_BN < 0, -1, place_BN.gather(1, old_BN.clamp_min(0)))
        tokens_BN, scores_BN = tokens_BN.gather(1, kept_BN), tree.log_confidence_BN.cpu().gather(1, kept_BN)
    elif nodes > have:
        extra = nodes - have
        tokens_BN = torch.cat([tokens_BN, tokens_BN[:, :1].expand(-1, extra)], dim=1)
        parents_BN = torch.cat([parents_BN, torch.zeros(rows, extra, dtype=torch.int64)], dim=1)
        scores_BN = torch.cat([scores_BN, torch.full((rows, extra), -20.0)], dim=1)
    return DraftTree.from_parents(tokens_BN, parents_BN, scores_BN)


def states(prompts: Sequence[Item], batch: int) -> Iterator[list[Item]]:
    """Batches of prompts, spread evenly over all of them: as many as there are prompts for, up to STATES, fewer of large batches,
    which hold several prompts each."""
    count = max(1, min(STATES, len(prompts) // batch, 2 * STATES // batch))
    for state in range(count):
        first = state * len(prompts) // count
        yield [prompts[(first + row) % len(prompts)] for row in range(batch)]


def _proposing(standing: Standing, drafter: LevelDrafter, shape: tuple[int, int], budget: int) -> Callable[[], float]:
    tree = DynamicTree(budget=budget, top_k=shape[0], depth=shape[1])

    def propose() -> float:
        drafter.shape = tree
        return standing.proposing()

    return propose


def _timed(
    runs: Mapping[Any, Callable[[], float]], decoder: SpeculativeDecoder, repeats: int
) -> dict[Any, list[float]]:
    """Milliseconds of every run, all of them in turn, forwards and backwards; the first round warms up."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    with nullcontext() if decoder.kernels == "auto" else using(decoder.kernels):
        for turn in range(-1, repeats):
            for key in reversed(list(runs)) if turn % 2 else list(runs):
                took = runs[key]()
                if turn >= 0:
                    times[key].append(took)
    return times


@contextmanager
def _stopwatch(device: torch.device) -> Iterator[list[float]]:
    """Yields a list that holds the block's milliseconds, the device's work included, when it has ended."""
    took: list[float] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield took
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took.append(1e3 * (time.perf_counter() - start))


def _line_through(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between the points, and beyond them with the slope at the end."""
    if len(xs) == 1:
        return ys[0]
    i = int(np.clip(np.searchsorted(xs, x), 1, len(xs) - 1))
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return max(0.0, ys[i - 1] + share * (ys[i] - ys[i - 1]))
