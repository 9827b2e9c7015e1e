"""The program: its exit codes, and several processes doing what one does."""

import json
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from eagle.config import HeadConfig, Recipe, TargetConfig, TrainConfig, as_dict
from eagle.errors import EagleError
from eagle.launch import check_world
from eagle.train.__main__ import main
from eagle.train.loop import train
from eagle.train.run import check_settings, check_strategy
from tests.programs import run_program
from tests.train.stores import tiny_recipe, write_tiny_store
from tests.train.test_step import metrics_of, weights_of


def _recipe_file(recipe: Recipe, directory: Path) -> Path:
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(as_dict(recipe)))
    return path


def _launch(processes: int, path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return run_program("eagle.train.__main__", ["--config", path, *overrides], processes=processes)


def test_the_program_trains_with_overrides(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path)
    assert main(["--config", str(_recipe_file(recipe, tmp_path)), "--train.epochs", "1"]) == 0
    assert json.loads((recipe.head_dir / "training.json").read_text())["step"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no recipe given"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["--config=RECIPE", "--train.lrr", "1"], "did you mean train.lr"),
        (["--config", "RECIPE"], "eagle features"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(_recipe_file(tiny_recipe(tmp_path), tmp_path))
    assert main([argument.replace("RECIPE", path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 1), (1, 2)])
def test_two_processes_train_like_one(batch_size: int, accumulation: int, tmp_path: Path) -> None:
    """9 training documents in steps of 4: an epoch's last step leaves shares empty."""
    keys: dict[str, Any] = {"epochs": 3, "clip": "norm", "schedule": "cosine"}
    write_tiny_store(tmp_path / "one", documents=11)
    one = tiny_recipe(tmp_path / "one", batch_size=4, **keys)
    train(one)
    write_tiny_store(tmp_path / "two", documents=11)
    two = tiny_recipe(tmp_path / "two", batch_size=batch_size, gradient_accumulation=accumulation, **keys)
    path = _recipe_file(two, tmp_path)
    finished = _launch(2, path, "--train.max_steps", "9")
    assert finished.returncode == 0, finished.stderr
    ours, theirs = metrics_of(two), metrics_of(one)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "lr", "supervised_tokens", "val_loss", "val_tau", "val_tokens"):
            assert mine.get(key, 0) == pytest.approx(other.get(key, 0), rel=2e-4), (mine["step"], key)
        assert mine.get("val_acceptance", []) == pytest.approx(other.get("val_acceptance", []), rel=1e-3)
    for name, weight in weights_of(two).items():
        torch.testing.assert_close(weight, weights_of(one)[name], rtol=1e-3, atol=2e-5)
    again = _launch(2, path)
    assert again.returncode == 0
    assert again.stderr.count("is complete") == 1


@pytest.mark.slow
def test_all_processes_stop_when_one_meets_what_is_not_finite(tmp_path: Path) -> None:
    def spoil(number: int, features_TH: torch.Tensor) -> None:
        if number == 3:
            features_TH[5, 0] = float("inf")

    write_tiny_store(tmp_path, spoil=spoil)
    finished = _launch(2, _recipe_file(tiny_recipe(tmp_path, batch_size=1), tmp_path))
    assert finished.returncode != 0
    found = re.findall(
        "eagle: error: (process 1: )?training stopped .* features of doc-3 in .* are not finite", finished.stderr
    )
    assert len(found) >= 1
    assert len(found) == len(set(found)), "once a process (the launcher may end one before it speaks)"


@pytest.mark.parametrize("strategy", [DistributedType.DEEPSPEED, DistributedType.FSDP])
def test_clipping_by_value_is_refused_where_gradients_are_spread(strategy: DistributedType) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=strategy, num_processes=1, is_fsdp2=True)
    with pytest.raises(EagleError, match=r"cannot clip gradients by value; set train.clip to norm"):
        check_settings(TrainConfig(clip="value"), accelerator)


@pytest.mark.parametrize(
    ("version", "stage", "refused"), [("eagle3", 3, True), ("eagle3", 2, False), ("eagle1", 3, False)]
)
def test_an_lm_head_of_its_own_is_refused_under_zero_3(version: Any, stage: int, refused: bool) -> None:
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, state=plugin)
    recipe = Recipe(output_dir="x", target=TargetConfig(model="x"), head=HeadConfig(version=version))
    with pytest.raises(EagleError, match=r"ZeRO stage 3.*launch with FSDP") if refused else nullcontext():
        check_strategy(recipe, accelerator)


def test_processes_that_accelerate_runs_as_if_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator: Any = SimpleNamespace(num_processes=1)
    with pytest.raises(EagleError, match=r"2 processes were launched, but accelerate runs 1.*ACCELERATE_USE_CPU=true"):
        check_world(accelerator)
