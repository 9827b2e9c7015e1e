"""Sampling beside a composition of torch operations: python -m eagle.kernels.bench --kernel sample

On a GPU: 60 nodes (a draft tree) of 32k and 128k tokens. The composition sorts, sums and adds noise that was drawn before: to
draw it costs it nothing, so that it chooses the same tokens.
"""

import sys
from collections.abc import Iterator, Mapping

import torch

from eagle.kernels.measure import Case, interpret_without_gpu, report
from eagle.kernels.noise.reference import gumbel
from eagle.kernels.sample.model import cost
from eagle.kernels.sample.op import sample
from eagle.kernels.sample.settings import RowSettings

KINDS: Mapping[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9, min-p 0.02": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
}


def cases(device: torch.device) -> Iterator[Case]:
    """The benchmark's cases for this device."""
    small = device.type == "cpu"
    for rows, vocab_size in ((3, 5003),) if small else ((60, 32000), (1, 128256), (60, 128256)):
        for name, kind in KINDS.items():
            yield _case(device, name=name, kind=kind, rows=rows, vocab_size=vocab_size)


def _case(device: torch.device, *, name: str, kind: dict[str, float], rows: int, vocab_size: int) -> Case:
    torch.manual_seed(0)
    logits_RV = (torch.randn(rows, vocab_size, device=device) * 3).bfloat16()
    top_k = [int(kind["top_k"])] if "top_k" in kind else None
    top_p, min_p = ([kind[key]] if key in kind else None for key in ("top_p", "min_p"))
    settings = RowSettings.of(
        seeds=[7], temperature=[kind["temperature"]], top_k=top_k, top_p=top_p, min_p=min_p, device=device
    )
    positions_R = torch.arange(rows, device=device)
    noise_RV = torch.stack([gumbel(7, position, vocab_size) for position in range(rows)]).to(device)
    return Case(
        kernel="sample",
        name=f"R{rows} V{vocab_size} {name}",
        dtype=torch.bfloat16,
        cost=cost(rows=rows, vocab_size=vocab_size, element=2),
        run=lambda: sample(logits_RV, positions_R=positions_R, settings=settings, backend="triton"),
        reference=lambda: sample(logits_RV, positions_R=positions_R, settings=settings, backend="reference"),
        tolerance=0.0,
        baselines={"torch": lambda: composed(logits_RV, noise_RV, **kind)},
    )


def composed(
    logits_RV: torch.Tensor,
    noise_RV: torch.Tensor,
    *,
    temperature: float,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """What one writes with torch: filters by topk, sort and softmax, then the argmax of scores and noise. int64 [R]."""
    if temperature == 0:
        return logits_RV.argmax(-1)
    scores_RV = logits_RV.float() / temperature
    if top_k:
        kth_R1 = scores_RV.topk(int(top_k), dim=-1).values[:, -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < kth_R1, float("-inf"))
    if top_p < 1:
        sorted_RV, order_RV = scores_RV.sort(-1)
        drop_RV = sorted_RV.softmax(-1).cumsum(-1) <= 1 - top_p
        scores_RV = scores_RV.masked_fill(torch.empty_like(drop_RV).scatter_(-1, order_RV, drop_RV), float("-inf"))
    if min_p:
        lowest_R1 = scores_RV.amax(-1, keepdim=True) + torch.tensor(min_p).log()
        scores_RV = scores_RV.masked_fill(scores_RV < lowest_R1, float("-inf"))
    return (scores_RV + noise_RV).argmax(-1)


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
