"""The soft cross-entropy of a draft in plain PyTorch: the judge of the Triton version.

T positions, C of a chunk, H hidden, D (draft) tokens. -sum_x p(x) log q(x) with p = softmax(teacher logits), q = softmax(
student logits) in float32; its gradient by the student's logits is q - p.
"""

import torch


def soft_cross_entropy_reference(
    *, student_CD: torch.Tensor, teacher_CD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses float32 [C], slopes [C, D] in the student's dtype) of two chunks of logits."""
    p_CD, log_q_CD = teacher_CD.float().softmax(-1), student_CD.float().log_softmax(-1)
    losses_C = -(p_CD * log_q_CD).sum(-1)  # not einsum: its order of summation costs two digits at 8k tokens
    return losses_C, log_q_CD.exp_().sub_(p_CD).to(student_CD.dtype)


def draft_loss_reference(*, student_TH: torch.Tensor, teacher_TH: torch.Tensor, head_DH: torch.Tensor) -> torch.Tensor:
    """The sum over T, all logits at once: memory O(T * D). float32 scalar; autograd gives the gradient."""
    p_TD = (teacher_TH.to(head_DH.dtype) @ head_DH.T).float().softmax(-1)
    log_q_TD = (student_TH.to(head_DH.dtype) @ head_DH.T).float().log_softmax(-1)
    return -(p_TD.detach() * log_q_TD).sum()
