"""TunedDrafter: a head's drafter whose trees are those tuned for the batch at hand, down to none.

B rows, K committed pairs, X the width of the states observed.
"""

from collections.abc import Sequence

import torch

from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import TreeShape
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import StaticTree
from eagle.draft.tree import DraftTree
from eagle.draft.tuning import TreeSettings, TunedTrees
from eagle.sample.row import Row


def shape_of(tree: TreeSettings) -> TreeShape:
    """The shape that the settings describe; they must not be "none"."""
    assert tree.drafter != "none"
    if tree.drafter == "static":
        return StaticTree()
    return DynamicTree(budget=tree.budget, top_k=tree.top_k, depth=tree.depth, level_cost=tree.level_cost)


class TunedDrafter:
    """A Drafter (eagle/draft/drafter.py). A batch keeps the tree it began with, however many of its rows have ended.

    Where drafting was measured not to pay it proposes roots alone: plain decoding, without running the head.
    """

    def __init__(self, drafter: HeadDrafter, tuned: TunedTrees):
        self.drafter, self.tuned = drafter, tuned
        self.tree = tuned.choices[0].tree
        self._roots_B = torch.empty(0, dtype=torch.int64)

    @property
    def aux_layers(self) -> Sequence[int]:
        return self.drafter.aux_layers

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        temperature = max(row.sampler.sampling.temperature for row in rows)
        self.tree = self.tuned.at(batch=len(rows), temperature=temperature)
        if self.tree.drafter != "none":
            self.drafter.shape = shape_of(self.tree)
            self.drafter.reset(rows, capacity=capacity)
        for row in rows:
            row.stats.tree = f"{self.tuned.source}: {self.tree}"

    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        if self.tree.drafter != "none":
            self.drafter.observe(states_BKX, next_tokens_BK, counts_B)
        else:
            self._roots_B = next_tokens_BK.cpu()[torch.arange(len(counts_B)), counts_B.cpu() - 1]

    def propose(self) -> DraftTree:
        return DraftTree.roots(self._roots_B) if self.tree.drafter == "none" else self.drafter.propose()

    def keep_rows(self, kept: Sequence[int]) -> None:
        if self.tree.drafter != "none":
            self.drafter.keep_rows(kept)
        else:
            self._roots_B = self._roots_B[list(kept)]
