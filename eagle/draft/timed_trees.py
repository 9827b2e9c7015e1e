"""A small tree from a few seconds of timing: what a head gets on a CPU where nobody ran `eagle tune`.

The published trees are made for large GPUs; on a CPU they cost more than they bring. What a forward over n nodes and a level
of drafting cost here is timed; how often drafts are accepted is assumed (PRIOR), since the head's texts are not known yet.
`eagle tune` measures both. Only for the coupled rule, whose text no tree changes.

B rows, N nodes, H hidden.
"""

import heapq
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from eagle.draft.by_head import HeadDrafter
from eagle.draft.tree import DraftTree
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, dtype_name, machine_name
from eagle.progress import console
from eagle.target.attention import TreeStep
from eagle.target.cache import TreeCache
from eagle.target.engine import Engine
from eagle.target.machine_file import remembered, timings_file
from eagle.target.target import Target

PRIOR = tuple(0.38 * 0.3**rank for rank in range(4))
"""Assumed acceptance of a node's likeliest child, of the next ... : a head of a million tokens on strangers' prompts."""
WORTH_NODES = 1.03
"""A larger tree must be forecast so much faster than a smaller one: timings are not surer, and a better head gains by both."""
NODES = (1, 2, 4, 8, 16, 32, 64)
BATCHES = (1, 2, 4, 8, 16)
PREFIX = 128
"""Committed tokens before what is timed."""
REPEATS = 4


def timed_trees(target: Target, drafter: HeadDrafter, engine: Engine) -> TunedTrees:
    """The trees with the best forecast, by batch size, timed now or remembered from another time on this machine."""
    config = target.config
    shape = f"{config.model_type} {target.num_layers}x{target.hidden_size} V{target.vocab_size}"
    key = f"{shape}, {drafter.head.version} over {drafter.vocabulary.size} tokens, {engine}, {dtype_name(target.dtype)}"
    told: list[str] = []

    def measure(key: str) -> dict[str, list[float] | float]:
        told.append(key)
        return {"verify_ms": [_verify_ms(target, nodes) for nodes in NODES], "level_ms": _level_ms(target, drafter)}

    costs = remembered("trees", [key], measure)[key]
    choices = tuple(
        TunedChoice(batch=batch, temperature=0.0, tree=best_tree(costs["verify_ms"], costs["level_ms"], batch=batch))
        for batch in BATCHES
    )
    if told:
        console.print(
            f"draft tree for this machine, by {len(NODES)} timed forwards: {choices[0].tree} (kept in {timings_file('trees')}; "
            "eagle tune measures it on prompts)",
            markup=False,
            soft_wrap=True,
        )
    return TunedTrees(
        hardware=machine_name(target.device),
        engine=engine,
        dtype=dtype_name(target.dtype),
        choices=choices,
        source="timed",
    )


def best_tree(verify_ms: list[float], level_ms: float, *, batch: int) -> TreeSettings:
    """The tree of the largest expected (1 + accepted) / (T_draft + T_target(n)) for a batch, or the smallest that is nearly as
    fast; no drafting where none gains.

    verify_ms: T_target for NODES nodes in all. level_ms: of drafting one level.
    """
    plain = float(np.interp(batch, NODES, verify_ms))
    forecasts = [(1.0, TreeSettings(drafter="none"))]
    for depth in range(1, 5):
        for top_k in range(1, len(PRIOR) + 1):
            gains = expected_gains(depth, top_k)
            for nodes in range(2, min(len(gains) + 1, NODES[-1] // batch) + 1):
                cycle = float(np.interp(batch * nodes, NODES, verify_ms)) + depth * level_ms
                speedup = (1 + sum(gains[: nodes - 1])) * plain / cycle
                forecasts.append((speedup, TreeSettings(budget=nodes, top_k=top_k, depth=depth)))
    enough = max(speedup for speedup, _ in forecasts) / WORTH_NODES
    near = [(tree.budget, -speedup, number) for number, (speedup, tree) in enumerate(forecasts) if speedup >= enough]
    return forecasts[min(near)[-1]][1]


def expected_gains(depth: int, top_k: int) -> list[float]:
    """The assumed acceptance of the likeliest nodes below a root, best first; at most as many as are ever verified."""
    heap = [(-chance, 1) for chance in PRIOR[:top_k]]
    gains: list[float] = []
    heapq.heapify(heap)
    while heap and len(gains) < NODES[-1]:
        chance, level = heapq.heappop(heap)
        gains.append(-chance)
        if level < depth:
            for rank in PRIOR[:top_k]:
                heapq.heappush(heap, (chance * rank, level + 1))
    return gains


def _median_ms(work: Callable[[], object]) -> float:
    work()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples)


@torch.inference_mode()
def _verify_ms(target: Target, nodes: int) -> float:
    """A forward over a root with nodes - 1 children, and the LM head on the root."""
    length = min(PREFIX, (target.max_positions or PREFIX + 2) - 2)
    cache = target.new_cache(rows=1, capacity=length + max(NODES))
    target.prefill(torch.zeros(1, length, dtype=torch.int64), torch.tensor([length]), cache)
    tokens_BN = torch.zeros(1, nodes, dtype=torch.int64)
    parents_BN = tokens_BN.clone()
    parents_BN[:, 0] = -1
    tree = DraftTree.from_parents(tokens_BN, parents_BN)

    def verify() -> torch.Tensor:
        states = target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, cache)
        return target.logits(states.features_BNH[:, :1])

    return _median_ms(verify)


@torch.inference_mode()
def _level_ms(target: Target, drafter: HeadDrafter) -> float:
    """One level: the head on two nodes, and the scores of their children."""
    drafter.cache = TreeCache(layers=1, rows=1, capacity=2 * PREFIX)
    drafter.cache.lengths_B = torch.tensor([PREFIX])
    tokens_BN = torch.zeros(1, 2, dtype=torch.int64)
    features_BNH = torch.zeros(1, 2, target.hidden_size, dtype=target.dtype, device=target.device)
    bits_BNW = torch.tensor([[[1], [2]]])

    def level() -> torch.Tensor:
        step = TreeStep(lengths_B=drafter.cache.lengths_B, depths_BN=tokens_BN, ancestors_BNW=bits_BNW)
        logits_BND = drafter.draft_logits(drafter.run(features_BNH, tokens_BN, step))
        return logits_BND.float().log_softmax(-1).topk(min(4, logits_BND.shape[-1]), dim=-1).values

    return _median_ms(level)
