"""Attention of an unrolled head: one causal block and one diagonal per later step, merged by log-sum-exp.

B rows, T tokens, h query heads, k key heads (g = h / k query heads share one), d head size, S scores of a block. At
unroll step n the query of index i sees the step-0 keys j <= i of its own document and its own key of every step 1 .. n.
A head's window of W positions leaves those whose position is above i + n - W: step-0 keys j > i + n - W and own keys of
steps m > n - W. The explicit form is a [T, (n+1) T] mask; here the causal block (whose softmax needs T memory, not T^2)
and the diagonals (elementwise) are computed apart and merged: with lse = log sum exp of all scores of a query,

    out = exp(lse_block - lse) out_block + sum_n exp(score_n - lse) value_n.

Backward, each part's probabilities are exp(score - lse) with the MERGED lse, and the softmax's own term is
sum_d(grad_out * out) with the MERGED out: what a fused backward makes of `out` and `logsumexp` when it is handed
those instead of its own (as in ring attention, arXiv 2310.01889).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from eagle.errors import EagleError

Backend = Literal["auto", "fused", "blockwise"]
"""auto: fused where PyTorch has such an operator for the device and dtype, else blockwise."""
Span = tuple[int, int, int]
"""(row, start, end): a document's tokens within its row."""
QUERY_BLOCK = 128
"""Queries that the blockwise form scores at a time: its memory is B * h * QUERY_BLOCK * T scores."""


class Block(NamedTuple):
    """Causal attention over step-0 keys: two functions."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(query [B, h, T, d], key [B, k, T, d], value, scale) -> (out [B, h, T, d], logsumexp [B, h, T])"""
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(grad, query, key, value, out, logsumexp, scale) -> gradients of query, key, value; out and logsumexp are merged ones"""


def document_spans(document_BT: torch.Tensor) -> tuple[Span, ...] | None:
    """Where documents lie in packed rows; None when no row holds two (plain causal attention serves all of them).

    document_BT: int64, a document's number within its row, -1 in padding on the right. Padding after a row's only document
    sees that document, and nobody sees it; in packed rows it is a span of its own.
    """
    if not bool((document_BT > 0).any()):
        return None
    spans = []
    for row, documents_T in enumerate(document_BT.cpu()):
        counts = documents_T.unique_consecutive(return_counts=True)[1].tolist()
        start = 0
        for count in counts:
            spans.append((row, start, start + count))
            start += count
    return tuple(spans)


def merged_attention(
    query_BhTd: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    spans: tuple[Span, ...] | None = None,
    window: int | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """[B, h, T, d] from the keys and values [B, k, T, d] of steps 0 .. n, differentiable in all of them.

    Under autocast the products are in its dtype, everything else in float32. spans: `document_spans`. window: positions that a
    query sees, its own included; documents longer than it are computed blockwise, whatever the backend.
    """
    dtype = product_dtype(query_BhTd)
    tensors = [tensor.to(dtype) for tensor in (query_BhTd, *keys, *values)]
    block = choose_block(backend, tensors[0])
    out: torch.Tensor = _MergedAttention.apply(block, spans, window, *tensors)
    return out


def product_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What the products are made in: autocast's dtype where it is on (float64 stays), else the tensor's own."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return tensor.dtype


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        block: Block,
        spans: tuple[Span, ...] | None,
        window: int | None,
        query: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:
        keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        scale, step = query.shape[-1] ** -0.5, len(keys) - 1
        band = None if window is None else window - step
        first = 1 if window is None else max(1, step - window + 1)  # the first diagonal within the window
        with torch.autocast(query.device.type, enabled=False):
            out, lse = _spanwise_forward(block, spans, band, query, keys[0], values[0], scale)
            if len(keys) > 1:
                out, lse = _merge(out, lse, query, keys[first:], values[first:], scale)
        ctx.block, ctx.spans, ctx.band, ctx.first, ctx.scale = block, spans, band, first, scale
        ctx.save_for_backward(query, *rest, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, *rest, out, lse = ctx.saved_tensors
        keys, values = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        (grad,) = grads
        with torch.autocast(query.device.type, enabled=False):
            grad = grad.to(query.dtype)
            of_block = _spanwise_backward(
                ctx.block, ctx.spans, ctx.band, grad, query, keys[0], values[0], out, lse, ctx.scale
            )
            unseen = [None] * (ctx.first - 1)
            grad_query, grad_keys, grad_values = of_block[0], [of_block[1], *unseen], [of_block[2], *unseen]
            if len(keys) > 1:
                wide = _wide(query.dtype)
                grad_query = grad_query.to(wide)
                ours_BhT = (grad.to(wide) * out).sum(dim=-1)
                for key, value in zip(keys[ctx.first :], values[ctx.first :], strict=True):
                    weights_BhT = (_diagonal(query, key, ctx.scale) - lse).exp_()
                    slopes_BhT = weights_BhT * (_diagonal(grad, value, 1.0) - ours_BhT)
                    grad_query += slopes_BhT[..., None] * _shared(key, query).to(wide) * ctx.scale
                    grad_keys.append(_gather(slopes_BhT, query, like=key, scale=ctx.scale))
                    grad_values.append(_gather(weights_BhT, grad, like=value, scale=1.0))
        return None, None, None, grad_query.to(query.dtype), *grad_keys, *grad_values


def _merge(
    out: torch.Tensor,
    block_lse: torch.Tensor,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = [_diagonal(query, key, scale) for key in keys]
    lse = block_lse
    for scores_BhT in scores:
        lse = torch.logaddexp(lse, scores_BhT)
    merged = out.to(_wide(out.dtype)) * (block_lse - lse).exp()[..., None]
    for scores_BhT, value in zip(scores, values, strict=True):
        merged.addcmul_((scores_BhT - lse).exp()[..., None], _shared(value, out).to(merged.dtype))
    return merged.to(out.dtype), lse


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32 for the half precisions."""
    return torch.promote_types(dtype, torch.float32)


