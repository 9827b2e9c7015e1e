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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, get_args

import torch

from eagle.errors import EagleError

Backend = Literal["auto", "reference", "triton"]
"""What a caller asks for."""
Path = Literal["reference", "triton"]
"""What runs."""

_wanted: ContextVar[Backend] = ContextVar("eagle_kernel_backend", default="auto")
_calls: Counter[tuple[str, Path]] = Counter()
_kept: ContextVar[list[torch.Tensor] | None] = ContextVar("eagle_kernel_tensors", default=None)


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    """Within the block, ops that are not told a backend take this one. Raises EagleError on an unknown name."""
    token = _wanted.set(checked(backend))
    try:
        yield
    finally:
        _wanted.reset(token)


def wanted() -> Backend:
    """What the enclosing `using` block asks for; recordings of launches hold for it alone."""
    return _wanted.get()


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
    path = chosen(kernel, device, backend=backend, refusal=refusal)
    count(kernel, path)
    return path


def count(kernel: str, path: Path) -> None:
    """Counts a call that `path` runs."""
    _calls[kernel, path] += 1


def chosen(kernel: str, device: torch.device, *, backend: Backend | None = None, refusal: str | None = None) -> Path:
    """As `choose`, without counting: for callers whose own work depends on what a kernel's op is going to choose."""
    wanted = _wanted.get() if backend is None else checked(backend)
    if wanted == "reference":
        return "reference"
    if wanted == "triton":
        reason = refusal or missing(device)
        if reason is not None:
            raise EagleError(
                f"kernel {kernel}: backend 'triton' was asked for and cannot run: {reason}; take backend 'auto' or 'reference'"
            )
        return "triton"
    reason = refusal or ("the tensors are not on a CUDA device" if device.type != "cuda" else missing(device))
    return "triton" if reason is None else "reference"


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


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block, the tensors' device is the current one: Triton launches on the current device's stream, whatever the
    tensors' device is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def keeping() -> Iterator[list[torch.Tensor]]:
    """Within the block, tensors that launches read and no caller holds are put into the yielded list: who records the
    launches holds it as long as the recording."""
    kept: list[torch.Tensor] = []
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def keep(tensor: torch.Tensor) -> None:
    """Puts the tensor into the enclosing `keeping` block's list, if there is one."""
    kept = _kept.get()
    if kept is not None and not any(tensor is one for one in kept):
        kept.append(tensor)


@cache
def _capability(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


@contextmanager
def record() -> Iterator[Counter[tuple[str, Path]]]:
    """Within the block, fills the yielded counter: (kernel, path) -> calls; complete when the block ends.

    A replayed CUDA graph calls no op; who replays it says what it holds (`replayed`).
    """
    counted: Counter[tuple[str, Path]] = Counter()
    before = snapshot()
    try:
        yield counted
    finally:
        counted.update(since(before))


def replayed(calls: Counter[tuple[str, Path]]) -> None:
    """Counts what a recording of these calls has run again."""
    _calls.update(calls)


def snapshot() -> Counter[tuple[str, Path]]:
    """Calls so far in this process, to be handed to `since`."""
    return Counter(_calls)


def since(before: Counter[tuple[str, Path]]) -> Counter[tuple[str, Path]]:
    """(kernel, path) -> calls since `before` was taken."""
    return _calls - before


def by_kernel(calls: Counter[tuple[str, Path]]) -> dict[str, dict[str, int]]:
    """Kernel -> path -> calls: for reports."""
    told: dict[str, dict[str, int]] = {}
    for (kernel, path), count in sorted(calls.items()):
        told.setdefault(kernel, {})[path] = count
    return told
