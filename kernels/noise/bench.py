"""Gumbel noise of whole rows beside its reference: python -m eagle.kernels.bench --kernel noise

The roofline counts what is written; most of the time goes into the generator.
"""

import sys
from collections.abc import Iterator

import torch

from eagle.kernels.measure import Case, interpret_without_gpu, report
from eagle.kernels.noise.model import cost
from eagle.kernels.noise.op import gumbel_rows


def cases(device: torch.device) -> Iterator[Case]:
    """Rows of a draft level: one token's noise each."""
    for rows, tokens in ((2, 5003),) if device.type == "cpu" else ((1, 32000), (10, 32000), (80, 128256)):
        yield _case(device, rows=rows, tokens=tokens)


def _case(device: torch.device, *, rows: int, tokens: int) -> Case:
    seed_B, positions_B = torch.arange(rows, device=device) - 1, torch.arange(rows, device=device) + 100
    return Case(
        kernel="noise",
        name=f"B{rows} V{tokens}",
        dtype=torch.float32,
        cost=cost(rows=rows, tokens=tokens),
        run=lambda: gumbel_rows(seed_B, positions_B, tokens, backend="triton"),
        reference=lambda: gumbel_rows(seed_B, positions_B, tokens, backend="reference"),
        tolerance=1e-5,
        baselines={"reference": lambda: gumbel_rows(seed_B, positions_B, tokens, backend="reference")},
    )


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
