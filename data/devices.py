"""Which GPU is this process's: `target.device` and the launcher must agree, for accelerate puts the head there as well."""

import dataclasses
import os
import re

import torch
from accelerate import Accelerator

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.target.loading import resolve_device


def choose_gpu(config: TargetConfig) -> None:
    """Makes the GPU of a `target.device` such as cuda:1 the one that an Accelerator made after this takes.

    Raises EagleError: this machine has no such GPU, or a launcher gives each process its own.
    """
    if not _names_one(config):
        return
    if os.environ.get("LOCAL_RANK", "-1") != "-1":
        raise _has_its_own(config)
    torch.cuda.set_device(resolve_device(config.device))


def own_device(config: TargetConfig, state: Accelerator) -> TargetConfig:
    """With several processes each has its own GPU. Raises EagleError when `target.device` names one for them all."""
    if state.num_processes == 1:
        return config
    if _names_one(config):
        raise _has_its_own(config)
    return dataclasses.replace(config, device=str(state.device)) if config.device in ("auto", "cuda") else config


def _names_one(config: TargetConfig) -> bool:
    return re.fullmatch(r"cuda:\d+", config.device) is not None


def _has_its_own(config: TargetConfig) -> EagleError:
    return EagleError(
        f"target.device is {config.device}, one GPU, but this process was launched to have a GPU of its own; set target.device "
        "to auto (the environment variable CUDA_VISIBLE_DEVICES says which GPUs a launch may use)"
    )
