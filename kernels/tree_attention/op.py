"""Tree attention behind one function: checks, choice of implementation, call.

B rows, N query nodes, h query heads, k key/value heads, S cache slots, C tree columns, W >= ceil(C / 64), d head dim.
"""

from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.tree_attention.reference import additive, masked_attention, tree_mask

NAME = "tree_attention"
LARGEST_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Bias = Callable[[], torch.Tensor | None]


def tree_attention(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    ancestors_BNW: torch.Tensor,
    query_depths_BN: torch.Tensor,
    column_depths_BC: torch.Tensor,
    offset: int = 0,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
    bias: Bias | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention of N tree nodes over their rows' prefixes and their ancestors. [B, h, N, d].

    query [B, h, N, d], key and value [B, k, S, d]: fp16, bf16 or fp32, any strides. h is a multiple of k.
    lengths_B: int64, committed tokens of each row, on the tensors' device. Tree column j of row b lies in slot
    lengths_B[b] + j. ancestors_BNW: int64 bits over the columns; query node i is column `offset` + i, and no node has an
    ancestor behind its own column. query_depths_BN, column_depths_BC: int64 distances from the root; positions are
    lengths_B + depth. window: keys at positions <= the query's - window are not seen. softcap: see `masked_attention`.
    Columns that no node sees may hold anything, NaN included, on the Triton path; the reference wants finite numbers.

    backend: None takes the enclosing `using` block's. bias: how the reference gets its additive mask, for callers that
    keep one per step; None builds it. splits: of the prefix, on the Triton path; None chooses.
    Raises EagleError on shapes that do not belong together and when "triton" was asked for and cannot run.
    """
    check_shapes(query_BhNd, key_BkSd, value_BkSd, lengths_B, ancestors_BNW, query_depths_BN, column_depths_BC, offset)
    refusal = why_not_triton(query_BhNd, key_BkSd, value_BkSd)
    if choose(NAME, query_BhNd.device, backend=backend, refusal=refusal) == "triton":
        from eagle.kernels.tree_attention.triton import launch

        with on(query_BhNd.device):
            return launch(
                query_BhNd if query_BhNd.stride(-1) == 1 else query_BhNd.contiguous(),
                key_BkSd,
                value_BkSd,
                lengths_B=lengths_B.contiguous(),
                ancestors_BNW=ancestors_BNW.contiguous(),
                query_depths_BN=query_depths_BN.contiguous(),
                column_depths_BC=column_depths_BC.contiguous(),
                offset=offset,
                scaling=scaling,
                window=window,
                softcap=softcap,
                splits=splits,
            )
    if bias is not None:
        bias_BgNS = bias()
    else:
        mask_BNS = tree_mask(
            lengths_B=lengths_B,
            ancestors_BNW=ancestors_BNW,
            query_depths_BN=query_depths_BN,
            column_depths_BC=column_depths_BC,
            slots=key_BkSd.shape[2],
            window=window,
        )
        bias_BgNS = additive(mask_BNS, groups=query_BhNd.shape[1] // key_BkSd.shape[1], dtype=query_BhNd.dtype)
    return masked_attention(query_BhNd, key_BkSd, value_BkSd, bias_BgNS=bias_BgNS, scaling=scaling, softcap=softcap)


def check_shapes(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    lengths_B: torch.Tensor,
    ancestors_BNW: torch.Tensor,
    query_depths_BN: torch.Tensor,
    column_depths_BC: torch.Tensor,
    offset: int,
) -> None:
    """Raises EagleError when the arguments do not belong together. Reads shapes only: no wait for a device."""
    batch, heads, nodes, head_dim = query_BhNd.shape
    columns = column_depths_BC.shape[1]
    expected = {
        "key": (key_BkSd.shape, (batch, key_BkSd.shape[1], key_BkSd.shape[2], head_dim)),
        "value": (value_BkSd.shape[:3], tuple(key_BkSd.shape[:3])),
        "lengths": (lengths_B.shape, (batch,)),
        "ancestors": (ancestors_BNW.shape[:2], (batch, nodes)),
        "query depths": (query_depths_BN.shape, (batch, nodes)),
        "column depths": (column_depths_BC.shape, (batch, columns)),
    }
    for name, (got, wanted) in expected.items():
        if tuple(got) != wanted:
            raise EagleError(
                f"tree attention: {name} has shape {tuple(got)}, a query of shape {tuple(query_BhNd.shape)} wants {wanted}"
            )
    if heads % key_BkSd.shape[1]:
        raise EagleError(f"tree attention: {heads} query heads cannot share {key_BkSd.shape[1]} key/value heads evenly")
    if offset + nodes > columns or columns > 64 * ancestors_BNW.shape[2]:
        raise EagleError(
            f"tree attention: {nodes} nodes from column {offset} on, {columns} column depths and {ancestors_BNW.shape[2]} "
            "words of ancestor bits; expected offset + nodes <= columns <= 64 * words"
        )


def why_not_triton(query_BhNd: torch.Tensor, key_BkSd: torch.Tensor, value_BkSd: torch.Tensor) -> str | None:
    """Why the Triton version does not take these tensors; None when it does."""
    head_dim = query_BhNd.shape[-1]
    if head_dim > LARGEST_HEAD_DIM:
        return f"head dim {head_dim} is above {LARGEST_HEAD_DIM}"
    if value_BkSd.shape[-1] != head_dim:
        return f"values have head dim {value_BkSd.shape[-1]}, queries {head_dim}"
    if query_BhNd.dtype not in DTYPES or not query_BhNd.dtype == key_BkSd.dtype == value_BkSd.dtype:
        return f"dtypes {query_BhNd.dtype}, {key_BkSd.dtype}, {value_BkSd.dtype} are not one of fp16, bf16, fp32"
    if key_BkSd.stride(-1) != 1 or value_BkSd.stride(-1) != 1:
        return "the head dim of keys and values is not contiguous"
    if any(t.stride(2) * t.shape[2] >= 2**31 for t in (key_BkSd, value_BkSd)):
        return "one row of the cache spans more than 2^31 elements"
    if isinstance(query_BhNd, FakeTensor) or torch.compiler.is_compiling():
        return "the call is traced, not run"
    if any(t.requires_grad for t in (query_BhNd, key_BkSd, value_BkSd)) and torch.is_grad_enabled():
        return "gradients are wanted; the Triton version has no backward"
    return None
