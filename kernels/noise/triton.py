"""Gumbel noise of whole rows in Triton. Grid (B rows, blocks of V tokens)."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from eagle.kernels.noise.device import gumbel_of, token_bits
from eagle.kernels.variants import Variant

BLOCK = 1024


@triton.jit
def _gumbel_rows(Seeds, Positions, Cycles, Out, tokens, stream, BLOCK: tl.constexpr):
    b, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    seed = tl.load(Seeds + b)
    position, cycle = tl.load(Positions + b).to(tl.int32), tl.load(Cycles + b).to(tl.int32)
    at = first + tl.arange(0, BLOCK)
    tl.store(
        Out + b * tokens + at, gumbel_of(token_bits(seed, position, first, stream, BLOCK, cycle)), mask=at < tokens
    )


def launch(
    seed_B: torch.Tensor, positions_B: torch.Tensor, cycles_B: torch.Tensor, tokens: int, *, stream: int
) -> torch.Tensor:
    """See op.py, which has checked the arguments."""
    out_BV = torch.empty(len(seed_B), tokens, dtype=torch.float32, device=seed_B.device)
    grid = (len(seed_B), triton.cdiv(tokens, BLOCK))
    _gumbel_rows[grid](seed_B, positions_B, cycles_B, out_BV, tokens, stream, BLOCK=BLOCK, num_warps=4)
    return out_BV


def variants() -> Iterator[Variant]:
    """The one version."""
    pointers = ("Seeds", "Positions", "Cycles", "Out")
    yield Variant(
        kernel="noise",
        name="gumbel rows",
        function=_gumbel_rows,
        types={**dict.fromkeys(pointers, "*i64"), "Out": "*fp32", "tokens": "i32", "stream": "i32"},
        constants={"BLOCK": BLOCK},
        divisible=frozenset(pointers),
        no_spills=True,
        representative=True,
    )
