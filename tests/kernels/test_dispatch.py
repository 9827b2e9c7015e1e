"""Launches run on their tensors' device; what they read beside their arguments can be kept."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from eagle.kernels import dispatch
from eagle.kernels.bench import folders
from eagle.kernels.commit.op import commit
from eagle.kernels.dispatch import keep, keeping, on


def test_the_tensors_device_becomes_the_current_one() -> None:
    other = on(torch.device("cuda:1"))
    assert isinstance(other, torch.cuda.device)
    assert other.idx == 1
    with on(torch.device("cpu")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kernel", folders())
def test_every_launch_is_on_the_tensors_device(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = [False]
    launches: list[bool] = []

    @contextmanager
    def current() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    launch = GridExecutor.__call__

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        launches.append(inside[-1])
        return launch(self, *arguments, **named)

    monkeypatch.setattr(dispatch, "nullcontext", current)
    monkeypatch.setattr(GridExecutor, "__call__", noted)
    bench = importlib.import_module(f"eagle.kernels.{kernel}.bench")
    for case in list(bench.cases(torch.device("cpu")))[:3]:
        case.run()
    assert launches
    assert all(launches)


def test_tensors_are_kept_for_those_who_ask() -> None:
    tensor = torch.zeros(1)
    keep(tensor)  # nobody asks
    with keeping() as outer:
        keep(tensor)
        with keeping() as inner:
            keep(tensor)
            keep(tensor)
    keep(torch.ones(1))
    assert len(outer) == len(inner) == 1
    assert outer[0] is inner[0] is tensor


def test_a_commit_keeps_its_table_of_addresses() -> None:
    layers = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    with keeping() as kept:
        commit(
            layers,
            path_BK=torch.tensor([[1, 3]]),
            counts_B=torch.tensor([2]),
            lengths_B=torch.tensor([2]),
            backend="triton",
        )
    assert [table.tolist() for table in kept] == [[layer.data_ptr() for layer in layers]]
