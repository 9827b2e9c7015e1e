"""Tree attention on a CPU, float32: a node's result is the same bits whatever stands beside it.

B rows, N query nodes, S cache slots, h query heads, k key/value heads, g = h // k, d head dim, q a node's position.

Library attention rounds by the shape of the call: by the number of queries, and by how many keys lie between those that a
node sees. Here every step is either one of a row's own elements alone, or a sum that is exact or has a fixed order:
- scores and the sum over values are oneDNN products, whose rows and columns do not depend on one another and which add term
  after term, so that the zeros of slots a node does not see change nothing;
- such a product breaks a long sum into pieces, whose borders must not move with the tree. So slots before `edge(q)` are one
  sum, in which every slot is a committed token's, and the slots behind it another, short enough never to be broken;
- the weights' sum is exact: they are rounded to multiples of 2^-30, and float64 holds any such sum.
`eagle.bitwise` holds all this to be true of the machine at hand. The judge of values is `reference.masked_attention`.
"""

import torch

BLOCK = 128
"""Slots by which the border between the two sums moves."""
DEEPEST = 128
"""Levels of a tree for which every slot before the border is a committed token's."""
SLOTS = 64
"""Slots are looked at in multiples of this: oneDNN makes a kernel for every shape."""
WIDEST_SUM = 512
"""A product's terms up to which zeros between them are harmless."""
_GRID = 2.0**-7  # float32 from here to twice of it has a step of 2^-30


def edge(position: int) -> int:
    """The border between the two sums of a node at this position."""
    return BLOCK * max(0, (position - DEEPEST) // BLOCK)


def steady_attention(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    *,
    bias_BNS: torch.Tensor,
    edges_BN: list[list[int]],
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """[B, h, N, d] over keys and values [B, k, S, d] -> [B, h, N, d]. float32 on a CPU; S a multiple of SLOTS.

    bias_BNS: 0, or -inf where a node does not see a slot. edges_BN: `edge` of every node's position. Keys and values are
    fastest where [S, k, d] lies together.
    """
    rows, heads, nodes, head_dim = query_BhNd.shape
    kv_heads, slots = key_BkSd.shape[1:3]
    packed_BkMd = query_BhNd.reshape(rows, kv_heads, -1, head_dim)
    scores = _stacked([_scores(query, key) for query, key in zip(packed_BkMd, key_BkSd)])
    scores_BhNS = scores.view(rows, heads, nodes, slots)
    if softcap is None:
        scores_BhNS = torch.add(bias_BNS[:, None], scores_BhNS, alpha=scaling)
    else:
        scores_BhNS = scores_BhNS.mul_(scaling / softcap).tanh_().mul_(softcap).add_(bias_BNS[:, None])
    weights_BhNS = scores_BhNS.sub_(scores_BhNS.amax(-1, keepdim=True)).exp_().add_(_GRID).sub_(_GRID)
    sums_BhN1 = weights_BhNS.sum(-1, keepdim=True, dtype=torch.float64).float()
    out = [
        _mixed(weights, value, edges)
        for weights, value, edges in zip(weights_BhNS.view(rows, kv_heads, -1, nodes, slots), value_BkSd, edges_BN)
    ]
    return _stacked(out).reshape(rows, heads, nodes, -1).div_(sums_BhN1)


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """torch.stack, which copies, only where there is something to put together."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _product(rows_MK: torch.Tensor, columns_NK: torch.Tensor) -> torch.Tensor:
    """[M, K] x [N, K] -> [M, N]. columns: whole, or the transpose of a whole one: for others oneDNN has no fast kernel."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_MK, columns_NK, None, "none", [], "")
    return out


def _together(kv_heads: int, rows: int, terms: int) -> bool:
    """Whether all heads go into one product, each beside zeros for the others: less to start, more to compute. The zeros
    must not break a sum."""
    return kv_heads > 1 and kv_heads * terms <= WIDEST_SUM and rows <= 32


def _scores(query_kMd: torch.Tensor, key_kSd: torch.Tensor) -> torch.Tensor:
    """One row's [k, M, S]."""
    kv_heads, count, head_dim = query_kMd.shape
    if not _together(kv_heads, count, head_dim):
        return _stacked([_product(query, key.contiguous()) for query, key in zip(query_kMd, key_kSd)])
    wide_kMkd = query_kMd.new_zeros(kv_heads, count, kv_heads, head_dim)
    wide_kMkd.diagonal(dim1=0, dim2=2).copy_(query_kMd.permute(1, 2, 0))
    keys_SD = key_kSd.transpose(0, 1).reshape(-1, kv_heads * head_dim)
    return _product(wide_kMkd.view(kv_heads * count, -1), keys_SD).view(kv_heads, count, -1)


def _mixed(weights_kgNS: torch.Tensor, value_kSd: torch.Tensor, edges_N: list[int]) -> torch.Tensor:
    """One row's [k, g * N, d]: the sum of values by weight, over the slots before each node's edge and those behind."""
    kv_heads, groups, nodes, slots = weights_kgNS.shape
    borders = sorted(set(edges_N))
    if len(borders) == 1:
        return _split_sum(weights_kgNS.reshape(kv_heads, -1, slots), value_kSd, borders[0])
    out_kgNd = weights_kgNS.new_empty(kv_heads, groups, nodes, value_kSd.shape[-1])
    for border in borders:
        some = [node for node, own in enumerate(edges_N) if own == border]
        part = _split_sum(weights_kgNS[:, :, some].reshape(kv_heads, -1, slots), value_kSd, border)
        out_kgNd[:, :, some] = part.view(kv_heads, groups, len(some), -1)
    return out_kgNd.view(kv_heads, groups * nodes, -1)


def _split_sum(weights_kMS: torch.Tensor, value_kSd: torch.Tensor, border: int) -> torch.Tensor:
    """[k, M, d]."""
    behind = _sum(weights_kMS[:, :, border:], value_kSd[:, border:])
    return behind if border == 0 else behind.add(_sum(weights_kMS[:, :, :border], value_kSd[:, :border]))


def _sum(weights_kMS: torch.Tensor, value_kSd: torch.Tensor) -> torch.Tensor:
    """[k, M, d]."""
    kv_heads, count, slots = weights_kMS.shape
    if not _together(kv_heads, count, 1):
        return _stacked([_product(weights, value.contiguous().t()) for weights, value in zip(weights_kMS, value_kSd)])
    values_SD = value_kSd.transpose(0, 1).reshape(slots, -1)
    wide = _product(weights_kMS.reshape(-1, slots), values_SD.t()).view(kv_heads, count, kv_heads, -1)
    return wide.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
