"""A run that was interrupted anywhere and started again equals one that was not."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle.config import HeadConfig, Recipe, as_dict, read_recipe
from eagle.errors import EagleError
from eagle.target.target import weights_hash
from eagle.train import checkpoints, loop
from eagle.train.loop import train
from tests.programs import run_program
from tests.tiny import tiny_model
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_step import metrics_of, weights_of


class InterruptedRunError(Exception):
    pass


def _interrupt_after(step: int, recipe: Recipe) -> None:
    """Trains until `step` steps are done and logged, and no further (nothing is saved on the way out)."""
    real = loop._record

    def record(training: Any, *arguments: Any) -> None:
        real(training, *arguments)
        if training.progress.step == step:
            raise InterruptedRunError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_record", record)
        with pytest.raises(InterruptedRunError):
            train(recipe)


def _numbers(recipe: Recipe) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key not in ("time", "tokens_per_second")}
        for line in metrics_of(recipe)
    ]


def _same_run(ours: Recipe, theirs: Recipe) -> None:
    assert _numbers(ours) == _numbers(theirs)
    assert weights_of(ours).keys() == weights_of(theirs).keys()
    for name, weight in weights_of(ours).items():
        assert torch.equal(weight, weights_of(theirs)[name]), name


SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "save_every": 3,
    "log_every": 2,
    "schedule": "cosine",
    "clip": "norm",
    "gradient_accumulation": 2,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """9 training documents in steps of 4: 6 steps, checkpoints at 3 and 6."""
    directory = tmp_path_factory.mktemp("whole")
    write_tiny_store(directory, documents=11)
    recipe = tiny_recipe(directory, **SETTINGS)
    train(recipe)
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_resuming_after_any_step_equals_an_uninterrupted_run(step: int, uninterrupted: Recipe, tmp_path: Path) -> None:
    write_tiny_store(tmp_path, documents=11)
    recipe = tiny_recipe(tmp_path, **SETTINGS)
    _interrupt_after(step, recipe)
    assert not recipe.head_dir.exists()
    with open(recipe.train_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')  # a line torn by the kill
    train(recipe)
    _same_run(recipe, uninterrupted)


def test_two_interruptions_and_another_cut_of_the_same_global_batch(uninterrupted: Recipe, tmp_path: Path) -> None:
    write_tiny_store(tmp_path, documents=11)
    recipe = tiny_recipe(tmp_path, **SETTINGS)
    _interrupt_after(4, recipe)
    _interrupt_after(5, with_train(recipe, batch_size=1, gradient_accumulation=4))
    train(recipe)
    for name, weight in weights_of(recipe).items():
        torch.testing.assert_close(weight, weights_of(uninterrupted)[name], rtol=1e-4, atol=1e-6)


def killed(arguments: list[str]) -> int:
    """A program that trains the recipe and dies by kill -9 in the middle of a write."""

    def kill(*arguments: Any, **keywords: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    path, where = arguments
    if where == "second checkpoint, before its rename":
        sync, calls = checkpoints._sync_files, list[None]()
        checkpoints._sync_files = lambda path: kill() if calls else calls.append(sync(path))
    else:
        loop.save_head = kill
    loop.train(read_recipe(path))
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["second checkpoint, before its rename", "final head"])
def test_kill_9_while_saving_loses_nothing(where: str, uninterrupted: Recipe, tmp_path: Path) -> None:
    write_tiny_store(tmp_path, documents=11)
    recipe = tiny_recipe(tmp_path, **SETTINGS)
    (tmp_path / "recipe.yaml").write_text(json.dumps(as_dict(recipe)))
    killing = run_program(f"{__name__}:killed", [tmp_path / "recipe.yaml", where])
    assert killing.returncode == -signal.SIGKILL, killing.stderr
    newest = checkpoints.newest(recipe.train_dir)
    assert newest is not None
    assert newest.name == ("checkpoint-00000003" if where.startswith("second") else "checkpoint-00000006")
    train(recipe)
    assert not list(recipe.train_dir.glob(".*"))
    _same_run(recipe, uninterrupted)


def test_old_checkpoints_are_removed_and_each_holds_a_usable_head(uninterrupted: Recipe, tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2, save_every=1, keep_checkpoints=3)
    train(recipe)
    names = sorted(path.name for path in recipe.train_dir.glob("checkpoint-*"))
    assert names == [f"checkpoint-{step:08d}" for step in (6, 7, 8)]
    last = load_file(recipe.train_dir / names[-1] / "head" / "model.safetensors")
    assert all(torch.equal(last[name], weight) for name, weight in weights_of(recipe).items())
    assert not (recipe.train_dir / names[-1] / "model.safetensors").exists(), "the weights are there once"


def test_a_changed_recipe_is_refused_with_each_key_and_the_remedy(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    _interrupt_after(4, recipe)
    changed = with_train(recipe, lr=1e-4, betas=(0.9, 0.99), batch_size=4)
    changed = dataclasses.replace(changed, head=HeadConfig(fc_bias=True))
    with pytest.raises(EagleError) as caught:
        train(changed)
    message = str(caught.value)
    for part in (
        "checkpoint-00000003",
        "train.lr was 0.003, is 0.0001",
        "train.betas was [0.9, 0.95], is [0.9, 0.99]",
        "head.fc_bias was False, is True",
        "processes was 2, is 4",
        "choose another output_dir",
    ):
        assert part in message
    manifest = recipe.store_dir / "manifest.json"
    values = json.loads(manifest.read_text())
    values["target"]["model"] = "another"  # no hash of its weights is recorded: its name is all there is
    manifest.write_text(json.dumps(values))
    with pytest.raises(EagleError, match=r"features \(their target and data\) was"):
        train(recipe)


def _with_weights(recipe: Recipe) -> None:
    """Gives the recipe's target weights, and its store their hash."""
    model = tiny_model("llama")
    model.save_pretrained(recipe.target.model)
    manifest = recipe.store_dir / "manifest.json"
    values = json.loads(manifest.read_text())
    values["target"] |= {"model": recipe.target.model, "weights_sha256": weights_hash(model)}
    manifest.write_text(json.dumps(values))


