"""EAGLE-2's dynamic tree (arXiv 2406.16858): expand the most confident nodes, keep the most confident of all.

B rows, N nodes, H hidden, K = top_k, M candidates, W = ceil(columns / 64).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from eagle.draft.by_level import LevelDrafter, pick
from eagle.draft.tree import DraftTree, best_connected
from eagle.errors import EagleError
from eagle.kernels.placement import sent
from eagle.kernels.tree_attention.reference import own_bits
from eagle.target.attention import TreeStep


def tree_words(*, budget: int, top_k: int, depth: int, level_cost: float = 0.0) -> str:
    """A tree's sizes as they are told to readers."""
    cost = f", level cost {level_cost:g}" if level_cost else ""
    if top_k == 1:
        return f"chain of {min(depth, budget - 1)}{cost}"
    return f"{budget} nodes, top-k {top_k}, {depth} level{'s' * (depth != 1)}{cost}"


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """A TreeShape. top_k = 1 gives a chain. Raises EagleError for a number out of its range."""

    budget: int = 60
    """Nodes per tree, the root included."""
    top_k: int = 10
    """Children per expanded node, and nodes expanded per level."""
    depth: int = 6
    """Levels below the root."""
    children: Literal["coupled", "top"] = "coupled"
    """coupled: by the confidence that shares verification's noise; top: by plain q."""
    level_cost: float = 0.0
    """What a level's forward costs, in accepted tokens: no level is drafted that cannot be expected to add as many. A batch
    goes on while any of its rows wants to. 0: always to the full depth, as published."""

    def __post_init__(self) -> None:
        for name in ("budget", "top_k", "depth"):
            if getattr(self, name) < 1:
                raise EagleError(f"decode.drafter.{name} is {getattr(self, name)}, expected 1 or more")
        if not 0 <= self.level_cost <= 1:
            raise EagleError(
                f"decode.drafter.level_cost is {self.level_cost}, expected accepted tokens, from 0 (always the full "
                "depth) to 1 (the most that a level can add)"
            )

    def __str__(self) -> str:
        return tree_words(budget=self.budget, top_k=self.top_k, depth=self.depth, level_cost=self.level_cost)

    @property
    def widest(self) -> int:
        return self.top_k

    @property
    def columns(self) -> int:
        return self.top_k * (self.depth - 1)

    def grow(self, draft: LevelDrafter) -> DraftTree:
        """Levels are lists of K expanded nodes. Candidates are numbered in the order they are made, the root being -1,
        so a parent's number is smaller than its children's."""
        rows, K = len(draft.roots_B), self.top_k
        depth = self.depth if draft.deepest is None else max(1, min(self.depth, draft.deepest))
        # Tree columns of the cache: K per expanded level; their depth is counted behind the committed ones.
        column_depths_C = torch.arange(depth - 1).repeat_interleave(K)
        width = -(-max(K, len(column_depths_C)) // 64)
        tokens_BM, scores_BM = draft.children(
            draft.predicted_BH[:, None], torch.zeros(rows, 1), depth=1, count=K, choice=self.children
        )
        candidates, device = [(tokens_BM, scores_BM, torch.full_like(tokens_BM, -1))], tokens_BM.device

        # Level 1's beam is all of the root's children; their drafting feature is the one predicted for the root.
        beam_tokens, beam_scores = tokens_BM, draft.growing(tokens_BM, scores_BM)
        beam_number = torch.arange(K, device=device).expand(rows, -1)
        beam_features = draft.predicted_BH[:, None].expand(-1, K, -1)
        bits_BKW = _level_bits(K, width, start=0, device=device).expand(rows, -1, -1)
        for level in range(1, depth):
            if self.level_cost and self._at_most(beam_scores) < self.level_cost:
                break
            if device.type == "cpu" and float(beam_scores.amax()) == float("-inf"):
                break  # nothing goes on behind what ends its row (a device would have to be waited for)
            step = TreeStep(
                lengths_B=draft.cache.lengths_B,
                depths_BN=torch.full((rows, K), level - 1),
                ancestors_BNW=bits_BKW,
                column_depths_BC=column_depths_C[: level * K].expand(rows, -1),
                offset=(level - 1) * K,
            )
            predictions_BKH = draft.run(beam_features, beam_tokens, step)
            tokens_BM, scores_BM = draft.children(
                predictions_BKH, beam_scores, depth=level + 1, count=K, choice=self.children
            )
            candidates.append((tokens_BM, scores_BM, beam_number.repeat_interleave(K, dim=1)))
            if level == depth - 1:
                break
            growing_BM = draft.growing(tokens_BM, scores_BM)
            kept_BK = growing_BM.topk(K, dim=1).indices
            origin_BK = kept_BK // K  # which beam node it is a child of
            beam_tokens, beam_scores = tokens_BM.gather(1, kept_BK), growing_BM.gather(1, kept_BK)
            beam_number = K + (level - 1) * K * K + kept_BK
            beam_features = pick(predictions_BKH, origin_BK)
            bits_BKW = pick(bits_BKW, origin_BK) | _level_bits(K, width, start=level * K, device=device)
        return self._select(draft, candidates)

    @staticmethod
    def _at_most(beam_scores_BK: torch.Tensor) -> float:
        """Accepted tokens that the next level can add: a path's children share what confidence it has. Of the row that can
        gain most. The host waits here for the device: it decides what to launch."""
        return float(beam_scores_BK.exp().sum(dim=1).max())

    def _select(
        self, draft: LevelDrafter, candidates: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> DraftTree:
        """The root and the best budget - 1 candidates, renumbered."""
        tokens_BM, scores_BM, parents_BM = (torch.cat(parts, dim=1) for parts in zip(*candidates))
        rows, count, device = len(tokens_BM), min(self.budget - 1, tokens_BM.shape[1]), tokens_BM.device
        chosen_BN = best_connected(scores_BM, count)
        # Number of a chosen candidate in the tree: 1 + its rank; the root is node 0.
        number_BM = torch.zeros_like(tokens_BM)
        number_BM.scatter_(1, chosen_BN, torch.arange(1, count + 1, device=device).expand(rows, -1))
        old_parents_BN = parents_BM.gather(1, chosen_BN)
        parents_BN = torch.where(old_parents_BN < 0, 0, number_BM.gather(1, old_parents_BN.clamp_min(0)))
        tokens_BN = torch.cat([sent(draft.roots_B, device)[:, None], tokens_BM.gather(1, chosen_BN)], dim=1)
        return DraftTree.from_parents(
            tokens_BN,
            torch.cat([torch.full((rows, 1), -1, device=device), parents_BN], dim=1),
            torch.cat([torch.zeros(rows, 1, device=device), scores_BM.gather(1, chosen_BN)], dim=1),
            children=self.children,
            widest=self.top_k,
            ends_BN=draft.ends(tokens_BN),
        )


@lru_cache(maxsize=64)
def _level_bits(nodes: int, width: int, *, start: int, device: torch.device) -> torch.Tensor:
    """`own_bits`, made once: every tree's levels lie in the same columns."""
    return own_bits(nodes, width, start=start, device=device)
