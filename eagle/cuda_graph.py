"""CUDA graphs: work of fixed shapes, recorded once and replayed as one launch.

A step of a small batch is a few hundred kernels of microseconds each: launching them one by one takes longer than they
run. A `Recorder` makes what a graph needs: input buffers that stay where they are (`Inputs`), and work over them
(`Captured`). capture "none" runs the same work without recording it, on any device: what the tests do.

Tested without a GPU: everything but the recording and the pinned transfer themselves, which a test marked `gpu` covers.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, ParamSpec

import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Path, keeping, on, replayed, since, snapshot

Capture = Literal["cuda", "none"]
"""cuda: record and replay. none: run the work again every time."""

WARM_UPS = 2
"""Runs before recording: libraries allocate their workspaces and pick their kernels in the first."""

ALIGNED = 2
"""Every input begins at a multiple of this many int64: 16 bytes, as Triton assumes of the pointers it compiled for."""

P = ParamSpec("P")


class Recorder:
    """Makes inputs and captured work for one device. Raises EagleError for capture "cuda" on another kind of device."""

    def __init__(self, device: torch.device, capture: Capture = "cuda"):
        if capture == "cuda" and device.type != "cuda":
            raise EagleError(
                f'engine "cudagraph" got a model on {device}, expected a CUDA device; put it on one (target.device cuda), or '
                'use engine "compiled" (float32 on a CPU) or "eager"'
            )
        self.device, self.capture = device, capture
        # One pool for all graphs: they are replayed one after the other, and their results are copied out (Captured).
        self._memory: Any = None if capture == "none" else torch.cuda.graph_pool_handle()

    def inputs(self, **shapes: tuple[int, ...]) -> "Inputs":
        return Inputs(shapes, self.device, pinned=self.capture == "cuda")

    def captured(self, work: Callable[P, tuple[torch.Tensor, ...]]) -> "Captured[P]":
        return Captured(work, device=self.device, capture=self.capture, memory=self._memory)


class Inputs:
    """int64 tensors of fixed shapes that are filled on the host (`host`) and read on the device (`device`).

    They are views of one buffer on each side, so that a step costs one transfer.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, pinned: bool):
        sizes = [-(-int(torch.Size(shape).numel()) // ALIGNED) * ALIGNED for shape in shapes.values()]
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._sent = torch.cuda.Event() if pinned else None

        def views(flat: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), flat.split(sizes))
            return {name: part[: torch.Size(shape).numel()].view(shape) for (name, shape), part in parts}

        self.host, self.device = views(self._host), views(self._device)

    def wait(self) -> None:
        """Returns when `host` may be written again."""
        if self._sent is not None:
            with on(self._device.device):
                self._sent.synchronize()

    def send(self) -> None:
        """Copies `host` to `device`, in the order of the current stream."""
        with on(self._device.device):
            self._device.copy_(self._host, non_blocking=True)
            if self._sent is not None:
                self._sent.record()


class Captured(Generic[P]):
    """Work of fixed shapes: runs it, or records it at the first call and replays it ever after.

    work: reads and writes tensors that stay where they are and asks the host for nothing. It is run WARM_UPS times before
    it is recorded, on whatever its inputs hold then: that must do no harm. Replaying ignores the arguments.
    """

    def __init__(
        self, work: Callable[P, tuple[torch.Tensor, ...]], *, device: torch.device, capture: Capture, memory: Any
    ):
        self._work, self._device, self._capture, self._memory = work, device, capture, memory
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._kept: list[torch.Tensor] = []  # what the graph's kernels read and nobody else holds
        self._calls: Counter[tuple[str, Path]] = Counter()  # of kernels, in a replay

    def record(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Records the work, if that is what is wanted and has not been done. Raises EagleError when it cannot be, or the
        device's memory does not suffice."""
        if self._capture == "none" or self._graph is not None:
            return
        try:
            with on(self._device), keeping() as self._kept:
                current, side = torch.cuda.current_stream(), torch.cuda.Stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    for _ in range(WARM_UPS):
                        self._work(*args, **kwargs)
                current.wait_stream(side)
                graph = self._recorded(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise EagleError(
                f'engine "cudagraph": {self._device} has too little memory for a forward of this shape '
                f'({str(error).splitlines()[0]}); decode fewer rows at a time or shorter texts, or use engine "eager"'
            ) from error
        self._graph = graph

    def _recorded(self, *args: P.args, **kwargs: P.kwargs) -> torch.cuda.CUDAGraph:
        graph, before = torch.cuda.CUDAGraph(), snapshot()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                self._outputs = self._work(*args, **kwargs)
        except RuntimeError as error:
            cause = error if isinstance(error, torch.OutOfMemoryError) else error.__context__
            if isinstance(cause, torch.OutOfMemoryError):  # ending a capture that ran out of memory fails, too
                raise cause from None
            raise EagleError(
                f'engine "cudagraph": this forward cannot be captured ({str(error).splitlines()[0]}); use engine "eager"'
            ) from error
        self._calls = since(before)
        return graph

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> tuple[torch.Tensor, ...]:
        """The work's results. Copy them before anything else of the same recorder is called: graphs share their memory."""
        if self._capture == "none":
            return self._work(*args, **kwargs)
        self.record(*args, **kwargs)
        assert self._graph is not None
        self._graph.replay()
        replayed(self._calls)
        return self._outputs
