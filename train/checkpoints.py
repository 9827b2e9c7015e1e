"""Checkpoints of a run: train/checkpoint-00000500/, whole or not there at all, from which it resumes bit for bit.

    head/                    the head, as `save_pretrained` writes it: usable as it is
    optimizer.safetensors    AdamW's moments and counts of steps, by parameter name (eagle/train/full_state.py)
    state.json               step, the run's identity, the unfinished log window, the last validation, the best decoding

Nothing in it depends on the number of processes or on the strategy (DDP, FSDP, ZeRO) that wrote it: any can go on from it.
The learning rate, the documents' order and the noise are functions of the step: they need no state.
"""

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from eagle.data.layers import readable_size
from eagle.errors import EagleError
from eagle.files import clear_leftovers, write_json
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead
from eagle.train.full_state import bare, full_optimizer_state, full_weights, restore_optimizer_state

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
    best: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The decoding with the highest tau so far (eagle/train/selection.py)."""
    without_gain: int = 0
    """Decodings since then."""


def remove_leftovers(directory: Path) -> None:
    """Removes what a kill left half written in a train folder."""
    for path in directory.glob(f".{PREFIX}*.tmp"):
        shutil.rmtree(path)
    clear_leftovers(directory, "*")


def newest(directory: Path) -> Path | None:
    """The last complete checkpoint of a train folder."""
    return next(reversed(_complete(directory)), None)


def _complete(directory: Path) -> list[Path]:
    """Its checkpoints, oldest first; other names that start alike (a copy that a user made) are none of ours."""
    found = [path for path in directory.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def read_progress(checkpoint: Path) -> Progress:
    """The state file of a checkpoint. Raises EagleError when it is damaged."""
    try:
        return Progress(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise EagleError(
            f"checkpoint {checkpoint} is damaged ({error}); delete that folder to resume from the one before it"
        ) from error


def save(
    directory: Path,
    progress: Progress,
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    keep: int,
) -> Path:
    """Writes a checkpoint in a temporary folder, renames it when all of it is on disk, and removes older ones.

    A collective: every process takes part in gathering, the main one writes.
    """
    final = directory / f"{PREFIX}{progress.step:08d}"
    weights = full_weights(accelerator, model)
    moments = full_optimizer_state(accelerator, model, optimizer)
    if accelerator.is_main_process:
        temporary = directory / f".{final.name}.tmp"
        with disk_full_is_an_error("the last whole checkpoint is untouched: make room and run the same command again"):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            bare(accelerator, model).save_pretrained(temporary / "head", state_dict=weights)
            save_file(moments, temporary / "optimizer.safetensors")
            write_json(temporary / "state.json", dataclasses.asdict(progress))
            _sync_files(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in _complete(directory)[:-keep]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


@contextmanager
def disk_full_is_an_error(state: str) -> Iterator[None]:
    """Turns "no space left" and "over quota" into an EagleError that ends with `state`: what is saved, what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors' own writer reports the system's error as text alone.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            f"(os error {code})" in str(error) for code in (errno.ENOSPC, errno.EDQUOT)
        )
        if not full:
            raise
        raise EagleError(f"the disk is full ({error}); {state}") from error


def load_weights(checkpoint: Path) -> DraftHead:
    """The head of a checkpoint, in float32. Raises EagleError when a file of it is missing or damaged."""
    with _damage_is_an_error(checkpoint):
        return load_head(checkpoint / "head")


def load_optimizer(
    checkpoint: Path, accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Puts a checkpoint's optimiser state back, in place. Raises EagleError when the file is missing or damaged."""
    with _damage_is_an_error(checkpoint):
        state = load_file(checkpoint / "optimizer.safetensors")
        restore_optimizer_state(accelerator, model, optimizer, state)
    accelerator.step = 0  # micro-steps, counted from the start of an optimiser step


@contextmanager
def _damage_is_an_error(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EagleError(
            f"checkpoint {checkpoint} cannot be loaded ({reason}); delete that folder to resume from the one before it"
        ) from error


def _sync_files(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())


def checkpoint_bytes(parameters: int) -> int:
    """A checkpoint of P parameters: float32 weights and AdamW's two moments."""
    return 12 * parameters


def require_disk(directory: Path, head: nn.Module, *, keep: int) -> str:
    """What the run in `directory` will write, in words. Raises EagleError when it cannot fit.

    keep: checkpoints kept; one more lives while it is written, besides the final and the best head. Those that are there
    already take no new room.
    """
    parameters = sum(parameter.numel() for parameter in head.parameters())
    each = checkpoint_bytes(parameters)
    directory.mkdir(parents=True, exist_ok=True)
    existing = len(list(directory.glob(f"{PREFIX}*")))
    needed = each * max(1, keep + 1 - existing) + 2 * 4 * parameters
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise EagleError(
            f"the run needs {readable_size(needed)} for {keep} checkpoints of {readable_size(each)} (and one more while it is "
            f"written), the disk of {directory} has {readable_size(free)} free; free some space, lower "
            "train.keep_checkpoints, or set output_dir to another disk"
        )
    return (
        f"{parameters:,} parameters to train, {readable_size(each)} a checkpoint, {readable_size(needed)} in all; "
        f"{readable_size(free)} free in {directory}"
    )
