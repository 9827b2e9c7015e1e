"""The soft cross-entropy of a draft in plain PyTorch: the judge of the Triton version.

T positions, C of a chunk, H hidden, D (draft) tokens, K of the teacher's likeliest. -sum_x p(x) log q(x) with
p = softmax(teacher logits), q = softmax(student logits) in float32; its gradient by the student's logits is q - p.
"""

from typing import NamedTuple

import torch


class Judged(NamedTuple):
    """What `op.soft_cross_entropy` returns."""

    losses_C: torch.Tensor
    """float32: the cross-entropies."""
    top_losses_C: torch.Tensor | None
    """float32: their parts at the top ids; None where none were given."""
    slopes_CD: torch.Tensor
    """Gradient of weight * losses + top_weight * top_losses by the student's logits, in their dtype."""


def soft_cross_entropy_reference(
    *,
    student_CD: torch.Tensor,
    teacher_CD: torch.Tensor,
    weight: float = 1.0,
    top_ids_CK: torch.Tensor | None = None,
    top_weight: float = 0.0,
) -> Judged:
    """Of two chunks of logits; see `op.soft_cross_entropy`."""
    p_CD, log_q_CD = teacher_CD.float().softmax(-1), student_CD.float().log_softmax(-1)
    losses_C = -(p_CD * log_q_CD).sum(-1)  # not einsum: its order of summation costs two digits at 8k tokens
    q_CD = log_q_CD.exp()
    slopes_CD = weight * (q_CD - p_CD)
    if top_ids_CK is None:
        return Judged(losses_C, None, slopes_CD.to(student_CD.dtype))
    top_p_CK = p_CD.gather(-1, top_ids_CK)
    top_losses_C = -(top_p_CK * log_q_CD.gather(-1, top_ids_CK)).sum(-1)
    slopes_CD += top_weight * q_CD * top_p_CK.sum(-1, keepdim=True)
    slopes_CD.scatter_add_(-1, top_ids_CK, -top_weight * top_p_CK)
    return Judged(losses_C, top_losses_C, slopes_CD.to(student_CD.dtype))


def draft_loss_reference(*, student_TH: torch.Tensor, teacher_TH: torch.Tensor, head_DH: torch.Tensor) -> torch.Tensor:
    """The sum over T, all logits at once: memory O(T * D). float32 scalar; autograd gives the gradient."""
    p_TD = (teacher_TH.to(head_DH.dtype) @ head_DH.T).float().softmax(-1)
    log_q_TD = (student_TH.to(head_DH.dtype) @ head_DH.T).float().log_softmax(-1)
    return -(p_TD.detach() * log_q_TD).sum()
