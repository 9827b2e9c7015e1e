"""Where the numbers of a run go: metrics.jsonl always, wandb and tensorboard through accelerate when asked for."""

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eagle.config import Recipe, as_dict
from eagle.files import atomic_path, write_json


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops the lines past `step` (of a run that went on after its last checkpoint) and a line torn by a kill.

        Returns what the others hold.
        """
        if not self.path.exists():
            return []
        lines, kept = [], []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
                if values["step"] <= step:
                    lines.append(line + "\n")
                    kept.append(values)
            except (ValueError, KeyError, TypeError):
                continue
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
        return kept

    def append(self, values: dict[str, Any]) -> None:
        """Adds a line, on disk before this returns: no checkpoint is ever ahead of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Trackers:
    """Writes to metrics.jsonl (main process) and to the accelerator's trackers.

    However often a run is resumed it is one run there, with every step once: metrics.jsonl knows what holds, and what an
    earlier start left of it in files here is taken away and written again.
    """

    def __init__(self, recipe: Recipe, accelerator: Accelerator, *, resumed_at: int):
        self.accelerator = accelerator
        self.file = MetricsFile(recipe.train_dir / "metrics.jsonl")
        main = accelerator.is_main_process
        history = self.file.rewind(resumed_at) if main else []
        if not accelerator.log_with:
            return
        options: dict[str, Any] = {}
        if "wandb" in recipe.train.trackers:
            options["wandb"] = _wandb_options(recipe, resumed=resumed_at > 0) if main else {}
        if "tensorboard" in recipe.train.trackers:
            if main:
                _remove_events(recipe.train_dir / recipe.train.project)
            options["tensorboard"] = {"purge_step": 0}  # one that watches the folder forgets what it has read
        accelerator.init_trackers(recipe.train.project, config=_flat(as_dict(recipe)), init_kwargs=options)
        for values in history:
            self._track(values, again=True)

    def _track(self, values: dict[str, Any], *, again: bool = False) -> None:
        """again: of an earlier start, which a tracker elsewhere (wandb online) may know already."""
        numbers = {key: value for key, value in _flat(values).items() if isinstance(value, (int, float))}
        for tracker in self.accelerator.trackers:
            if again and values["step"] < getattr(tracker.tracker, "step", 0):
                continue
            when = {"walltime": values["time"]} if tracker.name == "tensorboard" and "time" in values else {}
            tracker.log(numbers, step=values["step"], **when)

    def log(self, values: dict[str, Any]) -> None:
        """Records one line; `values` has `step`. Lists become one number per depth in the trackers."""
        if self.accelerator.is_main_process:
            self.file.append(values)
            self._track(values)

    def close(self) -> None:
        """Ends the trackers' runs (not `end_training`, which would take the process group with it)."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


def _wandb_options(recipe: Recipe, *, resumed: bool) -> dict[str, Any]:
    """For wandb.init: the run that was begun in this folder, or a new one. An offline run's folder is written from its
    beginning at every start."""
    online, note = bool(os.environ.get("WANDB_API_KEY")), recipe.train_dir / "wandb-run.json"
    known = json.loads(note.read_text(encoding="utf-8"))["id"] if note.is_file() else None
    if known is not None:
        for folder in (recipe.train_dir / "wandb").glob(f"offline-run-*-{known}"):
            shutil.rmtree(folder)
    run = known if known is not None and resumed else secrets.token_hex(4)
    write_json(note, {"id": run})
    name = Path(recipe.output_dir).name
    options = {"dir": str(recipe.train_dir), "name": name, "id": run, "mode": "online" if online else "offline"}
    return {**options, "resume": "allow"} if online else options


def _remove_events(folder: Path) -> None:
    """TensorBoard's files of earlier starts, and the folders that these alone filled."""
    for file in [*folder.rglob("events.out.tfevents.*"), *folder.rglob("hparams.yml")]:
        file.unlink()
        if file.parent != folder and not any(file.parent.iterdir()):
            file.parent.rmdir()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings by dotted key, lists of numbers by index, everything else as numbers or text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, list) and any(isinstance(item, (int, float)) for item in value):
            flat.update({f"{prefix}{key}/{index}": item for index, item in enumerate(value) if item is not None})
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (int, float, str)) else str(value)
    return flat
