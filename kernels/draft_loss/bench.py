"""The soft cross-entropy of logits, and the loss of features by chunks: python -m eagle.kernels.bench --kernel draft_loss"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from eagle.kernels.draft_loss.model import features_cost, logits_cost
from eagle.kernels.draft_loss.op import draft_loss, soft_cross_entropy
from eagle.kernels.draft_loss.reference import Judged, draft_loss_reference, soft_cross_entropy_reference
from eagle.kernels.measure import Case, interpret_without_gpu, report


def cases(device: torch.device) -> Iterator[Case]:
    """The benchmark's cases for this device."""
    small = device.type == "cpu"
    for rows, tokens in ((3, 5003),) if small else ((512, 32000), (512, 128256), (2048, 32000)):
        for top in (0, 10):
            yield _logits_case(device, rows=rows, tokens=tokens, top=top)
    for positions, hidden, tokens in ((9, 16, 300),) if small else ((2048, 4096, 32000), (2048, 4096, 128256)):
        yield _features_case(device, positions=positions, hidden=hidden, tokens=tokens, chunk=4 if small else 512)


def _logits_case(device: torch.device, *, rows: int, tokens: int, top: int) -> Case:
    torch.manual_seed(0)
    student_CD, teacher_CD = ((torch.randn(rows, tokens, device=device) * 3).bfloat16() for _ in range(2))
    # The kernel overwrites its input: the first call, whose result is checked, is the one on the right logits.
    own_CD, compiled = student_CD.clone(), torch.compile(soft_cross_entropy_reference, dynamic=False)
    term: dict[str, Any] = {"top_ids_CK": teacher_CD.topk(top, dim=-1).indices, "top_weight": 1.0} if top else {}

    def run(judge: Callable[..., Judged], logits_CD: torch.Tensor, **backend: Any) -> tuple[torch.Tensor, ...]:
        judged = judge(student_CD=logits_CD, teacher_CD=teacher_CD, **term, **backend)
        return tuple(one for one in judged if one is not None)

    return Case(
        kernel="draft_loss",
        name=f"logits C{rows} D{tokens}" + (f" top-{top} term" if top else ""),
        dtype=torch.bfloat16,
        cost=logits_cost(rows=rows, tokens=tokens, element=2, top=top),
        run=lambda: run(soft_cross_entropy, own_CD, backend="triton"),
        reference=lambda: run(soft_cross_entropy_reference, student_CD),
        tolerance=5e-3,  # slopes are rounded to bfloat16, and at most 1
        baselines={
            "torch": lambda: run(soft_cross_entropy_reference, student_CD),
            "torch.compile": lambda: run(compiled, student_CD),
        },
    )


def _features_case(device: torch.device, *, positions: int, hidden: int, tokens: int, chunk: int) -> Case:
    torch.manual_seed(0)
    student_TH, teacher_TH = (torch.randn(positions, hidden, device=device).bfloat16() for _ in range(2))
    head_DH = (torch.randn(tokens, hidden, device=device) / hidden**0.5).bfloat16()

    def ours() -> torch.Tensor:
        leaf_TH = student_TH.detach().requires_grad_()
        loss = draft_loss(
            student_TH=leaf_TH, teacher_TH=teacher_TH, head_VH=head_DH, chunk_rows=chunk, backend="triton"
        )
        return torch.autograd.grad(loss, leaf_TH)[0]

    def plain() -> torch.Tensor:
        leaf_TH = student_TH.detach().requires_grad_()
        loss = draft_loss_reference(student_TH=leaf_TH, teacher_TH=teacher_TH, head_DH=head_DH)
        return torch.autograd.grad(loss, leaf_TH)[0]

    return Case(
        kernel="draft_loss",
        name=f"loss and gradient T{positions} H{hidden} D{tokens} chunk{chunk}",
        dtype=torch.bfloat16,
        cost=features_cost(positions=positions, hidden=hidden, tokens=tokens, element=2, chunk=chunk),
        run=ours,
        reference=plain,
        tolerance=1e-2,
        baselines={"all logits at once": plain},
    )


if __name__ == "__main__":
    sys.exit(report(cases(interpret_without_gpu())))
