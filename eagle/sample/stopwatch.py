"""Stopwatch: where a generation's time goes, without slowing it down."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from eagle.kernels.dispatch import on
from eagle.sample.row import Row


class Stopwatch:
    """Adds the wall time of blocks of work to a field (in milliseconds) of every row's stats: they all waited.

    On a CUDA device the time is the device's: events in its stream mark where a block's work begins and ends, and nobody waits
    for them; `settle` adds what has passed.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._running: deque[tuple[list[Row], str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def clock(self, rows: Sequence[Row], field: str) -> Iterator[None]:
        rows = list(rows)
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            _add(rows, field, 1e3 * (time.perf_counter() - start))
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with on(self._device):
            begin.record()
            yield
            end.record()
        self._running.append((rows, field, begin, end))

    def settle(self, *, wait: bool = False) -> None:
        """Adds the blocks that the device is through with. wait: for all of them."""
        while self._running and (wait or self._running[0][3].query()):
            rows, field, begin, end = self._running.popleft()
            end.synchronize()
            _add(rows, field, begin.elapsed_time(end))


def _add(rows: Sequence[Row], field: str, milliseconds: float) -> None:
    for row in rows:
        setattr(row.stats, field, getattr(row.stats, field) + milliseconds)
