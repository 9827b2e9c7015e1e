"""Steady attention's two products by oneDNN, for machines whose library adds narrow products in another order than term by term.

Z = rows * key/value heads, N nodes, g query heads a key/value head, S slots, d head dim.

oneDNN's products add term after term, too, and their rows do not depend on one another, but they break a long sum into
pieces, whose borders must not move with the tree. So the slots before a node's edge are one sum, in which every slot is a
committed token's, and the slots behind it another, short enough never to be broken.
"""

import torch

BLOCK = 128
"""Slots by which the edge moves."""
DEEPEST = 128
"""Levels of a tree for which every slot before the edge is a committed token's."""


def edges_of(positions_BN: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """int64 [Z, N]: the edges of nodes at these positions."""
    edges_BN = ((positions_BN - DEEPEST).clamp(min=0) // BLOCK) * BLOCK
    return edges_BN.repeat_interleave(kv_heads, dim=0)


def split_sum(weights_ZNgS: torch.Tensor, value_ZSd: torch.Tensor, edges_ZN: torch.Tensor) -> torch.Tensor:
    """[Z, N, g, S] x [Z, S, d] -> [Z, N, g, d]."""
    count, nodes, groups, _ = weights_ZNgS.shape
    out_ZNgd = weights_ZNgS.new_empty(count, nodes, groups, value_ZSd.shape[-1])
    for z in range(count):
        for edge in edges_ZN[z].unique().tolist():
            some = (edges_ZN[z] == edge).nonzero()[:, 0]
            weights_ngS = weights_ZNgS[z, some]
            part_ngd = _product(weights_ngS[..., edge:], value_ZSd[z, edge:].contiguous().t())
            if edge:
                part_ngd = part_ngd + _product(weights_ngS[..., :edge], value_ZSd[z, :edge].contiguous().t())
            out_ZNgd[z, some] = part_ngd
    return out_ZNgd


def scores(query_ZNgd: torch.Tensor, key_ZSd: torch.Tensor) -> torch.Tensor:
    """-> [Z, N, g, S]."""
    return torch.stack([_product(query_Ngd, key_Sd.contiguous()) for query_Ngd, key_Sd in zip(query_ZNgd, key_ZSd)])


def _product(left_NgX: torch.Tensor, right_YX: torch.Tensor) -> torch.Tensor:
    """[N, g, X] x [Y, X] -> [N, g, Y]. right: whole, or the transpose of a whole one: for others oneDNN has no fast kernel.
    A row alone goes as two: alone it would be summed in another order."""
    lone = left_NgX.shape[:2] == (1, 1)
    rows = left_NgX.expand(2, -1, -1) if lone else left_NgX
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows.contiguous(), right_YX, None, "none", [], "")
    return out[:1] if lone else out
