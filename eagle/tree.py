"""DraftTree: the tokens a target verifies in one forward, and how they hang together.

B rows, N nodes, W = ceil(N / 64). Node 0 is the root: the last committed token. Parents come before their children.
"""

from dataclasses import dataclass

import torch

from eagle.kernels.tree_attention.reference import own_bits


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One tree per row, stacked. All tensors lie on the CPU: a tree is bookkeeping, not arithmetic."""

    tokens_BN: torch.Tensor
    """int64 token ids."""
    parents_BN: torch.Tensor
    """int64 index of the parent node; -1 for the root."""
    depths_BN: torch.Tensor
    """int64 distance from the root; a node's position is L_b + depth."""
    log_confidence_BN: torch.Tensor
    """float32 log of the product of draft probabilities along the path; 0 for the root."""
    ancestors_BNW: torch.Tensor
    """int64 bits: bit j of row i says that node j is i or an ancestor of i."""

    @property
    def nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @classmethod
    def from_parents(
        cls, tokens_BN: torch.Tensor, parents_BN: torch.Tensor, log_confidence_BN: torch.Tensor | None = None
    ) -> "DraftTree":
        """Derives depths and ancestor bits. Parents must come before their children."""
        depths_BN, ancestors_BNW = ancestry(parents_BN)
        if log_confidence_BN is None:
            log_confidence_BN = torch.zeros(tokens_BN.shape)
        return cls(
            tokens_BN=tokens_BN,
            parents_BN=parents_BN,
            depths_BN=depths_BN,
            log_confidence_BN=log_confidence_BN,
            ancestors_BNW=ancestors_BNW,
        )

    def up_to_depth(self, depth: int) -> "DraftTree":
        """The tree without the nodes below `depth`; nodes must be ordered by depth, as drafters make them."""
        count = int((self.depths_BN <= depth).sum(dim=1).max())
        if count == self.nodes:
            return self
        return DraftTree.from_parents(
            self.tokens_BN[:, :count], self.parents_BN[:, :count], self.log_confidence_BN[:, :count]
        )

    @classmethod
    def roots(cls, tokens_B: torch.Tensor) -> "DraftTree":
        """Trees of one node: verifying them is plain decoding."""
        return cls.from_parents(tokens_B[:, None], torch.full((len(tokens_B), 1), -1))


def ancestry(parents_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 parents [B, N] -> depths [B, N], ancestor bits [B, N, W].

    Pointer doubling: after round r a node knows its nearest 2^r ancestors and jumps over them.
    """
    rows, nodes = parents_BN.shape
    width = -(-nodes // 64)
    own_BNW = own_bits(nodes, width).expand(rows, nodes, width)
    # A sentinel node behind the last one stands above every root: no bits, no depth, its own parent.
    bits = torch.cat([own_BNW, torch.zeros(rows, 1, width, dtype=torch.int64)], dim=1)
    jump = torch.cat([parents_BN, torch.full((rows, 1), nodes)], dim=1)
    jump = torch.where(jump < 0, nodes, jump)
    steps = torch.cat([torch.ones(rows, nodes, dtype=torch.int64), torch.zeros(rows, 1, dtype=torch.int64)], dim=1)
    while bool((jump < nodes).any()):
        bits = bits | bits.gather(1, jump[..., None].expand(-1, -1, width))
        steps = steps + steps.gather(1, jump)
        jump = jump.gather(1, jump)
    return steps[:, :nodes] - 1, bits[:, :nodes].contiguous()


def best_connected(log_confidence_BM: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most confident of M candidates, as ascending indices int64 [B, count].

    Candidates are listed parents first and a child is never more confident than its parent. A stable sort resolves ties
    in favour of the earlier one, so the choice never holds a child without its parent, even where a draft probability
    of exactly 1 makes them equal.
    """
    order_BM = log_confidence_BM.sort(dim=1, descending=True, stable=True).indices
    return order_BM[:, :count].sort(dim=1).values
