"""Drafters: what proposes a tree. One protocol; EAGLE-2's dynamic tree and chains are the ones built from a draft head.

Others: eagle/static_tree.py (EAGLE-1), eagle/model_drafter.py (a small model), eagle/ngram_drafter.py (prompt lookup);
eagle/drafters.py makes one by name. B rows, K committed pairs, X the width of the states a drafter asks for.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from eagle.dynamic_tree import DynamicTree
from eagle.head_drafter import HeadDrafter
from eagle.heads import DraftHead
from eagle.level_drafter import TreeShape
from eagle.rows import Row
from eagle.sampled_tree import SampledTree
from eagle.token_layers import TokenLayers
from eagle.tree import Children, DraftTree


class Drafter(Protocol):
    """Proposes a tree per row and verification, and is told what was committed."""

    @property
    def aux_layers(self) -> Sequence[int]:
        """Layers (their number of layers applied) whose hidden states it is to observe; (): the target's features."""

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        """Forgets everything: a new batch begins, of about `capacity` tokens a row."""

    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        """Newly committed pairs, counts_B[b] of row b: the target's states at token i (features, or the hidden states
        after aux_layers, concatenated) and the token t_{i+1} that follows it."""

    def propose(self) -> DraftTree:
        """A tree per row, its root the row's last observed token, its nodes ordered by depth."""

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Forgets the rows that are not in `kept` (their places in the batch, ascending)."""


class EagleDrafter(HeadDrafter):
    """EAGLE-2: a draft head with the dynamic tree.

    budget: nodes per tree, the root included. top_k: children per expanded node, and nodes expanded per level.
    depth: levels below the root. top_k = 1 gives a chain. children: how they are chosen (see eagle.tree.Children);
    "sampled" takes a tree of fixed widths (eagle/sampled_tree.py). level_cost: as DynamicTree's. Raises EagleError for a
    number out of its range.
    """

    def __init__(
        self,
        head: DraftHead,
        tokens: TokenLayers,
        *,
        budget: int = 60,
        top_k: int = 10,
        depth: int = 6,
        children: Children = "coupled",
        level_cost: float = 0.0,
    ):
        shape: TreeShape
        if children == "sampled":
            shape = SampledTree(budget=budget, top_k=top_k, depth=depth)
        else:
            shape = DynamicTree(budget=budget, top_k=top_k, depth=depth, children=children, level_cost=level_cost)
        super().__init__(head, tokens, shape)
