"""One optimiser step.

Its micro-batches are read, the GLOBAL number of their supervised tokens (all processes, all micro-steps) is agreed on,
and every micro-step's summed loss is divided by it. So the same global batch gives the same step however it is cut into
processes and micro-steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.utils import get_total_norm

from eagle.config import Recipe
from eagle.data.documents import Documents
from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.dispatch import by_kernel, since, snapshot, using
from eagle.train import checkpoints, run
from eagle.train.batches import Batch, Order
from eagle.train.draftable import Draftable
from eagle.train.loss import draft_losses
from eagle.train.objective import Objective
from eagle.train.schedule import learning_rate
from eagle.train.unroll import unroll


@dataclasses.dataclass(kw_only=True)
class Training:
    """Everything a step reads or changes."""

    recipe: Recipe
    accelerator: Accelerator
    source: Documents
    objective: Objective
    tokens: DraftTokens
    draftable: Draftable
    order: Order
    total: int
    """Optimiser steps of the whole run"""
    model: torch.nn.Module
    """The head in a HeadCall, as accelerate prepared it"""
    optimizer: torch.optim.Optimizer
    progress: checkpoints.Progress
    say: Callable[[str], None]
    """Prints a line, in one of the processes"""

    def autocast(self) -> torch.autocast:
        """bfloat16 for matrix products where train.precision says so; the weights stay float32."""
        return run.autocast(self.recipe.train, self.accelerator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimiser step did; sums and counts are over all processes, and over the unroll's steps by their weights."""

    loss_sum: float
    """The three below, weighted"""
    regression_sum: float
    classification_sum: float
    distillation_sum: float
    supervised: int
    """Supervised tokens of the first unroll step: what the sums are divided by"""
    tokens: int
    """Indices run through the head, padding left out"""
    grad_norm: float
    """Global norm before clipping"""
    lr: float
    kernels: dict[str, dict[str, int]]
    """Kernel -> what ran it in this process ("reference" or "triton") -> calls"""


def train_step(training: Training, batches: Sequence[Batch]) -> StepResult:
    """Runs this process's micro-batches of the next optimiser step and updates the weights.

    Raises EagleError, in every process, when the loss or the gradient is not finite; the weights are then not updated
    (DeepSpeed has by then updated those in memory) and nothing on disk is touched.
    """
    accelerator, config, step = training.accelerator, training.recipe.train, training.progress.step
    before = snapshot()
    objective = training.objective
    lr = learning_rate(step, total=training.total, config=config)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    counts = torch.tensor([[batch.supervised_count, batch.token_count] for batch in batches], device=accelerator.device)
    supervised, tokens = accelerator.reduce(counts.sum(dim=0), reduction="sum").tolist()
    # backward divides by the micro-steps and the processes' gradients are averaged: undo both.
    scale = len(batches) * accelerator.num_processes / max(1, supervised)
    sums_3K = torch.zeros(3, objective.steps, dtype=torch.float64, device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(training.model):
            loss, batch_sums_3K = _losses(training, batch.to(accelerator.device))
            sums_3K += batch_sums_3K
            accelerator.backward(loss * scale)
    weights_K = torch.tensor(objective.step_weights, dtype=torch.float64, device=accelerator.device)
    sums = (accelerator.reduce(sums_3K, reduction="sum") * weights_K).sum(dim=1).tolist()
    grad_norm = _clip(training)
    if not math.isfinite(sum(sums) + grad_norm):
        raise EagleError(_not_finite(training, sums[0], sums[1], grad_norm))
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.progress.step += 1
    return StepResult(
        loss_sum=objective.total(*sums),
        regression_sum=sums[0],
        classification_sum=sums[1],
        distillation_sum=sums[2],
        supervised=supervised,
        tokens=tokens,
        grad_norm=grad_norm,
        lr=lr,
        kernels=by_kernel(since(before)),
    )


def _losses(training: Training, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted loss of one micro-batch and the plain sums, float64 [3, K]: regression, classification, distillation.

    An empty one still goes through the model, which other processes wait for.
    """
    work = functools.partial(
        batch_losses,
        batch=batch,
        objective=training.objective,
        tokens=training.tokens,
        draftable=training.draftable,
    )
    kernels = training.recipe.train.kernels
    with training.autocast(), nullcontext() if kernels == "auto" else using(kernels):
        loss, sums_3K = training.model(work)
    return loss, sums_3K


def batch_losses(
    head: DraftHead, *, batch: Batch, objective: Objective, tokens: DraftTokens, draftable: Draftable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unrolls the head over a batch and judges every step: (loss, sums_3K) as `_losses` returns them."""
    predictions = unroll(
        head,
        batch.states_BTX,
        tokens.full.embed(batch.ids_BT),
        steps=objective.steps,
        positions_BT=batch.positions_BT,
        document_BT=batch.document_BT,
        between=objective.between,
        checkpointing=objective.checkpointing,
    )
    losses = draft_losses(
        head=head, predictions=predictions, batch=batch, tokens=tokens, objective=objective, draftable=draftable
    )
    return losses.total, torch.stack([losses.regression_K, losses.classification_K, losses.distillation_K])


def _clip(training: Training) -> float:
    """Clips the gradients as the recipe says; returns their global norm from before."""
    accelerator, config = training.accelerator, training.recipe.train
    parameters = list(training.model.parameters())
    if config.clip == "norm" or accelerator.distributed_type == DistributedType.DEEPSPEED:
        # DeepSpeed has clipped already, in the last backward (its config's gradient_clipping): this only asks.
        return float(accelerator.clip_grad_norm_(parameters, config.clip_threshold) or 0.0)
    norm = float(get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None]))
    if config.clip == "value":
        accelerator.clip_grad_value_(parameters, config.clip_threshold)
    return norm


def _not_finite(training: Training, regression_sum: float, classification_sum: float, grad_norm: float) -> str:
    step, recipe = training.progress.step, training.recipe
    documents = training.source.read(training.order.step_documents(step))
    broken = [
        document.id
        for document in documents
        if not bool(document.features_TH.isfinite().all() and document.states.isfinite().all())
    ]
    saved = checkpoints.newest(recipe.train_dir)
    if broken:
        names = ", ".join(broken)
        cause = f"the features of {names} in {training.source.name} are not finite: {training.source.remedy}"
    elif recipe.train.precision == "bf16":
        cause = "lower train.lr, raise train.warmup_steps, or try train.precision fp32"
    else:
        cause = "lower train.lr or raise train.warmup_steps"
    return (
        f"training stopped at step {step + 1}: regression {regression_sum}, classification {classification_sum}, "
        f"gradient norm {grad_norm}, expected finite numbers. Documents of the batch: "
        f"{', '.join(document.id for document in documents)}. "
        f"{cause}. Nothing was overwritten; {f'{saved} is intact' if saved else 'no checkpoint had been saved yet'}"
    )
