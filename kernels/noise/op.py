"""Noise of whole rows behind one function: checks, choice of implementation, call. B rows, V tokens."""

import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.noise.reference import COUPLING, gumbel

NAME = "noise"


def gumbel_rows(
    seed_B: torch.Tensor,
    positions_B: torch.Tensor,
    tokens: int,
    *,
    stream: int = COUPLING,
    cycles_B: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """`gumbel` (reference.py) of every row's seed, position and cycle (None: 0). float32 [B, tokens], on the seeds' device.

    seed_B: int64, the 64 bits of the seeds. positions_B, cycles_B: int64 below 2^32, on the seeds' device. The bits are equal
    on both paths, the values to float rounding. On the Triton path the host waits for nothing.
    Raises EagleError on other shapes and dtypes and when "triton" was asked for and cannot run.
    """
    cycles_B = torch.zeros_like(positions_B) if cycles_B is None else cycles_B
    for name, one in (("seeds", seed_B), ("positions", positions_B), ("cycles", cycles_B)):
        if one.shape != seed_B.shape or one.ndim != 1 or one.dtype != torch.int64 or one.device != seed_B.device:
            raise EagleError(
                f"{NAME}: {name} are {one.dtype} {tuple(one.shape)} on {one.device}, expected int64 [rows] on {seed_B.device}"
            )
    if choose(NAME, seed_B.device, backend=backend) == "triton" and tokens:
        from eagle.kernels.noise.triton import launch

        with on(seed_B.device):
            return launch(seed_B.contiguous(), positions_B.contiguous(), cycles_B.contiguous(), tokens, stream=stream)
    drawn = zip(seed_B.tolist(), positions_B.tolist(), cycles_B.tolist())
    rows = [gumbel(seed & (2**64 - 1), at, tokens, stream=stream, cycle=cycle) for seed, at, cycle in drawn]
    return (torch.stack(rows) if rows else torch.empty(0, tokens)).to(seed_B.device)
