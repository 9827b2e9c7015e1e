"""Are the shards and token layers still the bytes that the extraction wrote? Checked before a run trusts them.

A file is read once; `verified.json` beside it remembers its hash, size and time of change, so that the next start need
not read it again until it changes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.files import write_json
from eagle.progress import ProgressBar

REMEMBERED = "verified.json"


def check_store(store: FeatureStore, accelerator: Accelerator, *, when: str) -> None:
    """Compares every file with its recorded SHA-256, shared out among the processes (a collective).

    when: "once", "always" or "never" (train.verify_store). Raises EagleError, in every process, naming the first file
    that differs and how to mend it.
    """
    if when == "never":
        return
    known = _remembered(store.directory) if when == "once" else {}
    files = store.recorded_files()
    todo = [file for file in files if known.get(file["file"], []) != _stamp(store.directory, file)]
    mine = todo[accelerator.process_index :: accelerator.num_processes]
    problems: list[str] = []
    quiet = not accelerator.is_main_process or sum(file["bytes"] for file in todo) < 2**28
    with ProgressBar("checking the feature store", total=len(mine), unit="files", quiet=quiet) as bar:
        for file in mine:
            reason = store.difference(file)
            if reason is not None:
                problems.append(str(store.damaged(file["file"], reason)))
            bar.advance(1)
    found: list[str] = gather_object(problems) if accelerator.num_processes > 1 else problems
    if found:
        raise EagleError(min(found))
    if todo and accelerator.is_main_process:
        stamps = {file["file"]: _stamp(store.directory, file) for file in files}
        try:
            write_json(store.directory / REMEMBERED, stamps)
        except OSError:
            return  # a store that may not be written to is simply read again at the next start


def _stamp(directory: Path, file: Mapping[str, Any]) -> list[Any] | None:
    """What a file is recognised by; None where there is none."""
    path = directory / file["file"]
    if not path.is_file():
        return None
    status = path.stat()
    return [file["sha256"], status.st_size, status.st_mtime_ns]


def _remembered(directory: Path) -> dict[str, Any]:
    try:
        values: Any = json.loads((directory / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
