"""Commit beside one indexed copy per layer: python -m eagle.kernels.bench --kernel commit

On a GPU: the caches of an 8B-shaped target (32 layers, 8 heads of 128, bf16), 8 accepted nodes per row.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from eagle.kernels.commit.model import cost
from eagle.kernels.commit.op import commit
from eagle.kernels.commit.reference import move_slots, slots_of_path
from eagle.kernels.measure import Call, Case, interpret_without_gpu, report


def cases(device: torch.device) -> Iterator[Case]:
    """The benchmark's cases for this device."""
    small = device.type == "cpu"
    for rows in (1, 3) if small else (1, 8, 32):
        yield _case(
            device, layers=2 if small else 32, rows=rows, kv_heads=2 if small else 8, head_dim=16 if small else 128
        )


def _case(device: torch.device, *, layers: int, rows: int, kv_heads: int, head_dim: int) -> Case:
    slots, dtype = 256, torch.bfloat16
    buffers = [torch.randn(rows, kv_heads, slots, head_dim, device=device, dtype=dtype) for _ in range(2 * layers)]
    path_BK = (torch.arange(8, device=device) * 7).expand(rows, -1).contiguous()  # node 0 stays where it is
    counts_B, lengths_B = torch.full((rows,), 8, device=device), torch.arange(rows, device=device) * 3 + 100
    source_BK, target_BK = slots_of_path(path_BK, counts_B, lengths_B)

    expected = [buffer.clone() for buffer in buffers]
    move_slots(expected, source_BK=source_BK, target_BK=target_BK)
    ours = partial(commit, path_BK=path_BK, counts_B=counts_B, lengths_B=lengths_B, backend="triton")
    indexed = partial(move_slots, source_BK=source_BK, target_BK=target_BK)
    return Case(
        kernel="commit",
        name=f"B{rows} {layers} layers k{kv_heads} d{head_dim} K8",
        dtype=dtype,
        cost=cost(buffers=2 * layers, rows=rows, kv_heads=kv_heads, accepted=8, moved=7, head_dim=head_dim, element=2),
        run=_in_place(ours, buffers),
        reference=lambda: expected,
        tolerance=0.0,
        baselines={"indexed copies": _in_place(indexed, buffers)},
    )


def _in_place(move: Callable[[list[torch.Tensor]], None], buffers: list[torch.Tensor]) -> Call:
    """Moves in a copy of the buffers: its first result is the one to check, later calls move again what lies there."""
    own = [buffer.clone() for buffer in buffers]

    def call() -> list[torch.Tensor]:
        move(own)
        return own

    return call


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
