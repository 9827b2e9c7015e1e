"""Files that others wrote: what may be wrong with them becomes one message that names the file and the remedy."""

import json
import pickle
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from eagle.errors import EagleError

BROKEN: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError),
    *(StrictDataclassError, SafetensorError, pickle.UnpicklingError),
)
"""What libraries raise on files that are damaged, cut short, or hold something else than their name says."""


def read_object(file: Path, *, remedy: str) -> dict[str, Any]:
    """A JSON file's object. Raises EagleError, ending in the remedy, when it is missing, damaged or holds anything else."""
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EagleError(f"{file} cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise EagleError(f"{file} is not valid JSON ({error}), damaged or cut short; {remedy}") from error
    if not isinstance(values, dict):
        raise EagleError(f"{file} holds a {type(values).__name__}, expected an object ({{...}}); {remedy}")
    return values


def shard_names(index: Path, *, remedy: str) -> list[str]:
    """The files that a `*.index.json` spreads the weights over. Raises EagleError as `read_object`."""
    weight_map = read_object(index, remedy=remedy).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise EagleError(f"{index} has no weight_map (tensor: file), damaged or cut short; {remedy}")
    return sorted(set(weight_map.values()))


def reason(error: Exception) -> str:
    """A library's message in one line: its first one, all of it where the first is but a heading."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines) if isinstance(error, StrictDataclassError) else lines[0]
