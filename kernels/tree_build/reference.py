"""Everything that follows from a tree's parents, in plain PyTorch.

B rows, N nodes, W = ceil(N / 64). Parents come before their children; -1: no parent.
"""

from dataclasses import dataclass

import torch

from eagle.kernels.tree_attention.reference import own_bits


@dataclass(frozen=True, kw_only=True)
class TreeLinks:
    """What attention and the walk need of a tree. All int64."""

    depths_BN: torch.Tensor
    """Distance from the root."""
    positions_BN: torch.Tensor
    """lengths_B + depth."""
    ancestors_BNW: torch.Tensor
    """Bit j of row i: node j is i or an ancestor of i."""
    first_child_BN: torch.Tensor
    """The lowest child; -1: a leaf."""
    next_sibling_BN: torch.Tensor
    """The next higher child of the same parent; -1: the last, or no parent."""


def ancestry(parents_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 parents [B, N] -> depths [B, N], ancestor bits [B, N, W].

    Pointer doubling: after round r a node knows its nearest 2^r ancestors and jumps over them.
    """
    rows, nodes = parents_BN.shape
    device, width = parents_BN.device, -(-nodes // 64)
    own_BNW = own_bits(nodes, width, device=device).expand(rows, nodes, width)
    # A sentinel node behind the last one stands above every root: no bits, no depth, its own parent.
    bits = torch.cat([own_BNW, own_BNW.new_zeros(rows, 1, width)], dim=1)
    jump = torch.cat([parents_BN, parents_BN.new_full((rows, 1), nodes)], dim=1)
    jump = torch.where(jump < 0, nodes, jump)
    steps = torch.cat([parents_BN.new_ones(rows, nodes), parents_BN.new_zeros(rows, 1)], dim=1)
    while bool((jump < nodes).any()):
        bits = bits | bits.gather(1, jump[..., None].expand(-1, -1, width))
        steps = steps + steps.gather(1, jump)
        jump = jump.gather(1, jump)
    return steps[:, :nodes] - 1, bits[:, :nodes].contiguous()


def tree_links(parents_BN: torch.Tensor, lengths_B: torch.Tensor) -> TreeLinks:
    """int64 parents [B, N], committed tokens [B] -> all links."""
    nodes = parents_BN.shape[1]
    depths_BN, ancestors_BNW = ancestry(parents_BN)
    node_N = torch.arange(nodes, device=parents_BN.device)

    def lowest(wanted_BNj: torch.Tensor) -> torch.Tensor:
        found_BN = torch.where(wanted_BNj, node_N, nodes).amin(-1)
        return torch.where(found_BN == nodes, -1, found_BN)

    child_BNj = parents_BN[:, None, :] == node_N[:, None]
    sibling_BNj = (parents_BN[:, None, :] == parents_BN[:, :, None]) & (parents_BN >= 0)[:, :, None]
    return TreeLinks(
        depths_BN=depths_BN,
        positions_BN=lengths_B[:, None] + depths_BN,
        ancestors_BNW=ancestors_BNW,
        first_child_BN=lowest(child_BNj),
        next_sibling_BN=lowest(sibling_BNj & (node_N[None, :] > node_N[:, None])),
    )
