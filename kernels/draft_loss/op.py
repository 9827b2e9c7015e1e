"""The soft cross-entropy between a target's and a draft's token distributions: on logits, and on features by chunks.

T positions, C of a chunk, H hidden, V vocabulary, D (draft) tokens, K of the teacher's likeliest.
"""

from collections.abc import Callable
from typing import Any

import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.draft_loss.reference import Judged, soft_cross_entropy_reference

NAME = "draft_loss"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_TOP = 64
"""Largest K of the top-k term in the Triton version."""
CHUNK_ELEMENTS = 2**26
"""Logits of one kind held at a time."""


def soft_cross_entropy(
    *,
    student_CD: torch.Tensor,
    teacher_CD: torch.Tensor,
    weight: float = 1.0,
    top_ids_CK: torch.Tensor | None = None,
    top_weight: float = 0.0,
    backend: Backend | None = None,
    refusal: str | None = None,
    reference: Callable[[], Judged] | None = None,
) -> Judged:
    """The cross-entropies -sum_x p(x) log q(x) [C], p = softmax(teacher), q = softmax(student) in float32, and the slopes.

    top_ids_CK: int64, distinct in each row: the part of the sum over these tokens is a loss of its own (HASS's top-k term).
    slopes_CD: the gradient of weight * losses + top_weight * top losses by the student's logits. student_CD's memory may be
    taken for them: it holds nothing of use afterwards. No autograd: for use inside an autograd.Function. Finite logits.

    backend: None takes the enclosing `using` block's. refusal: why the caller cannot take the Triton version. reference: what
    runs in place of it, for callers that keep the teacher's softmax for several students; None: `reference.py`.
    Raises EagleError on shapes that do not belong together and when "triton" was asked for and cannot run.
    """
    if student_CD.ndim != 2 or student_CD.shape != teacher_CD.shape or student_CD.shape[1] == 0:
        raise EagleError(
            f"{NAME}: the student's logits have shape {tuple(student_CD.shape)}, the teacher's {tuple(teacher_CD.shape)}; "
            "expected the same [positions, tokens]"
        )
    refusal = refusal or _why_not_triton(student_CD, teacher_CD, top_ids_CK)
    if choose(NAME, student_CD.device, backend=backend, refusal=refusal) == "triton" and len(student_CD):
        from eagle.kernels.draft_loss.triton import launch

        with on(student_CD.device):
            judged = launch(
                student_CD=student_CD.detach(),
                teacher_CD=teacher_CD.to(student_CD.dtype),
                slopes_CD=student_CD.detach(),
                weight=weight,
                top_ids_CK=None if top_ids_CK is None else top_ids_CK.contiguous(),
                top_weight=top_weight,
            )
        return Judged(*judged)
    if reference is not None:
        return reference()
    return soft_cross_entropy_reference(
        student_CD=student_CD.detach(),
        teacher_CD=teacher_CD.detach(),
        weight=weight,
        top_ids_CK=top_ids_CK,
        top_weight=top_weight,
    )


def _why_not_triton(student_CD: torch.Tensor, teacher_CD: torch.Tensor, top_ids_CK: torch.Tensor | None) -> str | None:
    if student_CD.dtype not in DTYPES or torch.promote_types(student_CD.dtype, teacher_CD.dtype) != student_CD.dtype:
        return (
            f"logits are {student_CD.dtype} and {teacher_CD.dtype}, expected the student's to be one of fp16, bf16, fp32 and "
            "the teacher's no wider"
        )
    if student_CD.stride(1) != 1 or teacher_CD.stride(1) != 1:
        return "the tokens are not the contiguous dimension of the logits"
    if top_ids_CK is not None and top_ids_CK.shape[1] > MOST_TOP:
        return f"the top-k term is over {top_ids_CK.shape[1]} tokens, expected at most {MOST_TOP}"
    return None


def draft_loss(
    *,
    student_TH: torch.Tensor,
    teacher_TH: torch.Tensor,
    head_VH: torch.Tensor,
    draft_ids_D: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """The sum over T of the soft cross-entropies of softmax(teacher W^T) and softmax(student W^T). float32 scalar.

    student_TH has the gradient; teacher and W are frozen. W is head_VH, or its rows draft_ids_D (int64; both distributions
    are then over these tokens; callers with many calls slice once and give the slice as head_VH). Features are multiplied
    in W's dtype. chunk_rows: positions whose logits are held at a time; None: CHUNK_ELEMENTS / D. Memory O(chunk * D): the
    gradient is taken in the forward pass, while a chunk's logits live.
    Raises EagleError on shapes that do not belong together and when "triton" was asked for and cannot run.
    """
    hidden = head_VH.shape[-1]
    if student_TH.ndim != 2 or student_TH.shape != teacher_TH.shape or student_TH.shape[1] != hidden:
        raise EagleError(
            f"{NAME}: student {tuple(student_TH.shape)}, teacher {tuple(teacher_TH.shape)} and head {tuple(head_VH.shape)} do "
            "not belong together; expected [T, H], [T, H] and [V, H]"
        )
    head_DH = head_VH if draft_ids_D is None else head_VH.index_select(0, draft_ids_D)
    rows = max(1, CHUNK_ELEMENTS // len(head_DH)) if chunk_rows is None else chunk_rows
    if rows < 1:
        raise EagleError(f"{NAME}: chunk_rows is {chunk_rows}, expected 1 or more")
    return _DraftLoss.apply(student_TH, teacher_TH.detach(), head_DH.detach(), rows, backend)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_TH: torch.Tensor,
        teacher_TH: torch.Tensor,
        head_DH: torch.Tensor,
        rows: int,
        backend: Backend | None,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=student_TH.device)
        gradient_TH = torch.empty_like(student_TH) if ctx.needs_input_grad[0] else None
        for start in range(0, len(student_TH), rows):
            chunk = slice(start, start + rows)
            losses_C, _, slopes_CD = soft_cross_entropy(
                student_CD=student_TH[chunk].to(head_DH.dtype) @ head_DH.T,
                teacher_CD=teacher_TH[chunk].to(head_DH.dtype) @ head_DH.T,
                backend=backend,
            )
            total += losses_C.sum()
            if gradient_TH is not None:
                gradient_TH[chunk] = slopes_CD @ head_DH
        if gradient_TH is not None:
            ctx.save_for_backward(gradient_TH)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient_TH,) = ctx.saved_tensors
        return (gradient_TH * grads[0].to(gradient_TH.dtype)), None, None, None, None
