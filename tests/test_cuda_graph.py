"""What is recorded and replayed, with stand-ins for CUDA's streams and graphs: inputs, memory, counts."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from eagle.errors import EagleError
from eagle.kernels.commit.op import commit
from eagle.kernels.dispatch import record
from eagle.target import cuda_graph
from eagle.target.cuda_graph import WARM_UPS, Captured, Inputs, Recorder
from tests.kernels.interpreted import INTERPRETED


class _Graph:
    def replay(self) -> None:
        """Nothing: a test looks at what is beside the graph."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that were made the current one, while PyTorch believes in one."""
    entered: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None):
            self.device = device

        def wait_stream(self, other: Any) -> None:
            """There is no other."""

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **how: zeros(*shape, **how))
    monkeypatch.setattr(cuda_graph, "_grounds", {})
    monkeypatch.setattr(cuda_graph, "_spoilt", [])
    return entered


def captured(work: Any) -> Captured[Any]:
    return Captured(work, device=torch.device("cuda:1"), capture="cuda")


def a_commit() -> Any:
    layers = [torch.randn(1, 2, 9, 4) for _ in range(2)]
    arguments = {"path_BK": torch.tensor([[1, 3]]), "counts_B": torch.tensor([2]), "lengths_B": torch.tensor([2])}

    def work() -> tuple[torch.Tensor, ...]:
        commit(layers, **arguments, backend="triton")
        return ()

    return work


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 5)])
def test_every_input_begins_where_sixteen_bytes_do(shape: tuple[int, ...]) -> None:
    inputs = Recorder(torch.device("cpu"), "none").inputs(first=shape, second=(2, 3), third=(1,), last=(7, 1))
    for side in (inputs.host, inputs.device):
        assert [tuple(one.shape) for one in side.values()] == [shape, (2, 3), (1,), (7, 1)]
        assert all(one.is_contiguous() for one in side.values())
        first = side["first"].data_ptr()
        assert all((one.data_ptr() - first) % 16 == 0 for one in side.values())
    for value, one in enumerate(inputs.host.values()):
        one.fill_(value)
    inputs.send()
    for value, one in enumerate(inputs.device.values()):
        assert bool((one == value).all())


def test_inputs_are_sent_on_their_own_device(devices: list[Any]) -> None:
    inputs = Inputs({"one": (3,)}, torch.device("cpu"), pinned=False)

    class Elsewhere:
        device = torch.device("cuda:1")

        def copy_(self, host: torch.Tensor, *, non_blocking: bool) -> None:
            assert devices == [self.device]

    class Event:
        def record(self) -> None:
            assert devices == [Elsewhere.device]

        def synchronize(self) -> None:
            assert devices == [Elsewhere.device] * 2

    inputs._device, inputs._sent = Elsewhere(), Event()  # type: ignore[assignment]
    inputs.send()
    inputs.wait()
    assert devices == [Elsewhere.device] * 2


def test_all_recordings_of_a_device_share_streams_and_memory_that_outlive_them(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[Any, Any]] = []

    @contextmanager
    def graph(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        recorded.append((pool, stream))
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)

    def on(index: int, *, fails: bool = False) -> tuple[Any, Any]:
        def work() -> tuple[torch.Tensor, ...]:
            if fails and len(recorded) > before:
                raise RuntimeError("operation not permitted when stream is capturing")
            return ()

        cuda_graph.ground(torch.device("cuda", index))
        before = len(recorded)
        Captured(work, device=torch.device("cuda", index), capture="cuda")()
        return recorded[-1]

    first, again, other = on(0), on(0), on(1)
    assert first == again
    assert first[0] is not other[0]
    assert (first[1].device.index, other[1].device.index) == (0, 1)
    with pytest.raises(EagleError, match="cannot be captured"):
        on(0, fails=True)
    assert on(0)[0] is not first[0], "what a failed recording has touched is not used again"
    assert on(1) == other
    assert [place.memory for place in cuda_graph._spoilt] == [first[0]], "and lives on for the graphs in it"


@pytest.mark.slow
@INTERPRETED
def test_a_recording_holds_what_its_kernels_read(devices: list[Any]) -> None:
    """The table of addresses is made once and dropped when many others came since; a replay reads it nevertheless."""
    from eagle.kernels.commit import triton as commit_triton

    tables: list[weakref.ref[torch.Tensor]] = []
    made = commit_triton._table

    def table(*arguments: Any) -> torch.Tensor:
        tables.append(weakref.ref(made(*arguments)))
        result = tables[-1]()
        assert result is not None
        return result

    commit_triton._table = table  # type: ignore[assignment]
    try:
        recording = captured(a_commit())
        recording()
        alone = a_commit()
        alone()
    finally:
        commit_triton._table = made
    made.cache_clear()
    gc.collect()
    assert all(one() is not None for one in tables[: WARM_UPS + 1])
    assert tables[-1]() is None, "what is not recorded is let go"
    del recording
    gc.collect()
    assert tables[0]() is None


@INTERPRETED
def test_a_replay_counts_the_kernels_that_it_runs(devices: list[Any]) -> None:
    recording = captured(a_commit())
    recording()
    with record() as calls:
        recording()
        recording()
    assert calls == {("commit", "triton"): 2}


@pytest.mark.parametrize("when", ["warm-up", "recording"])
def test_too_little_memory_is_told_as_that(devices: list[Any], monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    runs: list[int] = []

    def work() -> tuple[torch.Tensor, ...]:
        runs.append(1)
        if when == "warm-up" or len(runs) > WARM_UPS:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
        return ()

    with pytest.raises(
        EagleError, match=r"cuda:1 has too little memory .*Tried to allocate 20 GiB.*fewer rows"
    ) as caught:
        captured(work)()
    assert "cannot be captured" not in str(caught.value)

    cuda_graph.ground(torch.device("cuda:1"))  # anew, where the recording failed

    @contextmanager
    def graph(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("capture was invalidated")  # what ending a failed capture says

    monkeypatch.setattr(torch.cuda, "graph", graph)
    runs.clear()
    with pytest.raises(EagleError, match="has too little memory"):
        captured(work)()


def test_other_failures_of_a_recording_are_not_memory(devices: list[Any]) -> None:
    runs: list[int] = []

    def work() -> tuple[torch.Tensor, ...]:
        runs.append(1)
        if len(runs) > WARM_UPS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return ()

    with pytest.raises(EagleError, match=r"cannot be captured \(operation not permitted"):
        captured(work)()
