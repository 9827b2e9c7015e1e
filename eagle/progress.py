"""Progress of long work: a bar with rate and ETA on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

console = Console(stderr=True, highlight=False)
LINE_EVERY_S = 15.0


class _Rate(ProgressColumn):
    """Units per second over the last half minute, as rich measures it."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{_rate(speed)} {task.fields['unit']}/s", style="progress.data.speed")


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


class ProgressBar:
    """`with ProgressBar("features", total=60_000, unit="tokens") as bar: bar.advance(512)`.

    `done` is what an earlier run has already finished: it counts towards the total, never towards the rate.
    `quiet=True` (every process but the first) shows nothing.
    """

    def __init__(self, name: str, *, total: int, unit: str, done: int = 0, quiet: bool = False):
        self.name, self.total, self.unit, self.count = name, total, unit, done
        self._at_start, self._start, self._last_line = done, time.monotonic(), time.monotonic()
        self._printed, self._note = -1, ""
        self._bar: Progress | None = None
        self._quiet = quiet
        if not quiet and console.is_terminal:
            columns = [
                TextColumn("{task.description:<10}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
                _Rate(),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            ]
            self._bar = Progress(*columns, console=console, speed_estimate_period=30)
            self._task = self._bar.add_task(name, total=total, completed=done, unit=unit, note="")

    def __enter__(self) -> "ProgressBar":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and kind is None and self.count != self._printed:
            self._print_line()

    def advance(self, units: int, note: str = "") -> None:
        """Counts `units` more as done; `note` replaces the text at the end of the line (a loss, a tau)."""
        self.count += units
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.count, note=self._note)
        elif not self._quiet and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._print_line()

    def _print_line(self) -> None:
        self._last_line, self._printed = time.monotonic(), self.count
        rate = (self.count - self._at_start) / max(self._last_line - self._start, 1e-9)
        left = (self.total - self.count) / rate if rate > 0 else float("inf")
        eta = "?" if left == float("inf") else f"{int(left) // 60}:{int(left) % 60:02d}"
        print(
            f"{self.name} {self.count:,}/{self.total:,} {self.unit}, {_rate(rate)} {self.unit}/s, {eta} left {self._note}",
            file=sys.stderr,
            flush=True,
        )
