"""target.device names a GPU: the head's too, in one process; an error in several. (Without a GPU: its calls are recorded.)"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle import launch
from eagle.config import Recipe, TargetConfig
from eagle.data.devices import own_device
from eagle.errors import EagleError
from eagle.train import run
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, write_tiny_store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order, on a machine of two GPUs."""
    done: list[str] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("eagle.data.devices.resolve_device", lambda device: torch.device(device))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"set_device {device}"))
    monkeypatch.setattr(launch, "make_accelerator", lambda **_: done.append("make_accelerator"))
    return done


def _on(device: str) -> Recipe:
    return Recipe(output_dir="x", target=TargetConfig(model="x", device=device))


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0"])
def test_one_process_trains_on_the_gpu_that_is_named(device: str, calls: list[str]) -> None:
    run.make_accelerator(_on(device))
    assert calls == [f"set_device {device}", "make_accelerator"], "accelerate takes the current GPU when it is made"


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_otherwise_accelerate_chooses(device: str, calls: list[str]) -> None:
    run.make_accelerator(_on(device))
    assert calls == ["make_accelerator"]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EagleError, match=r"'cuda:1' asked for, but PyTorch sees no CUDA device"):
        run.make_accelerator(_on("cuda:1"))


def test_one_gpu_for_several_processes_is_refused(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a store, which needs no target in memory, as well as where each process loads its own."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path)
    message = r"target.device is cuda:1, one GPU, .* set target.device to auto"
    with pytest.raises(EagleError, match=message):
        train(dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, device="cuda:1")))
    assert calls == []
    state: Any = SimpleNamespace(num_processes=2, device=torch.device("cuda:1"))
    with pytest.raises(EagleError, match=message):
        own_device(TargetConfig(model="x", device="cuda:1"), state)


def test_several_processes_load_their_targets_on_their_own_gpus() -> None:
    several: Any = SimpleNamespace(num_processes=2, device=torch.device("cuda:1"))
    for device, own in (("auto", "cuda:1"), ("cuda", "cuda:1"), ("cpu", "cpu")):
        assert own_device(TargetConfig(model="x", device=device), several).device == own
    alone: Any = SimpleNamespace(num_processes=1, device=torch.device("cuda"))
    assert own_device(TargetConfig(model="x", device="cuda:1"), alone).device == "cuda:1"
