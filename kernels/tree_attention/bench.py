"""Tree attention beside SDPA with a dense mask and flex_attention: python -m eagle.kernels.bench --kernel tree_attention

On a GPU: one layer of an 8B-shaped target (32 query heads, 8 key/value heads, head dim 128, bf16), batch 1 and 8, trees of
1, 16, 64 and 256 nodes, prefixes up to 128k. Without one: tiny shapes, correctness only.
"""

import math
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from eagle.kernels.measure import Call, Case, interpret_without_gpu, report
from eagle.kernels.tree_attention.model import cost
from eagle.kernels.tree_attention.op import tree_attention
from eagle.kernels.tree_attention.reference import additive, masked_attention, tree_mask
from eagle.kernels.tree_build.reference import ancestry

MOST_BYTES = 24 * 2**30
"""Cases whose keys, values and dense mask would take more are left out."""


def cases(device: torch.device) -> Iterator[Case]:
    """The benchmark's cases for this device."""
    if device.type == "cpu":
        for nodes, window in product((1, 9), (None, 20)):
            yield _case(device, rows=2, heads=4, kv_heads=2, nodes=nodes, length=70, head_dim=64, window=window)
        return
    for rows, nodes, length in product((1, 8), (1, 16, 64, 256), (1024, 4096, 32768, 131072)):
        if 2 * rows * 8 * (length + nodes) * 128 * 2 + rows * 4 * nodes * length * 2 <= MOST_BYTES:
            yield _case(device, rows=rows, heads=32, kv_heads=8, nodes=nodes, length=length, head_dim=128)
    for head_dim in (64, 80, 96, 256):
        yield _case(device, rows=1, heads=32, kv_heads=8, nodes=64, length=32768, head_dim=head_dim)
    yield _case(device, rows=1, heads=32, kv_heads=8, nodes=64, length=32768, head_dim=128, window=4096)
    yield _case(device, rows=1, heads=32, kv_heads=8, nodes=64, length=8192, head_dim=128, softcap=50.0)


def _case(
    device: torch.device,
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    nodes: int,
    length: int,
    head_dim: int,
    window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    slots = length + nodes

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    query, key, value = (
        random(rows, heads, nodes, head_dim),
        *(random(rows, kv_heads, slots, head_dim) for _ in range(2)),
    )
    # A tree ten wide: node i hangs on the node ten before it.
    parents_BN = (torch.arange(nodes) - 10).clamp(min=0).expand(rows, -1).clone()
    parents_BN[:, 0] = -1
    depths_BN, ancestors_BNW = (tensor.to(device) for tensor in ancestry(parents_BN))
    lengths_B = torch.full((rows,), length, device=device)
    told: dict[str, Any] = {
        "lengths_B": lengths_B,
        "ancestors_BNW": ancestors_BNW,
        "query_depths_BN": depths_BN,
        "column_depths_BC": depths_BN,
    }
    scaling = head_dim**-0.5
    mask_BNS = tree_mask(**told, slots=slots, window=window)
    bias_BgNS = additive(mask_BNS, groups=heads // kv_heads, dtype=dtype)
    # The judge: the same inputs with half types' rounding in the result alone, row by row to bound its memory.
    judge = partial(_judge, query, key, value, bias_BgNS, scaling=scaling, softcap=softcap)
    baselines: dict[str, Call] = {}
    if device.type == "cuda":
        if softcap is None:
            repeated_BhNS = mask_BNS[:, None]
            baselines["SDPA dense mask"] = lambda: functional.scaled_dot_product_attention(
                query, key, value, attn_mask=repeated_BhNS, scale=scaling, enable_gqa=heads != kv_heads
            )
            baselines["SDPA packed"] = lambda: masked_attention(query, key, value, bias_BgNS=bias_BgNS, scaling=scaling)
        baselines["flex_attention"] = _flex(query, key, value, mask_BNS, scaling=scaling, softcap=softcap)
    seen = min(length, window) if window is not None else length
    name = f"B{rows} N{nodes} L{length} h{heads}/{kv_heads} d{head_dim}"
    return Case(
        kernel="tree_attention",
        name=name + (f" window {window}" if window else "") + (f" softcap {softcap:g}" if softcap else ""),
        dtype=dtype,
        cost=cost(
            rows=rows, heads=heads, kv_heads=kv_heads, nodes=nodes, length=seen, head_dim=head_dim, element=query.element_size()
        ),
        run=lambda: tree_attention(
            query, key, value, **told, scaling=scaling, window=window, softcap=softcap, backend="triton"
        ),
        reference=judge,
        tolerance=0.03 if length < 256 else 0.03 / math.sqrt(length / 256),  # averages over more values are smaller
        baselines=baselines,
    )  # fmt: skip


def _judge(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias_BgNS: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    parts = [
        masked_attention(
            query[b : b + 1].float(),
            key[b : b + 1].float(),
            value[b : b + 1].float(),
            bias_BgNS=bias_BgNS[b : b + 1].float(),
            scaling=scaling,
            softcap=softcap,
        )
        for b in range(len(query))
    ]
    return torch.cat(parts)


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_BNS: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
) -> Call:
    """flex_attention, compiled at its first call, with a block mask made from the dense one."""
    made: dict[str, Any] = {}

    def run() -> torch.Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not made:
            made["attend"] = torch.compile(flex_attention, dynamic=False)
            made["mask"] = create_block_mask(
                lambda b, h, n, s: mask_BNS[b, n, s],
                B=len(query),
                H=None,
                Q_LEN=query.shape[2],
                KV_LEN=key.shape[2],
                device=str(query.device),
            )
        capped = None if softcap is None else (lambda score, b, h, n, s: softcap * torch.tanh(score / softcap))
        out: torch.Tensor = made["attend"](
            query,
            key,
            value,
            score_mod=capped,
            block_mask=made["mask"],
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out

    return run


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
