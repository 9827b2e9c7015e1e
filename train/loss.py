"""The losses of an unrolled head, with memory O(chunk * D) instead of O(S * D) for the token distributions.

B rows, T tokens, H hidden, K unroll steps, S target positions, S_k those that step k reaches, C of a chunk, V vocabulary,
D draft vocabulary. All losses are sums over positions: the training loop divides by the number of supervised tokens of
the whole optimiser step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from eagle.data.chunks import chunk_rows
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.draft_loss.op import soft_cross_entropy
from eagle.kernels.draft_loss.reference import Judged
from eagle.train.batches import Batch
from eagle.train.divergences import Teacher, top_k
from eagle.train.draftable import Draftable
from eagle.train.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Losses:
    """One batch's, summed over its supervised positions."""

    total: torch.Tensor
    """float32 scalar with gradient: everything, weighted"""
    regression_K: torch.Tensor
    """float64 [K], detached: SmoothL1 of each step, mean over H; 0 where it has no weight"""
    classification_K: torch.Tensor
    """float64 [K], detached: the objective's divergence at each step"""
    distillation_K: torch.Tensor
    """float64 [K], detached: the top-k term of each step; 0 where it has no weight"""


def draft_losses(
    *,
    head: DraftHead,
    predictions: Sequence[torch.Tensor],
    batch: Batch,
    tokens: DraftTokens,
    objective: Objective,
    draftable: Draftable,
) -> Losses:
    """The losses of a batch's predictions [B, T, H] at steps 0 .. K-1 (`unroll`).

    regression: SmoothL1 with the target's feature (arXiv 2401.15077, section 4.2, L_reg). classification: the objective's
    divergence between p = softmax(the target's logits) and q = softmax(the head's), in float32. The target's logits are
    computed once per position for all steps.

    A reduced draft vocabulary restricts p and q to its tokens (p is renormalised), and a position where the target's
    likeliest token is none of them adds nothing to the classification (nothing a head could learn there would be
    accepted), while its regression stays. Sums are over all supervised positions, whatever was left out.
    """
    masks = [batch.mask(step).flatten() for step in range(len(predictions))]
    features_NH = batch.features_BTH.flatten(0, 1).float()
    flat = [prediction.flatten(0, 1) for prediction in predictions]
    zeros_K = torch.zeros(len(predictions), dtype=torch.float64, device=features_NH.device)
    total, regression_K = features_NH.new_zeros(()), zeros_K.clone()
    if objective.regression_weight > 0:
        for step, (prediction_NH, mask_N, weight) in enumerate(zip(flat, masks, objective.step_weights, strict=True)):
            index_S = mask_N.nonzero()[:, 0]
            loss = smooth_l1(prediction_NH[index_S], features_NH[index_S + 1 + step])
            regression_K[step] = loss.detach()
            total = total + objective.regression_weight * weight * loss
    targets_S = masks[0].nonzero()[:, 0] + 1
    drafted_S = draftable.of(
        batch.features_BTH, targets_S, document_BT=batch.document_BT, numbers=batch.numbers or [()] * len(batch.ids_BT)
    )
    targets_S = targets_S[drafted_S]
    students, reached = [], []
    for step, (prediction_NH, mask_N) in enumerate(zip(flat, masks, strict=True)):
        index_S = targets_S - 1 - step
        reached_S = mask_N[index_S.clamp(min=0)] & (index_S >= 0)
        students.append(prediction_NH[index_S[reached_S]])
        reached.append(reached_S)
    weighted, classification_K, distillation_K = _Classification.apply(
        *(head, tokens, objective, features_NH[targets_S], reached, len(students)), *students, *head.logit_parameters()
    )
    return Losses(
        total=total + weighted,
        regression_K=regression_K,
        classification_K=classification_K,
        distillation_K=distillation_K,
    )


def smooth_l1(predictions_SH: torch.Tensor, targets_SH: torch.Tensor) -> torch.Tensor:
    """Mean over H, summed over S, in float32."""
    return functional.smooth_l1_loss(predictions_SH.float(), targets_SH.float(), reduction="none").mean(dim=-1).sum()


