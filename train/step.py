"""One optimiser step.

Its micro-batches are read, the GLOBAL number of their supervised tokens (all processes, all micro-steps) is agreed on,
and every micro-step's summed loss is divided by it. So the same global batch gives the same step however it is cut into
processes and micro-steps.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.utils import get_total_norm

from eagle.config import Recipe
from eagle.data.documents import Documents
from eagle.errors import EagleError
from eagle.train import checkpoints
from eagle.train.batches import Batch, Order
from eagle.train.loss import draft_losses
from eagle.train.schedule import learning_rate
from eagle.vocab import DraftTokens


@dataclasses.dataclass(kw_only=True)
class Training:
    """Everything a step reads or changes."""

    recipe: Recipe
    accelerator: Accelerator
    source: Documents
    tokens: DraftTokens
    order: Order
    total: int
    """Optimiser steps of the whole run"""
    model: torch.nn.Module
    """The head, as accelerate prepared it"""
    optimizer: torch.optim.Optimizer
    progress: checkpoints.Progress

    def autocast(self) -> torch.autocast:
        """bfloat16 for matrix products where train.precision says so; the weights stay float32."""
        on = self.recipe.train.precision == "bf16"
        return torch.autocast(self.accelerator.device.type, dtype=torch.bfloat16, enabled=on)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimiser step did; sums and counts are over all processes."""

    regression_sum: float
    classification_sum: float
    supervised: int
    """Supervised tokens: what the sums are over"""
    tokens: int
    """Indices run through the head, padding left out"""
    grad_norm: float
    """Global norm before clipping"""
    lr: float


def train_step(training: Training, batches: Sequence[Batch]) -> StepResult:
    """Runs this process's micro-batches of the next optimiser step and updates the weights.

    Raises EagleError, in every process, when the loss or the gradient is not finite; the weights are then not updated
    (DeepSpeed has by then updated those in memory) and nothing on disk is touched.
    """
    accelerator, config, step = training.accelerator, training.recipe.train, training.progress.step
    lr = learning_rate(step, total=training.total, config=config)
    for group in training.optimizer.param_groups:
        group["lr"] = lr
    counts = torch.tensor([[batch.supervised_count, batch.token_count] for batch in batches], device=accelerator.device)
    supervised, tokens = accelerator.reduce(counts.sum(dim=0), reduction="sum").tolist()
    # backward divides by the micro-steps and the processes' gradients are averaged: undo both.
    scale = len(batches) * accelerator.num_processes / max(1, supervised)
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(training.model):
            regression, classification = _losses(training, batch.to(accelerator.device))
            sums += torch.stack([regression.detach(), classification.detach()])
            loss = config.regression_weight * regression + config.classification_weight * classification
            accelerator.backward(loss * scale)
    regression_sum, classification_sum = accelerator.reduce(sums, reduction="sum").tolist()
    grad_norm = _clip(training)
    if not math.isfinite(regression_sum + classification_sum + grad_norm):
        raise EagleError(_not_finite(training, regression_sum, classification_sum, grad_norm))
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.progress.step += 1
    return StepResult(
        regression_sum=regression_sum,
        classification_sum=classification_sum,
        supervised=supervised,
        tokens=tokens,
        grad_norm=grad_norm,
        lr=lr,
    )


def _losses(training: Training, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed losses of one micro-batch; an empty one still goes through the model, which other processes wait for."""
    with training.autocast():
        predictions_BTH = training.model(batch.states_BTX, training.tokens.full.embed(batch.next_ids()))
        mask_BT = batch.mask()
        return draft_losses(
            predictions_SH=predictions_BTH[mask_BT], targets_SH=batch.targets(mask_BT), tokens=training.tokens
        )


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
