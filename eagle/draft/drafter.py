"""Drafter: the protocol of what proposes trees.

There are eagle/draft/by_head.py (a draft head, with trees of any shape), eagle/draft/by_model.py (a small model) and
eagle/draft/by_ngram.py (prompt lookup); eagle/decode/make.py makes one by name.
B rows, K committed pairs, X the width of the states a drafter asks for.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from eagle.draft.tree import DraftTree
from eagle.sample.row import Row


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