def _shared(states_BkTd: torch.Tensor, like_BhTd: torch.Tensor) -> torch.Tensor:
    """A view-like repeat of key heads for the query heads that share them."""
    groups = like_BhTd.shape[1] // states_BkTd.shape[1]
    return states_BkTd if groups == 1 else states_BkTd.repeat_interleave(groups, dim=1)


def _diagonal(left_BhTd: torch.Tensor, right_BkTd: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, h, T]: each index's product with its own, in float32 (or wider)."""
    wide = _wide(left_BhTd.dtype)
    return (left_BhTd.to(wide) * _shared(right_BkTd, left_BhTd)).sum(dim=-1).mul_(scale)


def _gather(weights_BhT: torch.Tensor, states_BhTd: torch.Tensor, *, like: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, k, T, d]: the weighted states, summed over the query heads that share a key head."""
    weighted = (weights_BhT[..., None] * states_BhTd.to(weights_BhT.dtype)).mul_(scale)
    return weighted.unflatten(1, (like.shape[1], -1)).sum(dim=2).to(like.dtype)


def _within(block: Block, band: int | None, tokens: int) -> Block:
    """The block for a span of `tokens` whose queries see their last `band` step-0 keys alone (None: all of them)."""
    if band is None or band >= tokens:
        return block
    if band < 1:
        return UNSEEN
    return Block(partial(_blockwise_forward, band=band), partial(_blockwise_backward, band=band))


def _spanwise_forward(
    block: Block,
    spans: tuple[Span, ...] | None,
    band: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if spans is None:
        return _within(block, band, query.shape[2]).forward(query, key, value, scale)
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:-1], dtype=_wide(query.dtype), device=query.device)
    for row, start, end in spans:
        at = (slice(row, row + 1), slice(None), slice(start, end))
        out[at], lse[at] = _within(block, band, end - start).forward(query[at], key[at], value[at], scale)
    return out, lse


def _spanwise_backward(
    block: Block,
    spans: tuple[Span, ...] | None,
    band: int | None,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    if spans is None:
        return _within(block, band, query.shape[2]).backward(grad, query, key, value, out, lse, scale)
    gradients = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for row, start, end in spans:
        at = (slice(row, row + 1), slice(None), slice(start, end))
        whole_span = (grad[at], query[at], key[at], value[at], out[at], lse[at], scale)
        parts = _within(block, band, end - start).backward(*whole_span)
        for whole, part in zip(gradients, parts, strict=True):
            whole[at] = part
    return gradients


def choose_block(backend: Backend, query: torch.Tensor) -> Block:
    """The causal block's form for this device and dtype. Raises EagleError when "fused" is asked for and there is none."""
    if backend == "blockwise":
        return BLOCKWISE
    if query.device.type == "cpu":
        return FUSED_CPU
    # Flash attention's kernels: half precision, head sizes that are multiples of 8 up to 256, Ampere or newer.
    size, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    if (
        query.is_cuda
        and half
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(query.device)[0] >= 8
    ):
        return FUSED_CUDA
    if backend == "fused":
        raise EagleError(
            f"no fused attention for {query.dtype} with head size {size} on {query.device}; use bf16 on a GPU of compute "
            'capability 8 or newer, or the backend "auto"'
        )
    return BLOCKWISE


