"""Several processes, through accelerate: forming their world, with or without GPUs, and checking that it is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

from eagle.errors import EagleError

SHARDING = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")
"""What `accelerate launch` sets for strategies that spread a model or its optimiser over the processes."""


def make_accelerator(**settings: Any) -> Accelerator:
    """The accelerator of this process, as `accelerate launch`, torchrun or a plain start has set it up.

    settings: Accelerator's keywords. On a machine without GPUs accelerate by itself starts DeepSpeed and FSDP in each
    process as if it were alone: there the processes are joined here first, over gloo.
    """
    asked = [name for name in SHARDING if os.environ.get(name, "false").lower() == "true"]
    if asked and "LOCAL_RANK" in os.environ and not torch.cuda.is_available():
        os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate would quietly run plain data parallelism
        state = PartialState(cpu=True)
        if "ACCELERATE_USE_FSDP" in asked:
            # accelerate turns a world of GPUs into FSDP's, one of CPUs it leaves; nothing else reads this in between.
            state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(**settings)


def check_world(accelerator: Accelerator) -> None:
    """Raises EagleError when accelerate runs each of several launched processes as if it were alone.

    It does so on machines without GPUs unless ACCELERATE_USE_CPU says that CPUs are meant.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise EagleError(
            f"{launched} processes were launched, but accelerate runs {accelerator.num_processes}, as if alone, because this "
            "machine has no GPU; set the environment variable ACCELERATE_USE_CPU=true to work on CPUs"
        )


@contextmanager
def whole_models(accelerator: Accelerator) -> Iterator[None]:
    """Within the block, transformers loads models whole on every process, also under ZeRO-3 (which would spread them)."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        yield
        return
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()
