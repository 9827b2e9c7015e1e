"""Tree attention on a CPU, float32: a node's result is the same bits whatever stands beside it.

B rows, N query nodes, S cache slots, h query heads, k key/value heads, g = h // k, d head dim, Z = B * k.

Library attention rounds by the shape of the call: by the number of queries, and by how many keys lie between those that a
node sees. Here every step is either one of a row's own elements alone, or a sum that is exact or has a fixed order:
- scores and the sum over values are products of a few rows (`narrow_rows`), which the library adds term after term, so that
  neither the number of them side by side nor the zeros of slots that a node does not see change anything;
- the weights' sum is exact: they are rounded to multiples of 2^-30, and float64 holds any such sum.
Where the library's narrow products do not add so, eagle/kernels/tree_attention/split_sum.py stands in.
`eagle.eval.checks.bitwise` holds all this to be true of the machine at hand. The judge of values is `reference.masked_attention`.
"""

import functools

import torch

from eagle.kernels.tree_attention import split_sum

SLOTS = 64
"""Slots are looked at in multiples of this: products of fewer shapes, and every one of them aligned."""
WIDEST = 3
"""Rows of a narrow product, at most: with more, libraries add several parts of a sum side by side."""
_GRID = 2.0**-7  # float32 from here to twice of it has a step of 2^-30


def steady_attention(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    *,
    bias_BNS: torch.Tensor,
    positions_BN: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """[B, h, N, d] over keys and values [B, k, S, d] -> [B, h, N, d]. float32 on a CPU; S a multiple of SLOTS.

    bias_BNS: 0, or -inf where a node does not see a slot. positions_BN: int64, the nodes'. Fastest where [S, d] lies together.
    """
    rows, heads, nodes, head_dim = query_BhNd.shape
    kv_heads, slots = key_BkSd.shape[1:3]
    query_ZNgd = query_BhNd.view(rows, kv_heads, -1, nodes, head_dim).transpose(2, 3).flatten(0, 1)
    key_ZSd, value_ZSd = key_BkSd.flatten(0, 1), value_BkSd.flatten(0, 1)
    narrow = narrow_rows()
    if narrow:
        scores_ZNgS = _products(query_ZNgd, key_ZSd.transpose(1, 2), narrow)
    else:
        scores_ZNgS = split_sum.scores(query_ZNgd, key_ZSd)
    scores_BkNgS = scores_ZNgS.view(rows, kv_heads, nodes, -1, slots)
    bias_B1N1S = bias_BNS[:, None, :, None]
    if softcap is None:
        scores_BkNgS = torch.add(bias_B1N1S, scores_BkNgS, alpha=scaling)
    else:
        scores_BkNgS = scores_BkNgS.mul_(scaling / softcap).tanh_().mul_(softcap).add_(bias_B1N1S)
    weights_BkNgS = scores_BkNgS.sub_(scores_BkNgS.amax(-1, keepdim=True)).exp_().add_(_GRID).sub_(_GRID)
    sums_BkNg1 = weights_BkNgS.sum(-1, keepdim=True, dtype=torch.float64).float()
    weights_ZNgS = weights_BkNgS.flatten(0, 1)
    if narrow:
        out_ZNgd = _products(weights_ZNgS, value_ZSd, narrow)
    else:
        out_ZNgd = split_sum.split_sum(weights_ZNgS, value_ZSd, split_sum.edges_of(positions_BN, kv_heads))
    out_BkNgd = out_ZNgd.view(rows, kv_heads, nodes, -1, value_BkSd.shape[-1]).div_(sums_BkNg1)
    return out_BkNgd.permute(0, 2, 1, 3, 4).reshape(rows, nodes, heads, -1).transpose(1, 2)


def _products(left_ZNgX: torch.Tensor, right_ZXY: torch.Tensor, narrow: int) -> torch.Tensor:
    """[Z, N, g, X] x [Z, X, Y] -> [Z, N, g, Y]: for every z and node a product of its own, of at most `narrow` rows."""
    count, nodes = left_ZNgX.shape[:2]
    if nodes == 1:
        return _narrow(left_ZNgX[:, 0], right_ZXY, narrow)[:, None]
    if nodes <= count:
        return torch.stack([_narrow(left_ZNgX[:, n], right_ZXY, narrow) for n in range(nodes)], dim=1)
    return torch.stack(
        [_narrow(left_NgX, right_XY.expand(nodes, -1, -1), narrow) for left_NgX, right_XY in zip(left_ZNgX, right_ZXY)]
    )


def _narrow(left_MgX: torch.Tensor, right_MXY: torch.Tensor, narrow: int) -> torch.Tensor:
    """[M, g, X] x [M, X, Y] -> [M, g, Y]."""
    if left_MgX.shape[1] <= narrow:
        return torch.bmm(left_MgX, right_MXY)
    return torch.cat([torch.bmm(part, right_MXY) for part in left_MgX.split(narrow, dim=1)], dim=1)


@functools.cache
@torch.inference_mode()
def narrow_rows() -> int:
    """The most rows, up to WIDEST, of a product that this machine's library adds term after term; 0: of none.

    Tried with sums of several lengths, with zeros put between their terms, alone and side by side.
    """
    generator = torch.Generator().manual_seed(0)
    return next((rows for rows in range(WIDEST, 0, -1) if _adds_in_order(rows, generator)), 0)


def _adds_in_order(rows: int, generator: torch.Generator) -> bool:
    for terms, head_dim in ((40, 64), (150, 128), (500, 64), (1900, 80)):
        slots = -(-2 * terms // SLOTS) * SLOTS
        weights = torch.rand(1, rows, terms, generator=generator)
        values = torch.randn(1, terms, head_dim, generator=generator)
        spread = torch.randperm(slots, generator=generator)[:terms].sort().values
        results = []
        for place, length in ((torch.arange(terms), slots // 2), (torch.arange(terms), slots), (spread, slots)):
            wide = torch.zeros(1, rows, length).index_copy(2, place, weights)
            other = torch.randn(1, length, head_dim, generator=generator).index_copy(1, place, values)
            results += [torch.bmm(wide, other), *torch.bmm(wide.repeat(5, 1, 1), other.expand(5, -1, -1)).split(1)]
        if not all(torch.equal(each, results[0]) for each in results):
            return False
    return True
