"""Where the numbers of a run go: metrics.jsonl always, wandb and tensorboard through accelerate when asked for."""

import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from eagle.config import Recipe, as_dict
from eagle.files import atomic_path


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with its `step`."""

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, step: int) -> None:
        """Drops the lines past `step` (of a run that went on after its last checkpoint) and a line torn by a kill."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(kept), encoding="utf-8")

    def append(self, values: dict[str, Any]) -> None:
        """Adds a line, on disk before this returns: no checkpoint is ever ahead of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Trackers:
    """Writes to metrics.jsonl (main process) and to the accelerator's trackers."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator, *, resumed_at: int):
        self.accelerator = accelerator
        self.file = MetricsFile(recipe.train_dir / "metrics.jsonl")
        if accelerator.is_main_process:
            self.file.rewind(resumed_at)
        if accelerator.log_with:
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
            wandb = {"dir": str(recipe.train_dir), "name": Path(recipe.output_dir).name, "mode": mode}
            options = {"wandb": wandb} if "wandb" in recipe.train.trackers else {}
            accelerator.init_trackers(recipe.train.project, config=_flat(as_dict(recipe)), init_kwargs=options)

    def log(self, values: dict[str, Any]) -> None:
        """Records one line; `values` has `step`. Lists become one number per depth in the trackers."""
        if self.accelerator.is_main_process:
            self.file.append(values)
        numbers = {key: value for key, value in _flat(values).items() if isinstance(value, (int, float))}
        self.accelerator.log(numbers, step=values["step"])

    def close(self) -> None:
        """Ends the trackers' runs (not `end_training`, which would take the process group with it)."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


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
