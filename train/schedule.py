"""The learning rate as a pure function of the step, so that a checkpoint needs no scheduler state but the step."""

import math

from eagle.config import TrainConfig


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimiser steps of the whole run: the epochs, or `max_steps` where that comes first."""
    steps = config.epochs * steps_per_epoch
    return steps if config.max_steps is None else min(steps, config.max_steps)


def learning_rate(step: int, *, total: int, config: TrainConfig) -> float:
    """The rate of optimiser step `step` (from 0) of `total`: linear warm-up to `lr`, then the schedule.

    The first step already has lr / warmup_steps; linear and cosine would reach 0 at step `total`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    return config.lr * 0.5 * (1 + math.cos(math.pi * done))