def _blocks(tokens: int, band: int | None) -> list[tuple[int, int, int]]:
    """Of each block of queries: the first key it sees, its first query, its end (of both)."""
    blocks = [(start, min(start + QUERY_BLOCK, tokens)) for start in range(0, tokens, QUERY_BLOCK)]
    return [(0 if band is None else max(0, start - band + 1), start, end) for start, end in blocks]


def _scores(
    query: torch.Tensor, key: torch.Tensor, first: int, start: int, scale: float, band: int | None
) -> torch.Tensor:
    """[B, k, g, C, S] of queries start .. E-1 against keys first .. E-1, S of them; -inf in the future and before the band."""
    scores = (query * scale) @ key[:, :, None].mT
    key_S = torch.arange(first, first + key.shape[2], device=key.device)
    row_C1 = torch.arange(start, first + key.shape[2], device=key.device)[:, None]
    unseen_CS = key_S > row_C1 if band is None else (key_S > row_C1) | (key_S <= row_C1 - band)
    return scores.masked_fill_(unseen_CS, float("-inf"))


def _blockwise_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, band: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, key_heads = _wide(query.dtype), key.shape[1]
    outs, sums = [], []
    for first, start, end in _blocks(query.shape[2], band):
        part = query[:, :, start:end].unflatten(1, (key_heads, -1)).to(wide)
        scores = _scores(part, key[:, :, first:end].to(wide), first, start, scale, band)
        lse = scores.logsumexp(dim=-1)
        outs.append((scores.sub_(lse[..., None]).exp_() @ value[:, :, None, first:end].to(wide)).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2).to(query.dtype), torch.cat(sums, dim=2)


def _blockwise_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    band: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, key_heads = _wide(query.dtype), key.shape[1]
    grad_query = torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
    for first, start, end in _blocks(query.shape[2], band):
        at = (slice(None), slice(None), slice(start, end))
        parts = (tensor[at].unflatten(1, (key_heads, -1)).to(wide) for tensor in (query, grad, out, lse))
        query_CD, grad_CD, out_CD, lse_C = parts
        seen_key, seen_value = key[:, :, first:end].to(wide), value[:, :, first:end].to(wide)
        weights = _scores(query_CD, seen_key, first, start, scale, band).sub_(lse_C[..., None]).exp_()
        grad_value[:, :, first:end] += (weights.mT @ grad_CD).sum(dim=2)
        slopes = grad_CD @ seen_value[:, :, None].mT
        slopes.sub_((grad_CD * out_CD).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_query[at] = (slopes @ seen_key[:, :, None]).flatten(1, 2).to(query.dtype)
        grad_key[:, :, first:end] += (slopes.mT @ query_CD).sum(dim=2)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _cpu_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, True, scale=scale)
    return out, lse


def _cpu_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_query, grad_key, grad_value = flash(grad, query, key, value, out, lse, 0.0, True, scale=scale)
    return grad_query, grad_key, grad_value


def _cuda_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = flash(query, _shared(key, query), _shared(value, query), 0.0, True, False, scale=scale)
    return out, lse


def _cuda_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    tokens, seed = query.shape[2], torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout: not read
    # The kernel reads logsumexp as if it were contiguous: a span of a packed row is not.
    tensors = (grad, query, _shared(key, query), _shared(value, query), out, lse)
    whole = (tensor.contiguous() for tensor in tensors)
    gradients = flash(*whole, None, None, tokens, tokens, 0.0, True, seed, seed[:0], scale=scale)
    heads = (key.shape[1], -1)
    return gradients[0], gradients[1].unflatten(1, heads).sum(dim=2), gradients[2].unflatten(1, heads).sum(dim=2)


def _unseen_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), query.new_full(query.shape[:-1], float("-inf"), dtype=_wide(query.dtype))


def _unseen_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


UNSEEN = Block(_unseen_forward, _unseen_backward)
"""Steps beyond the window see no step-0 key."""
BLOCKWISE = Block(_blockwise_forward, _blockwise_backward)
FUSED_CPU = Block(_cpu_forward, _cpu_backward)
FUSED_CUDA = Block(_cuda_forward, _cuda_backward)
