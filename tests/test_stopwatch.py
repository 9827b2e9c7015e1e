"""Times of a CUDA device come from events that nobody waits for; elsewhere from the clock."""

import time

import pytest
import torch

from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.sample.stopwatch import Stopwatch


class Event:
    """A CUDA event on a device that is through with the first `done` of them; each is recorded 2 ms after the one before."""

    made: list["Event"]
    done: int

    def __init__(self, *, enable_timing: bool):
        assert enable_timing
        self.at = -1

    def record(self) -> None:
        self.at = len(Event.made)
        Event.made.append(self)

    def query(self) -> bool:
        return self.at < Event.done

    def synchronize(self) -> None:
        Event.done = max(Event.done, self.at + 1)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "not through yet"
        return 2.0 * (end.at - self.at)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    Event.made, Event.done = [], 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: _Nothing())
    return Stopwatch(torch.device("cuda", 0))


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def row() -> Row:
    return Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=2)


def test_settling_adds_what_the_device_is_through_with(cuda: Stopwatch) -> None:
    rows = [row(), row()]
    with cuda.clock(rows, "draft_ms"):
        pass
    with cuda.clock(rows[:1], "verify_ms"):
        pass
    cuda.settle()
    assert rows[0].stats.draft_ms == 0
    Event.done = 2
    cuda.settle()
    assert [one.stats.draft_ms for one in rows] == [2.0, 2.0]
    assert rows[0].stats.verify_ms == 0
    cuda.settle(wait=True)
    cuda.settle(wait=True)
    assert [one.stats.verify_ms for one in rows] == [2.0, 0.0]


def test_on_a_cpu_the_clock_is_added_at_once() -> None:
    one, stopwatch = row(), Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with stopwatch.clock([one], "draft_ms"):
            time.sleep(0.01)
    assert one.stats.draft_ms >= 20
