"""How tree attention is cut into tiles and splits. M packed query rows: nodes times query heads of a group."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Compile-time choices of one launch."""

    rows: int
    """BM: packed query rows of a program."""
    slots: int
    """BN: cache slots of a tile; divides 64."""
    num_warps: int
    num_stages: int = 2
    maxnreg: int | None = None
    """Registers per thread; None leaves it to ptxas, which may spill a little to fit one program more on a processor."""


ROW_BLOCKS = (16, 32, 64, 128)


def tiling(packed_rows: int, head_dim: int, dtype: torch.dtype, capability: int) -> Tiling:
    """The tiling for M packed query rows on a device of this compute capability (80, 90, 100 ...).

    The largest tiles that spill nothing: on sm_80 each warp holds whole key and value tiles in registers.
    """
    if dtype == torch.float32:
        largest, slots = (32, 32) if head_dim <= 64 else (16, 32) if head_dim <= 128 else (16, 16)
    elif head_dim <= 128:
        largest, slots = (64, 32) if head_dim > 64 and capability < 90 else (128, 64)
    else:
        largest, slots = 64, 32
    rows = min(largest, max(16, _power_of_2(packed_rows)))
    return Tiling(
        rows=rows,
        slots=slots,
        num_warps=8 if rows == 128 or (rows == 64 and head_dim > 128) else 4,
        maxnreg=255 if capability >= 100 and rows >= 64 and head_dim <= 64 else None,
    )


def padded_dim(head_dim: int) -> int:
    """DP: tensor cores multiply no less than 16 at a time."""
    return max(16, _power_of_2(head_dim))


def splits_for(*, programs: int, packed_rows: int, slots: int, processors: int) -> int:
    """How many programs share one row's prefix: enough to fill the device, but partial results stay below a quarter of the
    key and value traffic (2 * P * M / slots <= 0.25), and a split has at least 256 slots.

    programs: launched without splits. slots: the most a prefix may hold (shapes only: lengths stay on the device).
    """
    fill = -(-2 * processors // max(programs, 1))
    return max(1, min(fill, int(0.25 * slots / (2 * packed_rows)), slots // 256))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
