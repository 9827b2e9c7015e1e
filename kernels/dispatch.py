"""Which implementation of a kernel runs: chosen in one place, by name, and counted.

auto: Triton where the tensors lie on a CUDA device and the Triton version takes these inputs, else the reference.
reference: plain PyTorch, anywhere. triton: Triton or an EagleError that says why not. On CPU tensors Triton runs only in
its interpreter (TRITON_INTERPRET=1, set before triton is first imported): slow, made for tests, and never chosen by auto.

A kernel's op.py calls `choose` with the reasons why its Triton version would refuse, and imports its triton.py only after
the answer "triton": machines without triton never see it.
"""

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Literal, get_args

import torch

from eagle.errors import EagleError

Backend = Literal["auto", "reference", "triton"]
"""What a caller asks for."""
Path = Literal["reference", "triton"]
"""What runs."""

_wanted: ContextVar[Backend] = ContextVar("eagle_kernel_backend", default="auto")
_calls: Counter[tuple[str, Path]] = Counter()
_reasons: Counter[tuple[str, str]] = Counter()


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Within the block, ops that are not told a backend take this one. Raises EagleError on an unknown name."""
    token = _wanted.set(checked(backend))
    try:
        yield
    finally:
        _wanted.reset(token)


def checked(backend: str) -> Backend:
    """`backend` itself. Raises EagleError on an unknown name."""
    if backend not in get_args(Backend):
        raise EagleError(f"unknown kernel backend {backend!r}; expected one of {', '.join(get_args(Backend))}")
    return backend  # type: ignore[return-value]


def choose(kernel: str, device: torch.device, *, backend: Backend | None = None, refusal: str | None = None) -> Path:
    """Decides, counts and returns what runs a call of `kernel` on tensors of `device`.

    backend: None takes the enclosing `using` block's (auto outside of any). refusal: why the Triton version cannot take
    these inputs, None when it can. Raises EagleError when "triton" was asked for and cannot run.
    """
    wanted = _wanted.get() if backend is None else checked(backend)
    if wanted == "reference":
        path: Path = "reference"
    elif wanted == "triton":
        reason = refusal or missing(device)
        if reason is not None:
            raise EagleError(
                f"kernel {kernel}: backend 'triton' was asked for and cannot run: {reason}; take backend 'auto' or 'reference'"
            )
        path = "triton"
    else:
        reason = refusal or ("the tensors are not on a CUDA device" if device.type != "cuda" else missing(device))
        if reason is not None:
            _reasons[kernel, reason] += 1
        path = "triton" if reason is None else "reference"
    _calls[kernel, path] += 1
    return path


def missing(device: torch.device) -> str | None:
    """Why Triton cannot run on tensors of this device at all; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda":
        return None if _capability(device.index) >= 8 else "the device is older than compute capability 8.0"
    if device.type == "cpu":
        return None if interpreting() else "the tensors are on the CPU and TRITON_INTERPRET=1 is not set"
    return f"the tensors are on {device.type}, and the kernels are built for CUDA devices"


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter instead of being compiled."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _capability(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


@contextmanager
def record() -> Iterator[Counter[tuple[str, Path]]]:
    """Within the block, fills the yielded counter: (kernel, path) -> calls; complete when the block ends.

    A replayed CUDA graph calls no op: what was counted is its capture.
    """
    counted: Counter[tuple[str, Path]] = Counter()
    before = snapshot()
    try:
        yield counted
    finally:
        counted.update(since(before))


def snapshot() -> Counter[tuple[str, Path]]:
    """Calls so far in this process, to be handed to `since`."""
    return Counter(_calls)


def since(before: Counter[tuple[str, Path]]) -> Counter[tuple[str, Path]]:
    """(kernel, path) -> calls since `before` was taken."""
    return _calls - before


def reasons() -> dict[tuple[str, str], int]:
    """(kernel, reason) -> how often auto fell back to the reference for that reason in this process."""
    return dict(_reasons)
