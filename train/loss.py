"""The EAGLE-1 losses at the supervised positions, with memory O(chunk * V) instead of O(S * V).

S supervised positions of a batch, H hidden, V vocabulary, D draft vocabulary. Both losses are sums over the positions:
the training loop divides by the number of supervised tokens of the whole optimiser step.
"""

from typing import Any

import torch
from torch.nn import functional

from eagle.vocab import DraftTokens

CHUNK_ELEMENTS = 2**25
"""Logits held at a time (128 MiB in float32); a few tensors of this size live at once."""


def draft_losses(
    *, predictions_SH: torch.Tensor, targets_SH: torch.Tensor, tokens: DraftTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """(regression, classification), each a float32 scalar summed over the S positions (0 when S = 0).

    predictions_SH: the head's features, with gradient; targets_SH: the target's own features at the same indices.
    regression: SmoothL1, mean over H (arXiv 2401.15077, section 4.2, L_reg). classification: the soft cross-entropy
    -sum_x p(x) log q(x) with p = softmax(logits(target)), q = softmax(logits(prediction)) in float32 (L_cls).

    A reduced draft vocabulary restricts both to its tokens: p is renormalised on them, and a position where the target's
    likeliest token is none of them adds nothing to the classification (nothing a head could learn there would be
    accepted), while its regression stays. Both sums are over all S positions, whatever was left out.
    """
    predictions_SH, targets_SH = predictions_SH.float(), targets_SH.float()
    regression = functional.smooth_l1_loss(predictions_SH, targets_SH, reduction="none").mean(dim=-1).sum()
    classification = _SoftCrossEntropy.apply(predictions_SH, targets_SH, tokens)
    return regression, classification


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum of soft cross-entropies by chunks; the gradient is taken in the forward, while a chunk's logits live."""

    @staticmethod
    def forward(ctx: Any, predictions_SH: torch.Tensor, targets_SH: torch.Tensor, tokens: DraftTokens) -> torch.Tensor:
        total = predictions_SH.new_zeros(())
        gradients = []
        rows = max(1, CHUNK_ELEMENTS // tokens.full.vocab_size)
        for student_CH, teacher_CH in zip(predictions_SH.split(rows), targets_SH.split(rows), strict=True):
            p_CD, learns_C1 = restricted_teacher(tokens.full.logits(teacher_CH).float(), tokens)
            with torch.enable_grad():
                student_CH = student_CH.detach().requires_grad_()
                logits_CD = tokens.logits(student_CH)
            log_q_CD = logits_CD.detach().float().log_softmax(dim=-1)
            losses_C = torch.einsum("cd,cd->c", p_CD, log_q_CD)
            total = total - (losses_C if learns_C1 is None else losses_C * learns_C1[:, 0]).sum()
            if ctx.needs_input_grad[0]:
                slope_CD = log_q_CD.exp_().sub_(p_CD)  # d loss / d logits = q - p
                if learns_C1 is not None:
                    slope_CD.mul_(learns_C1)
                gradients.append(torch.autograd.grad(logits_CD, student_CH, slope_CD.to(logits_CD.dtype))[0])
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient_SH,) = ctx.saved_tensors
        return gradient_SH * grads[0], None, None


def restricted_teacher(logits_CV: torch.Tensor, tokens: DraftTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
    """p over the draft tokens [C, D], and which positions count for the classification (bool [C, 1]; None: all).

    logits_CV: the target's, float32, over its full vocabulary.
    """
    if tokens.vocabulary is None:
        return logits_CV.softmax(dim=-1), None
    return tokens.restrict(logits_CV).softmax(dim=-1), tokens.holds(logits_CV.argmax(dim=-1))[:, None]
