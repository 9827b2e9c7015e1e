"""Checkpoints of a run: train/checkpoint-00000500/, whole or not there at all, from which it resumes bit for bit.

    head/            the head, as `save_pretrained` writes it: usable as it is
    optimizer.bin, random_states_*.pkl   through accelerate (DeepSpeed writes its own folder instead)
    state.json       step, the run's identity, the metrics of the unfinished log window, the last validation

The learning rate, the documents' order and the noise are functions of the step: they need no state.
"""

import dataclasses
import errno
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle.errors import EagleError
from eagle.files import write_json
from eagle.heads import EagleHead

PREFIX = "checkpoint-"


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Where a run stands, next to its weights and optimiser state."""

    step: int = 0
    """Optimiser steps done."""
    identity: dict[str, Any]
    """What may not change on resume (eagle/train/run.py)."""
    window: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums since the last log line."""
    validation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the last validation, with its step."""


def remove_leftovers(directory: Path) -> None:
    """Removes what a kill left half written."""
    for path in directory.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(path)


def newest(directory: Path) -> Path | None:
    """The last complete checkpoint of a train folder."""
    found = [path for path in directory.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(found, key=_step_of, default=None)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def read_progress(checkpoint: Path) -> Progress:
    """The state file of a checkpoint. Raises EagleError when it is damaged."""
    try:
        return Progress(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise EagleError(
            f"checkpoint {checkpoint} is damaged ({error}); delete that folder to resume from the one before it"
        ) from error


def save(directory: Path, progress: Progress, accelerator: Accelerator, model: torch.nn.Module, *, keep: int) -> Path:
    """Writes a checkpoint in a temporary folder, renames it when every process has written, and removes older ones."""
    final = directory / f"{PREFIX}{progress.step:08d}"
    temporary = directory / f".{final.name}.tmp"
    main = accelerator.is_main_process
    with disk_full_is_an_error("the last whole checkpoint is untouched: make room and run the same command again"):
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        accelerator.wait_for_everyone()
        with _weights_apart(accelerator):
            accelerator.save_state(str(temporary))
        accelerator.wait_for_everyone()
        if main:
            unwrapped(accelerator, model).save_pretrained(temporary / "head")
            write_json(temporary / "state.json", dataclasses.asdict(progress))
            _sync_files(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in sorted((path for path in directory.glob(f"{PREFIX}*")), key=_step_of)[:-keep]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


@contextmanager
def disk_full_is_an_error(state: str) -> Iterator[None]:
    """Turns "no space left" and "over quota" into an EagleError that ends with `state`: what is saved, what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EagleError(f"the disk is full ({error}); {state}") from error


def load(checkpoint: Path, accelerator: Accelerator) -> None:
    """Puts the weights, the optimiser's state and the random states of a checkpoint back, in place.

    Raises EagleError when a file of it is missing or damaged.
    """
    try:
        with _weights_apart(accelerator):
            accelerator.load_state(str(checkpoint))
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise EagleError(
            f"checkpoint {checkpoint} cannot be loaded ({str(error).strip().splitlines()[0] or type(error).__name__}); "
            "delete that folder to resume from the one before it"
        ) from error
    accelerator.step = 0  # micro-steps, counted from the start of an optimiser step


def unwrapped(accelerator: Accelerator, model: torch.nn.Module) -> EagleHead:
    """The head inside what accelerate made of it."""
    head = accelerator.unwrap_model(model)
    assert isinstance(head, EagleHead)
    return head


@contextmanager
def _weights_apart(accelerator: Accelerator) -> Iterator[None]:
    """Keeps accelerate from storing the weights a second time: they are in head/. DeepSpeed stores its own."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        yield
        return

    def drop(models: list[torch.nn.Module], weights: list[dict[str, torch.Tensor]], directory: str) -> None:
        weights.clear()

    def restore(models: list[torch.nn.Module], directory: str) -> None:
        head = unwrapped(accelerator, models.pop())
        head.load_state_dict(load_file(Path(directory) / "head" / "model.safetensors"))

    handles = [accelerator.register_save_state_pre_hook(drop), accelerator.register_load_state_pre_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sync_files(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
