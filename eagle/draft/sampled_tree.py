"""The sampled tree: children drawn without replacement from q, for rules that test p against q (eagle/verify/rejection.py).

B rows, N nodes, H hidden, w expanded nodes per level, c children of each, D draft vocabulary, V target vocabulary.

Which nodes are expanded depends on what was drawn ABOVE them only, and every child that is drawn stays and is verified in
draw order: choosing among drawn children would change the distribution they come from, and with it the output's. So the
shape is fixed: widths follow from budget, top_k and depth.
"""

import math
from dataclasses import dataclass

import torch

from eagle.draft.by_level import LevelDrafter, pick
from eagle.draft.dynamic_tree import tree_words
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.kernels.placement import sent
from eagle.kernels.tree_attention.reference import own_bits
from eagle.target.attention import TreeStep


@dataclass(frozen=True, kw_only=True)
class SampledTree:
    """A TreeShape. The budget is spread evenly over the levels: m nodes each, below the first from isqrt(m) expanded ones.

    top_k = 1 gives a chain. Raises EagleError for a number below 1.
    """

    budget: int = 60
    """Nodes per tree, the root included; fewer are used where the levels do not divide it."""
    top_k: int = 10
    """Children per expanded node, and nodes expanded per level, at most."""
    depth: int = 6
    """Levels below the root."""

    def __post_init__(self) -> None:
        for name in ("budget", "top_k", "depth"):
            if getattr(self, name) < 1:
                raise EagleError(f"decode.drafter.{name} is {getattr(self, name)}, expected 1 or more")

    def __str__(self) -> str:
        return f"sampled {tree_words(budget=self.budget, top_k=self.top_k, depth=self.depth)}"

    @property
    def levels(self) -> int:
        return min(self.depth, self.budget - 1)

    @property
    def widest(self) -> int:
        """Children of the root."""
        return min(self.top_k, max(1, (self.budget - 1) // max(1, self.levels)))

    @property
    def expanded(self) -> int:
        """w."""
        return min(self.top_k, math.isqrt(max(1, (self.budget - 1) // max(1, self.levels))))

    @property
    def siblings(self) -> int:
        """c."""
        return min(self.top_k, max(1, (self.budget - 1) // max(1, self.levels) // self.expanded))

    @property
    def columns(self) -> int:
        return self.expanded * max(0, self.levels - 1)

    def grow(self, draft: LevelDrafter) -> DraftTree:
        rows, w, c = len(draft.roots_B), self.expanded, self.siblings
        levels = self.levels if draft.deepest is None else min(self.levels, max(1, draft.deepest))
        if levels == 0:
            return DraftTree.roots(draft.roots_B)
        column_depths_C = torch.arange(levels - 1).repeat_interleave(w)
        width = max(1, -(-len(column_depths_C) // 64))

        tokens_BM, log_q_BM, log_q_B1V = _draw(draft, draft.predicted_BH[:, None], depth=1, count=self.widest)
        device = tokens_BM.device
        tokens, scores = (
            [sent(draft.roots_B, device)[:, None], tokens_BM],
            [torch.zeros(rows, 1, device=device), log_q_BM],
        )
        parents = [torch.full((rows, 1), -1, device=device), torch.zeros_like(tokens_BM)]
        recorded, expanded = [log_q_B1V], [torch.zeros(rows, 1, dtype=torch.int64, device=device)]
        # The newest level's nodes are numbered from `first` on; a node's parent is the beam node at its place // c.
        first, level_scores = 1, log_q_BM
        features_BKH = draft.predicted_BH[:, None].expand(-1, w, -1)
        predictions_BKH, bits_BKW = features_BKH, own_bits(w, width, device=device).expand(rows, -1, -1)
        for level in range(1, levels):
            growing_BM = draft.growing(tokens[-1], level_scores)
            kept_BK = growing_BM.topk(w, dim=1).indices
            if level > 1:
                features_BKH = pick(predictions_BKH, kept_BK // c)
                bits_BKW = pick(bits_BKW, kept_BK // c) | own_bits(w, width, start=(level - 1) * w, device=device)
            step = TreeStep(
                lengths_B=draft.cache.lengths_B,
                depths_BN=torch.full((rows, w), level - 1),
                ancestors_BNW=bits_BKW,
                column_depths_BC=column_depths_C[: level * w].expand(rows, -1),
                offset=(level - 1) * w,
            )
            predictions_BKH = draft.run(features_BKH, tokens[-1].gather(1, kept_BK), step)
            tokens_BM, log_q_BM, log_q_BKV = _draw(draft, predictions_BKH, depth=level + 1, count=c)
            numbers_BK = first + kept_BK
            first += level_scores.shape[1]
            level_scores = growing_BM.gather(1, kept_BK).repeat_interleave(c, dim=1) + log_q_BM
            tokens.append(tokens_BM)
            scores.append(level_scores)
            parents.append(numbers_BK.repeat_interleave(c, dim=1))
            recorded.append(log_q_BKV)
            expanded.append(numbers_BK)
        expanded_BE = torch.cat(expanded, dim=1)
        tokens_BN = torch.cat(tokens, dim=1)
        places_BE = torch.arange(expanded_BE.shape[1], device=device).expand(rows, -1)
        return DraftTree.from_parents(
            tokens_BN,
            torch.cat(parents, dim=1),
            torch.cat(scores, dim=1),
            children="sampled",
            log_q_BEV=torch.cat(recorded, dim=1),
            q_row_BN=torch.full_like(tokens_BN, -1).scatter(1, expanded_BE, places_BE),
            widest=max(self.widest, self.siblings),
            ends_BN=draft.ends(tokens_BN),
        )


def _draw(
    draft: LevelDrafter, predictions_BNH: torch.Tensor, *, depth: int, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`count` children of every node, at `depth`, in draw order: target ids and log q [B, N * count], log q [B, N, V].

    Drawn without replacement (DraftSampler.draws). Greedy rows take the top-k of plain q: against a target that is certain,
    every order is right.
    """
    vocabulary = draft.vocabulary
    log_q_BND, noisy_BND = draft.sampler.draws(draft.draft_logits(predictions_BNH), depth=depth)
    drawn_BNc = noisy_BND.topk(count, dim=-1).indices
    log_q_BNc = log_q_BND.gather(-1, drawn_BNc)
    if vocabulary.target_ids_D is not None or log_q_BND.shape[-1] != draft.target_size:
        # A draft model's vocabulary may be padded to another size than the target's.
        outside_BNV = log_q_BND.new_full((*log_q_BND.shape[:2], draft.target_size), -math.inf)
        log_q_BND = outside_BNV.index_copy(-1, vocabulary.ids(log_q_BND.device), log_q_BND)
    return vocabulary.to_target(drawn_BNc).flatten(1), log_q_BNc.flatten(1), log_q_BND
