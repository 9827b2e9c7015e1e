"""A run that the disk cannot hold is refused before its first step."""

from pathlib import Path

import pytest

from eagle.errors import EagleError
from eagle.train.checkpoints import require_disk
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, write_tiny_store
from tests.train.test_step import weights_of


def _with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("eagle.train.checkpoints.shutil.disk_usage", lambda _: type("Usage", (), {"free": free}))


def test_too_small_a_disk_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1, keep_checkpoints=3)
    _with_free(monkeypatch, 10_000)
    with pytest.raises(EagleError, match=r"needs .* for 3 checkpoints .*10.0 kB free; .*train.keep_checkpoints"):
        train(recipe)
    assert not list(recipe.train_dir.glob("checkpoint-*"))


def test_the_estimate_is_what_a_run_writes_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2, keep_checkpoints=2, save_every=2)
    train(recipe)
    (tmp_path / "new").mkdir()
    head = torch.nn.ParameterList([torch.nn.Parameter(weight) for weight in weights_of(recipe).values()])
    parameters = sum(parameter.numel() for parameter in head)
    written = sum(path.stat().st_size for path in recipe.train_dir.glob("checkpoint-*/**/*") if path.is_file())
    assert len(list(recipe.train_dir.glob("checkpoint-*"))) == 2
    assert 2 * 12 * parameters <= written <= 3 * 12 * parameters
    needed = 3 * 12 * parameters + 8 * parameters
    _with_free(monkeypatch, needed)
    assert f"{parameters:,} parameters" in require_disk(tmp_path / "new", head, keep=2)
    _with_free(monkeypatch, needed - 1)
    with pytest.raises(EagleError):
        require_disk(tmp_path / "new", head, keep=2)
    _with_free(monkeypatch, needed - 2 * 12 * parameters)
    require_disk(recipe.train_dir, head, keep=2)
