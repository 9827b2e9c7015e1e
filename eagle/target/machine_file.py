"""What was once timed on this machine, kept in the user's cache: a file of JSON objects by machine, then by what was timed.

Of several processes that want the same figure one measures and the others wait and read, so that all decide alike.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME

from eagle.environment import hardware
from eagle.files import write_json


def timings_file(name: str) -> Path:
    """Where this user's timings of that name lie."""
    return Path(HF_HOME) / "eagle" / f"{name}.json"


def machine_key() -> str:
    """What the speed of a forward on a CPU depends on."""
    machine = hardware()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    parts = [machine["cpu"], f"{machine['torch_threads']} threads", f"torch {torch.__version__}"]
    parts += [torch.backends.cpu.get_cpu_capability(), *([f"oneDNN at most {limit}"] if limit else [])]
    return ", ".join(parts)


def remembered(name: str, keys: Iterable[str], measure: Callable[[str], Any]) -> dict[str, Any]:
    """key -> its figure (JSON), measured where the file does not know it. A file that is missing, damaged or cannot be
    written costs time alone: what it held is measured again."""
    keys, path, machine = list(keys), timings_file(name), machine_key()
    known = _read(path).get(machine, {})
    if any(key not in known for key in keys):
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(f"{path}.lock"))
            known = {**known, **_read(path).get(machine, {})}
            known.update({key: measure(key) for key in keys if key not in known})
            with contextlib.suppress(OSError):
                write_json(path, {**_read(path), machine: known})
    return {key: known[key] for key in keys}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
