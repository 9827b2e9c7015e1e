"""Files that others wrote: what may be wrong with them becomes one message that names the file and the remedy."""

import json
import pickle
import re
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
        raise EagleError(f"{file} cannot be read ({error.strerror})", remedy=remedy) from error
    except ValueError as error:  # of JSON, or of UTF-8
        raise EagleError(f"{file} is not valid JSON ({error}), damaged or cut short", remedy=remedy) from error
    if not isinstance(values, dict):
        raise EagleError(f"{file} holds a {type(values).__name__}, expected an object ({{...}})", remedy=remedy)
    return values


def shard_names(index: Path, *, remedy: str) -> list[str]:
    """The files that a `*.index.json` spreads the weights over. Raises EagleError as `read_object`."""
    weight_map = read_object(index, remedy=remedy).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise EagleError(f"{index} has no weight_map (tensor: file), damaged or cut short; {remedy}")
    return sorted(set(weight_map.values()))


def reason(error: Exception) -> str:
    """A library's message in one line: its first one, all of it where the first is but a heading; without PyTorch's advice
    to load files in ways that run what they hold."""
    held = code_in(error)
    if held is not None:
        return f"it holds {held}, which is never run here"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, StrictDataclassError):
        return " ".join(line.strip() for line in lines)
    own = [line.partition(_UNPICKLER)[2] for line in lines if _UNPICKLER in line]
    return [*own, *lines][0]


def verdict(error: Exception, remedy: str) -> str:
    """What is wrong with a file of weights that cannot be read, and the remedy."""
    if code_in(error) is None:
        return f"it is damaged or cut short; {remedy}"
    return "it is more than tensors; save it as safetensors, or a dict of its tensors alone"


def code_in(error: Exception) -> str | None:
    """What a file holds besides tensors, where PyTorch refuses it for that; None for any other error."""
    text = str(error)
    if not _WEIGHTS_ONLY.search(text):
        return None
    if "TorchScript" in text:
        return "a program (a TorchScript archive)"
    if "legacy .tar" in text:
        return "pickled objects (in the legacy .tar format)"
    named = _OBJECT.search(text)
    return None if named is None else f"pickled Python objects ({named[1]})"


_UNPICKLER = "WeightsUnpickler error: "
_WEIGHTS_ONLY = re.compile("weights.only", re.IGNORECASE)
_OBJECT = re.compile(r"(?:GLOBAL|class|function|instance of type|of object) ['\"<]*([A-Za-z_]\w*\.[\w.]*\w)")
