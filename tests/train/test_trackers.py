"""A run that was resumed is one run in every tracker, with every step once."""

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eagle.train.loop as loop
from eagle.config import Recipe
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, with_train, write_tiny_store


def stopped_twice(tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A run of 16 steps that was killed at steps 5 and 10, a while behind the checkpoints of steps 3 and 9."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    write_tiny_store(tmp_path)
    recipe = with_train(tiny_recipe(tmp_path), trackers=(tracker,), project="mine")
    record = loop._record
    for stop in (5, 10):

        def dies(training: Any, *rest: Any, stop: int = stop) -> None:
            record(training, *rest)
            if training.progress.step == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(loop, "_record", dies)
        with pytest.raises(KeyboardInterrupt):
            train(recipe)
    monkeypatch.setattr(loop, "_record", record)
    train(recipe)
    return recipe


def steps_of(recipe: Recipe, key: str) -> list[int]:
    lines = [json.loads(line) for line in (recipe.train_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if key in line]


@pytest.mark.slow
def test_tensorboard_has_every_step_once_after_two_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    recipe = stopped_twice(tmp_path, "tensorboard", monkeypatch)
    assert steps_of(recipe, "lr") == list(range(1, 17))
    assert steps_of(recipe, "val_loss") == [4, 8, 12, 16]
    seen: Counter[tuple[str, int]] = Counter()
    times = []
    for file in recipe.train_dir.rglob("events.out.tfevents.*"):
        for event in EventFileLoader(str(file)).Load():
            seen.update((value.tag, event.step) for value in event.summary.value if value.tag in ("lr", "val_loss"))
            times += [(event.step, event.wall_time) for value in event.summary.value if value.tag == "lr"]
    assert seen == Counter([("lr", step) for step in range(1, 17)] + [("val_loss", step) for step in (4, 8, 12, 16)])
    assert times == sorted(times), "steps of an earlier start keep the time at which they were made"
    assert len(list(recipe.train_dir.rglob("hparams.yml"))) == 1


@pytest.mark.slow
def test_wandb_has_one_run_with_every_step_once_after_two_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto import wandb_internal_pb2

    recipe = stopped_twice(tmp_path, "wandb", monkeypatch)
    (file,) = recipe.train_dir.glob("wandb/offline-run-*/run-*.wandb")
    steps = []
    for data in records(file.read_bytes()):
        found = wandb_internal_pb2.Record()
        found.ParseFromString(data)
        if found.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in found.history.item}
            steps += [int(items["_step"])] if "lr" in items else []
    assert steps == list(range(1, 17))


def records(content: bytes) -> Iterator[bytes]:
    """wandb's file: a header of 7 bytes, then LevelDB's log (blocks of 32 KiB of fragments: checksum, length, kind)."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if (1 << 15) - place % (1 << 15) < 7:
            place += (1 << 15) - place % (1 << 15)
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only, or the last fragment of a record
            yield whole
            whole = b""
