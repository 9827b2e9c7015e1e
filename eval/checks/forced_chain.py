"""A chain whose tokens are given: what the decoder's own incremental path says at each depth of it, for comparison."""

from collections.abc import Sequence

import torch

from eagle.draft.by_level import LevelDrafter
from eagle.draft.tree import DraftTree
from eagle.target.attention import TreeStep


class ForcedChain:
    """A TreeShape (eagle/draft/by_level.py): it keeps the logits of every depth instead of choosing children by them."""

    def __init__(self, depth: int):
        self.depth = depth
        self.tokens: Sequence[int] = ()
        """The next chain's tokens, depth - 1 of them: what stands behind the root."""
        self.logits_KD = torch.empty(0)
        """[depth, D]: row k predicts the token k + 1 places behind the root."""

    @property
    def widest(self) -> int:
        return 1

    @property
    def columns(self) -> int:
        return max(1, self.depth - 1)

    def grow(self, draft: LevelDrafter) -> DraftTree:
        """Runs the chain behind the root of a batch of one row; the tree returned is the root alone."""
        assert len(self.tokens) == self.depth - 1
        predictions_11H = draft.predicted_BH[:, None]
        logits = [draft.draft_logits(predictions_11H)[0, 0]]
        for level, token in enumerate(self.tokens):
            bits_11W = torch.tensor([[[(1 << (level + 1)) - 1]]])
            step = TreeStep(
                lengths_B=draft.cache.lengths_B,
                depths_BN=torch.tensor([[level]]),
                ancestors_BNW=bits_11W,
                column_depths_BC=torch.arange(level + 1)[None],
                offset=level,
            )
            predictions_11H = draft.run(predictions_11H, torch.tensor([[token]]), step)
            logits.append(draft.draft_logits(predictions_11H)[0, 0])
        self.logits_KD = torch.stack(logits)
        return DraftTree.roots(draft.roots_B)
