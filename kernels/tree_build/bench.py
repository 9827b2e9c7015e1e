"""Tree build beside its reference: python -m eagle.kernels.bench --kernel tree_build

A launch's latency is all there is to it: the roofline of a few kilobytes is far below a microsecond.
"""

import sys
from collections.abc import Iterator

import torch

from eagle.kernels.measure import Case, interpret_without_gpu, report
from eagle.kernels.tree_build.model import cost
from eagle.kernels.tree_build.op import tree_links
from eagle.kernels.tree_build.reference import tree_links as reference_links


def cases(device: torch.device) -> Iterator[Case]:
    """Random trees of 16, 64 and 256 nodes."""
    for rows, nodes in ((1, 16), (2, 64)) if device.type == "cpu" else ((1, 16), (1, 64), (8, 64), (8, 256)):
        yield _case(device, rows=rows, nodes=nodes)


def _case(device: torch.device, *, rows: int, nodes: int) -> Case:
    picks = torch.rand(rows, nodes, generator=torch.Generator().manual_seed(0))
    parents_BN = (picks * torch.arange(nodes)).long()
    parents_BN[:, 0] = -1
    parents_BN, lengths_B = parents_BN.to(device), torch.arange(rows, device=device)
    return Case(
        kernel="tree_build",
        name=f"B{rows} N{nodes}",
        dtype=torch.int64,
        cost=cost(rows=rows, nodes=nodes),
        run=lambda: tuple(vars(tree_links(parents_BN, lengths_B, backend="triton")).values()),
        reference=lambda: tuple(vars(reference_links(parents_BN, lengths_B)).values()),
        tolerance=0.0,
        baselines={"reference": lambda: tuple(vars(reference_links(parents_BN, lengths_B)).values())},
    )


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
