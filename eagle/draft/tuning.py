"""tuned.json: the draft trees that `eagle tune` measured to be the fastest, beside the head they were measured with.

They hold for one machine, engine and dtype, so the file has an entry for each; the decoder takes the one of the machine it
runs on where decode.drafter says nothing of the tree, and the published trees where there is none.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from eagle.draft.dynamic_tree import tree_words
from eagle.draft.published_tree import StaticTree
from eagle.errors import EagleError
from eagle.files import write_json
from eagle.target.engine import Engine
from eagle.target.machine_file import machine_key

FILE = "tuned.json"
FORMAT = 1

Shape = Literal["eagle2", "static", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """One tree, in the words of decode.drafter."""

    drafter: Shape = "eagle2"
    """eagle2: the dynamic tree of the sizes below; static: EAGLE-1's published one; none: no drafting."""
    budget: int = 0
    """Nodes, the root included"""
    top_k: int = 0
    depth: int = 0
    level_cost: float = 0.0

    def __str__(self) -> str:
        if self.drafter == "none":
            return "no drafting"
        if self.drafter == "static":
            return str(StaticTree())
        return tree_words(budget=self.budget, top_k=self.top_k, depth=self.depth, level_cost=self.level_cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedChoice:
    """The fastest tree for one kind of batch."""

    batch: int
    """Rows decoded together"""
    temperature: float
    """0: greedy rows"""
    tree: TreeSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedTrees:
    """What was tuned on one machine."""

    hardware: str
    """`machine_name`"""
    engine: Engine
    dtype: str
    """Of the target's weights, such as "float32"."""
    choices: tuple[TunedChoice, ...]
    source: Literal["tuned", "timed"] = "tuned"
    """tuned: with prompts, by eagle tune; timed: the costs alone (eagle/draft/timed_trees.py)."""
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How: versions, costs, curves, calibration (eagle/eval/tuner/tune.py); not read by the decoder."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.hardware, self.engine, self.dtype

    def at(self, *, batch: int, temperature: float) -> TreeSettings:
        """The tree for a batch: of the nearest temperature that was tuned, then of the batch size nearest in ratio."""

        def distance(choice: TunedChoice) -> tuple[float, float]:
            return abs(choice.temperature - temperature), abs(math.log(choice.batch / batch))

        return min(self.choices, key=distance).tree


def machine_name(device: torch.device) -> str:
    """What a measurement of speed on this device depends on: the GPU's name, or eagle/target/machine_file.py's of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine_key()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_tuned(folder: Path) -> list[TunedTrees]:
    """The entries of a head's tuned.json; none where there is no such file. Raises EagleError for a broken one."""
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"format {values['format']}, expected {FORMAT}")
        return [_entry(entry) for entry in values["machines"]]
    except (OSError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        raise EagleError(
            f"{path} is not what `eagle tune` writes ({error}); delete it, or write it anew with eagle tune"
        ) from error


def write_tuned(folder: Path, tuned: TunedTrees) -> Path:
    """Puts an entry into a head's tuned.json, in the place of the same machine's; returns the file."""
    others = [entry for entry in read_tuned(folder) if entry.key != tuned.key]
    path = folder / FILE
    write_json(path, {"format": FORMAT, "machines": [dataclasses.asdict(entry) for entry in [*others, tuned]]})
    return path


def tuned_for(folder: Path | None, *, device: torch.device, engine: Engine, dtype: torch.dtype) -> TunedTrees | None:
    """What was tuned for this machine, engine and dtype, if anything. folder: the head's; None: a head without one."""
    entries: Sequence[TunedTrees] = [] if folder is None else read_tuned(folder)
    if not entries:
        return None
    key = (machine_name(device), engine, dtype_name(dtype))
    return next((entry for entry in entries if entry.key == key), None)


def machines(entries: Iterable[TunedTrees]) -> str:
    """What entries are for, to tell a reader why none of them fits."""
    return "; ".join(f"{entry.hardware}, {entry.engine}, {entry.dtype}" for entry in entries)


def _entry(values: dict[str, Any]) -> TunedTrees:
    choices = []
    for choice in values["choices"]:
        tree = TreeSettings(**choice["tree"])
        if tree.drafter not in get_args(Shape):
            raise ValueError(f"drafter {tree.drafter!r}, expected one of {', '.join(get_args(Shape))}")
        sized = min(tree.budget, tree.top_k, tree.depth) >= 1 and 0 <= tree.level_cost <= 1
        if tree.drafter == "eagle2" and not sized:
            raise ValueError(f"a tree of {tree}, expected sizes from 1 on and a level cost from 0 to 1")
        choices.append(TunedChoice(**{**choice, "tree": tree}))
    if not choices or min(choice.batch for choice in choices) < 1:
        raise ValueError("a machine without a choice, or with a batch below 1")
    return TunedTrees(**{**values, "choices": tuple(choices)})
