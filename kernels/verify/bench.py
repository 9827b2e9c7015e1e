"""Verification without a wait for the device, sampling included: python -m eagle.kernels.bench --kernel verify

On a GPU: trees of 60 nodes over 32k and 128k tokens. Nothing comparable exists in torch but the reference, node by node.
"""

import sys
from collections.abc import Iterator

import torch

from eagle.kernels.measure import Case, interpret_without_gpu, report
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.verify.model import cost
from eagle.kernels.verify.op import coupled_walk, rejection_walk
from eagle.kernels.verify.reference import Tree


def cases(device: torch.device) -> Iterator[Case]:
    """The benchmark's cases for this device."""
    small = device.type == "cpu"
    for rows, nodes, vocab_size in ((2, 7, 300),) if small else ((1, 60, 32000), (1, 60, 128256), (8, 60, 128256)):
        for rule in ("coupled", "rejection sampled", "rejection top"):
            yield _case(device, rule=rule, rows=rows, nodes=nodes, vocab_size=vocab_size)


def _case(device: torch.device, *, rule: str, rows: int, nodes: int, vocab_size: int) -> Case:
    """A tree of three children a node, drafted from the target's logits with some error."""
    torch.manual_seed(0)
    children = 3
    parents_N = (torch.arange(nodes, device=device) - 1).div(children, rounding_mode="floor")
    parents_BN = torch.where(torch.arange(nodes, device=device) == 0, -1, parents_N).expand(rows, -1).contiguous()
    depth_N, width = _depths(parents_BN[0].tolist())
    logits_BNV = (torch.randn(rows, nodes, vocab_size, device=device) * 3).bfloat16()
    expanded = int(parents_BN.max()) + 1
    noise_BEV = torch.randn(rows, expanded, vocab_size, device=device)
    log_q_BEV = (logits_BNV[:, :expanded].float() + noise_BEV).log_softmax(-1)
    drawn_BEc = (log_q_BEV - torch.empty_like(log_q_BEV).exponential_().log()).topk(children, dim=-1).indices
    tokens_BN = torch.zeros(rows, nodes, dtype=torch.int64, device=device)
    tokens_BN[:, 1:] = drawn_BEc.flatten(1)[:, : nodes - 1]
    q_row_N = torch.where(torch.arange(nodes, device=device) < expanded, torch.arange(nodes, device=device), -1)
    tree = Tree(tokens_BN, parents_BN)
    if rule == "rejection sampled":
        tree = Tree(tokens_BN, parents_BN, log_q_BEV, q_row_N.expand(rows, -1).contiguous())
    settings = RowSettings.of(seeds=list(range(rows)), temperature=[1.0] * rows, device=device)
    positions_BN = (torch.tensor(depth_N, device=device) + 100).expand(rows, -1).contiguous()

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        arguments = dict(tree=tree, positions_BN=positions_BN, settings=settings, width=width, backend=backend)
        if rule == "coupled":
            return coupled_walk(logits_BNV, **arguments)  # type: ignore[arg-type]
        return rejection_walk(logits_BNV, most_children=children, **arguments)  # type: ignore[arg-type]

    return Case(
        kernel="verify",
        name=f"B{rows} N{nodes} V{vocab_size} {rule}",
        dtype=torch.bfloat16,
        cost=cost(
            rows=rows,
            nodes=nodes,
            expanded=expanded if rule == "rejection sampled" else 0,
            width=width,
            vocab_size=vocab_size,
            element=2,
        ),
        run=lambda: run("triton"),
        reference=lambda: run("reference"),
        tolerance=0.0,
    )


def _depths(parents: list[int]) -> tuple[list[int], int]:
    """(each node's depth, the most nodes of a path)."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths, max(depths) + 1


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