def test_a_run_goes_on_after_its_target_was_moved_and_a_shard_mended(tmp_path: Path) -> None:
    """Then the store names the target's new place."""
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    _with_weights(recipe)
    _interrupt_after(4, recipe)
    Path(recipe.target.model).rename(tmp_path / "elsewhere")
    moved = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, model=str(tmp_path / "elsewhere")))
    _with_weights(moved)
    train(moved)
    assert json.loads((recipe.head_dir / "training.json").read_text())["step"] == 8


@pytest.mark.slow
def test_more_steps_and_other_reporting_are_no_change_under_a_constant_schedule(tmp_path: Path) -> None:
    write_tiny_store(tmp_path / "a")
    whole = tiny_recipe(tmp_path / "a", epochs=3)
    train(whole)
    write_tiny_store(tmp_path / "b")
    part = tiny_recipe(tmp_path / "b", epochs=3, max_steps=5, log_every=4, save_every=2)
    train(part)
    train(with_train(part, max_steps=None, log_every=1, eval_every=2, keep_checkpoints=1, project="other"))
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(part)[name])
    with pytest.raises(EagleError, match=r"is at step 12, but the recipe ends at step 5"):
        train(part)


def test_more_steps_under_a_schedule_that_ends_are_refused(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1, schedule="linear")
    train(recipe)
    with pytest.raises(EagleError, match=r"total steps.* was 4, is 8"):
        train(with_train(recipe, epochs=2))


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    _interrupt_after(7, recipe)
    broken = recipe.train_dir / "checkpoint-00000006" / "optimizer.safetensors"
    broken.write_bytes(broken.read_bytes()[:100])
    with pytest.raises(EagleError, match=r"checkpoint-00000006 cannot be loaded .*resume from the one before"):
        train(recipe)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    real, calls = checkpoints._sync_files, []

    def full(path: Path) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(path)

    monkeypatch.setattr(checkpoints, "_sync_files", full)
    with pytest.raises(EagleError, match=r"the disk is full.*last whole checkpoint is untouched"):
        train(recipe)
    assert checkpoints.newest(recipe.train_dir) == recipe.train_dir / "checkpoint-00000003"
    train(recipe)
    assert recipe.head_dir.is_dir()
