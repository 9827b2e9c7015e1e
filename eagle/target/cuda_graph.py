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


class Ground:
    """What all graphs of one device share, for the life of the process.

    A library that a recording calls (cuBLAS) keeps its workspace by stream, and takes it from the memory of whoever recorded
    first: with a stream or memory of their own, graphs that live on would read a workspace that went away with that one. So
    there is one stream to record on, one to warm up on, and one pool, held by a graph that is never dropped. Graphs are
    replayed one after the other, and their results are copied out (Captured).
    """

    def __init__(self, device: torch.device):
        self.memory: Any = torch.cuda.graph_pool_handle()
        # Of this device: PyTorch's own default for recordings belongs to the device that was the current one first.
        self.recording, self.warming = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.holding = torch.cuda.CUDAGraph()
        something = torch.zeros(1, device=device)
        with torch.cuda.graph(self.holding, pool=self.memory, stream=self.recording):
            something.add_(1)


_grounds: dict[torch.device, Ground] = {}
_spoilt: list[Ground] = []
"""In which a recording failed: graphs recorded before live on in them, nothing is recorded there any more."""


def ground(device: torch.device) -> Ground:
    """The device's."""
    if device not in _grounds:
        with on(device):
            _grounds[device] = Ground(device)
    return _grounds[device]


class Recorder:
    """Makes inputs and captured work for one device. Raises EagleError for capture "cuda" on another kind of device."""

    def __init__(self, device: torch.device, capture: Capture = "cuda"):
        if capture == "cuda" and device.type != "cuda":
            raise EagleError(
                f'engine "cudagraph" got a model on {device}, expected a CUDA device; put it on one (target.device cuda), or '
                'use engine "compiled" (float32 on a CPU) or "eager"'
            )
        self.device, self.capture = device, capture

    def inputs(self, **shapes: tuple[int, ...]) -> "Inputs":
        return Inputs(shapes, self.device, pinned=self.capture == "cuda")

    def captured(self, work: Callable[P, tuple[torch.Tensor, ...]]) -> "Captured[P]":
        return Captured(work, device=self.device, capture=self.capture)


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

    def __init__(self, work: Callable[P, tuple[torch.Tensor, ...]], *, device: torch.device, capture: Capture):
        self._work, self._device, self._capture = work, device, capture
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
                current, place = torch.cuda.current_stream(), ground(self._device)
                place.warming.wait_stream(current)
                with torch.cuda.stream(place.warming):
                    for _ in range(WARM_UPS):
                        self._work(*args, **kwargs)
                current.wait_stream(place.warming)
                graph = self._recorded(place, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise EagleError(
                f'engine "cudagraph": {self._device} has too little memory for a forward of this shape '
                f'({str(error).splitlines()[0]}); decode fewer rows at a time or shorter texts, or use engine "eager"'
            ) from error
        self._graph = graph

    def _recorded(self, place: Ground, *args: P.args, **kwargs: P.kwargs) -> torch.cuda.CUDAGraph:
        graph, before, current = torch.cuda.CUDAGraph(), snapshot(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=place.memory, stream=place.recording):
                self._outputs = self._work(*args, **kwargs)
        except RuntimeError as error:
            # PyTorch leaves the stream of a failed recording the current one, and its pool as if it still were recorded to.
            torch.cuda.set_stream(current)
            _spoilt.append(_grounds.pop(self._device, place))
            cause = error if isinstance(error, torch.OutOfMemoryError) else error.__context__
            if isinstance(cause, torch.OutOfMemoryError):  # ending a capture that ran out of memory fails, too
                raise cause from None
            raise EagleError(
                f'engine "cudagraph": this forward cannot be captured ({str(error).splitlines()[0]}); use engine "eager"'
            ) from error
        self._calls = since(before)
        return graph

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> tuple[torch.Tensor, ...]:
        """The work's results. Copy them before any other recording of the device is called: graphs share their memory."""
        if self._capture == "none":
            return self._work(*args, **kwargs)
        self.record(*args, **kwargs)
        assert self._graph is not None
        self._graph.replay()
        replayed(self._calls)
        return self._outputs
