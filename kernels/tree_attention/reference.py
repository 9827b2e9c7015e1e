"""Tree attention in plain PyTorch: the judge of every faster version, and the path that CPUs take.

B rows, N query nodes, S cache slots, h query heads, k key/value heads, g = h // k, d head dim, W = ceil(columns / 64).

Slot s of row b holds a committed token when s < L_b (its position is s) and tree node j = s - L_b otherwise (its
position is L_b + depth_j). Node i sees the whole prefix, itself and its ancestors.
"""

import torch
from torch.nn import functional

BITS = 64


def own_bits(nodes: int, width: int, *, start: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """One bit per node: node i sets bit start + i of its row. int64 [nodes, width]."""
    columns = torch.arange(start, start + nodes, device=device)
    bits_NW = torch.zeros(nodes, width, dtype=torch.int64, device=device)
    bits_NW[torch.arange(nodes, device=device), columns // BITS] = torch.ones_like(columns) << (columns % BITS)
    return bits_NW


def unpack_bits(ancestors_BNW: torch.Tensor, columns: int) -> torch.Tensor:
    """int64 [B, N, W] -> bool [B, N, columns]: column j of row i says that j is i or an ancestor of i."""
    j = torch.arange(columns, device=ancestors_BNW.device)
    words_BNj = ancestors_BNW.index_select(-1, j // BITS)
    return ((words_BNj >> (j % BITS)) & 1).bool()


def tree_mask(
    *,
    lengths_B: torch.Tensor,
    ancestors_BNW: torch.Tensor,
    query_depths_BN: torch.Tensor,
    column_depths_BC: torch.Tensor,
    slots: int,
    window: int | None = None,
) -> torch.Tensor:
    """Which of the first `slots` cache slots each query node sees. bool [B, N, slots].

    lengths_B: committed tokens of each row. ancestors_BNW: bits over the C tree columns, which lie at slots L_b ... .
    window: a sliding window in POSITIONS (siblings share one): a key is seen when its position > query position - window.
    """
    rows, nodes, _ = ancestors_BNW.shape
    columns = column_depths_BC.shape[1]
    slot_S = torch.arange(slots, device=lengths_B.device)
    in_prefix_BS = slot_S < lengths_B[:, None]
    column_BS = slot_S - lengths_B[:, None]
    in_tree_BS = (column_BS >= 0) & (column_BS < columns)
    column_BS = column_BS.clamp(0, columns - 1)
    bits_BNC = unpack_bits(ancestors_BNW, columns)
    tree_BNS = bits_BNC.gather(2, column_BS[:, None].expand(rows, nodes, slots)) & in_tree_BS[:, None]
    mask_BNS = in_prefix_BS[:, None] | tree_BNS
    if window is not None:
        key_BS = torch.where(in_prefix_BS, slot_S, lengths_B[:, None] + column_depths_BC.gather(1, column_BS))
        query_BN = lengths_B[:, None] + query_depths_BN
        mask_BNS &= key_BS[:, None] > query_BN[:, :, None] - window
    return mask_BNS


def masked_attention(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    *,
    bias_BgNS: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of every query over all S keys under an additive mask. [B, h, N, d] -> [B, h, N, dv].

    Grouped query heads are packed as rows of their key/value head (row = group member * N + node), so keys and values
    are read once and never repeated. bias_BgNS: 0 or -inf, already packed: [B, 1, g * N, S]; None: everything is seen.
    softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2).
    """
    rows, heads, nodes, _ = query_BhNd.shape
    groups = heads // key_BkSd.shape[1]
    packed = query_BhNd.reshape(rows, key_BkSd.shape[1], groups * nodes, -1)
    if softcap is None:
        out = functional.scaled_dot_product_attention(packed, key_BkSd, value_BkSd, attn_mask=bias_BgNS, scale=scaling)
    else:
        scores = softcap * torch.tanh(packed @ key_BkSd.transpose(-1, -2) * (scaling / softcap))
        scores = scores if bias_BgNS is None else scores + bias_BgNS
        out = scores.float().softmax(-1).to(value_BkSd.dtype) @ value_BkSd
    return out.reshape(rows, heads, nodes, -1)


def additive(mask_BNS: torch.Tensor, *, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """bool [B, N, S] -> 0 / -inf [B, 1, g * N, S], packed as `masked_attention` packs its queries."""
    bias_BNS = torch.zeros(mask_BNS.shape, dtype=dtype, device=mask_BNS.device).masked_fill_(~mask_BNS, float("-inf"))
    return bias_BNS.repeat(1, groups, 1)[:, None]