class _Classification(torch.autograd.Function):
    """Divergences of all steps by chunks of target positions; gradients are taken in the forward, while a chunk's logits
    live, of the students' features [S_k, H] and of the parameters that the head's logits have of their own."""

    @staticmethod
    def forward(
        ctx: Any,
        head: DraftHead,
        tokens: DraftTokens,
        objective: Objective,
        teachers_SH: torch.Tensor,
        reached: Sequence[torch.Tensor],
        count: int,
        *differentiable: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        students, parameters = differentiable[:count], differentiable[count:]
        total = teachers_SH.new_zeros(())
        sums_2K = torch.zeros(2, count, dtype=torch.float64, device=total.device)
        wanted = any(ctx.needs_input_grad)
        gradients = [torch.zeros_like(tensor) for tensor in differentiable] if wanted else []
        rows = chunk_rows(tokens.size, teachers_SH.device)
        ends = torch.stack([reached_S.cumsum(0) for reached_S in reached]).cpu()
        for start in range(0, len(teachers_SH), rows):
            stop = min(start + rows, len(teachers_SH))
            taught_CD = tokens.logits(teachers_SH[start:stop])
            teacher = Teacher(taught_CD if taught_CD.element_size() == 2 else taught_CD.float())
            for step, (students_SH, reached_S) in enumerate(zip(students, reached, strict=True)):
                at = slice(int(ends[step, start - 1]) if start else 0, int(ends[step, stop - 1]))
                if at.start == at.stop:
                    continue
                with torch.enable_grad():
                    student_CH = students_SH[at].detach().requires_grad_()
                    logits_CD = head.logits(student_CH, tokens)
                seen = teacher if at.stop - at.start == stop - start else teacher.at(reached_S[start:stop])
                with torch.autocast(teachers_SH.device.type, enabled=False):  # products in float32
                    loss, slope_CD = _judge(seen, logits_CD.detach(), objective, step, sums_2K)
                total += loss
                if wanted:
                    own = torch.autograd.grad(logits_CD, [student_CH, *parameters], slope_CD.to(logits_CD.dtype))
                    gradients[step][at] = own[0]
                    for whole, part in zip(gradients[count:], own[1:], strict=True):
                        whole += part
        ctx.save_for_backward(*gradients)
        classification_K, distillation_K = sums_2K.unbind()
        ctx.mark_non_differentiable(classification_K, distillation_K)
        return total, classification_K, distillation_K

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grads[0]  # kept in float32: rounded to bfloat16 it would be off by up to 0.4%
        scaled = (
            (gradient.to(torch.promote_types(gradient.dtype, scale.dtype)) * scale).to(gradient.dtype)
            for gradient in ctx.saved_tensors
        )
        return *([None] * 6), *scaled


def _judge(
    teacher: Teacher, logits_CD: torch.Tensor, objective: Objective, step: int, sums_2K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted loss, its gradient by the logits [C, D]) of one step's chunk; adds the plain sums to sums_2K.

    The gradient may take the logits' memory.
    """
    weight = objective.classification_weight * objective.step_weights[step]
    top_weight = objective.distill_weight * objective.step_weights[step]
    top_ids_CK = teacher.best(min(objective.distill_top_k, logits_CD.shape[-1])) if top_weight > 0 else None
    judged = soft_cross_entropy(
        student_CD=logits_CD,
        teacher_CD=teacher.logits,
        weight=weight,
        top_ids_CK=top_ids_CK,
        top_weight=top_weight,
        refusal=objective.no_kernel,
        reference=lambda: _plainly(teacher, logits_CD, objective, weight=weight, top_weight=top_weight),
    )
    classification = judged.losses_C.sum()
    sums_2K[0, step] += classification
    loss = weight * classification
    if judged.top_losses_C is not None:
        distillation = judged.top_losses_C.sum()
        sums_2K[1, step] += distillation
        loss = loss + top_weight * distillation
    return loss, judged.slopes_CD


def _plainly(
    teacher: Teacher, logits_CD: torch.Tensor, objective: Objective, *, weight: float, top_weight: float
) -> Judged:
    """Any divergence, in plain PyTorch; the slopes are float32."""
    log_q_CD = logits_CD.float().log_softmax(dim=-1)
    losses_C, slope_CD = objective.classify(teacher, log_q_CD)
    slope_CD.mul_(weight)
    if top_weight == 0:
        return Judged(losses_C, None, slope_CD)
    top_losses_C, more_CD = top_k(teacher, log_q_CD, count=min(objective.distill_top_k, log_q_CD.shape[-1]))
    return Judged(losses_C, top_losses_C, slope_CD.add_(more_CD, alpha=top_weight))
