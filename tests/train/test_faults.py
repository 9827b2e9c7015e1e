"""What a user sees when something breaks: one message that says what to do, exit code 2, and nothing lost."""

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import as_dict
from eagle.data import store
from eagle.formats.checkpoint import load_head
from eagle.train import checkpoints
from eagle.train.__main__ import main
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, with_train, write_tiny_store


def _run(recipe: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Trains through the program; its one error message."""
    path = Path(recipe.output_dir).parent / "recipe.yaml"
    path.write_text(json.dumps(as_dict(recipe)))
    capsys.readouterr()
    assert main(["--config", str(path)]) == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    (message,) = [line for line in text.splitlines() if line.startswith("eagle: error: ")]
    return message


def test_a_value_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(number: int, features_TH: torch.Tensor) -> None:
        if number == 3:
            features_TH[5, 0] = float("nan")

    write_tiny_store(tmp_path, spoil=spoil)
    message = _run(tiny_recipe(tmp_path, save_every=1), capsys)
    assert "the features of doc-3 in the feature store" in message
    assert "are not finite" in message
    assert "Nothing was overwritten" in message


def test_a_shard_with_a_flipped_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path)
    shard = recipe.store_dir / "shard-00001.safetensors"
    blob = bytearray(shard.read_bytes())
    blob[len(blob) // 2] ^= 1  # somewhere in the features
    shard.write_bytes(blob)
    message = _run(recipe, capsys)
    assert message.startswith("eagle: error: shard shard-00001.safetensors of the feature store")
    assert "its SHA-256 is" in message
    assert "run `eagle features RECIPE` again, which writes only what is missing" in message
    assert not recipe.train_dir.exists()
    train(with_train(recipe, verify_store="never", epochs=1))


def test_shards_are_read_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_store(tmp_path)
    read: list[str] = []
    real = store.sha256_file
    monkeypatch.setattr(store, "sha256_file", lambda path: read.append(path.name) or real(path))
    recipe = tiny_recipe(tmp_path, epochs=1)
    train(recipe)
    assert read == [*(f"shard-0000{number}.safetensors" for number in range(3)), "token_layers.safetensors"]
    train(with_train(recipe, epochs=2))
    assert len(read) == 4
    shard = recipe.store_dir / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes())
    train(with_train(recipe, epochs=3))
    assert read[4:] == ["shard-00001.safetensors"]
    train(with_train(recipe, epochs=4, verify_store="always"))
    assert len(read) == 9


@pytest.mark.slow
def test_token_layers_with_a_flipped_bit_or_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1)
    path = recipe.store_dir / "token_layers.safetensors"
    blob = bytearray(path.read_bytes())
    blob[-5] ^= 1
    path.write_bytes(blob)
    message = _run(recipe, capsys)
    assert message.startswith("eagle: error: file token_layers.safetensors of the feature store")
    assert "its SHA-256 is" in message
    path.unlink()
    message = _run(recipe, capsys)
    assert "token_layers.safetensors" in message
    assert "it is missing; delete it and run `eagle features RECIPE` again" in message


def test_a_store_of_an_earlier_version_records_no_hash_of_its_token_layers(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1)
    manifest = recipe.store_dir / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["token_layers"]
    manifest.write_text(json.dumps(values))
    assert load_head(train(recipe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "code"), [(PermissionError(13, "Permission denied", "x"), 2), (KeyboardInterrupt(), 130)]
)
def test_the_program_ends_as_the_eagle_command_does(
    error: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(recipe: Any) -> None:
        raise error

    monkeypatch.setattr("eagle.train.__main__.train", fail)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(as_dict(tiny_recipe(tmp_path))))
    assert main(["--config", str(path)]) == code
    assert "eagle: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("where", ["optimizer", "head", "metrics"])
def test_a_full_disk(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import SafetensorError

    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    text = "I/O error: No space left on device (os error 28)"

    def full(*arguments: Any, **keywords: Any) -> None:
        raise SafetensorError(text) if where == "optimizer" else OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "optimizer":
            patch.setattr(checkpoints, "save_file", full)
        elif where == "head":
            from eagle.train import loop

            patch.setattr(loop, "save_head", full)
        else:
            recipe.train_dir.mkdir(parents=True)
            (recipe.train_dir / "metrics.jsonl").symlink_to("/dev/full")
            patch.setattr("eagle.train.trackers.MetricsFile.rewind", lambda file, step: None)
        message = _run(recipe, capsys)
    assert "the disk is full (" in message
    assert "make room and run the same command again" in message
    if where == "metrics":
        (recipe.train_dir / "metrics.jsonl").unlink()
    train(recipe)
    assert load_head(recipe.head_dir)


@pytest.mark.slow
def test_a_draft_vocabulary_of_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_store(tmp_path)
    first = tiny_recipe(tmp_path, epochs=1)
    first = dataclasses.replace(first, head=dataclasses.replace(first.head, draft_vocab_size=64))
    train(first)
    broken = load_head(first.head_dir)
    broken.d2t.zero_()
    broken.save_pretrained(tmp_path / "zeros")
    warm = dataclasses.replace(
        first,
        head=dataclasses.replace(first.head, init_from=str(tmp_path / "zeros")),
        output_dir=str(tmp_path / "warm"),
    )
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "features").symlink_to(first.store_dir)
    message = _run(warm, capsys)
    assert f"head {tmp_path / 'zeros'}" in message
    assert "d2t is all zeros" in message
