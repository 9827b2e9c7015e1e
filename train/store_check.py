"""Are the shards still the bytes that the extraction wrote? Checked before a run trusts them.

A shard is read once; `verified.json` beside it remembers its hash, size and time of change, so that the next start need
not read it again until it changes.
"""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.files import sha256_file, write_json
from eagle.progress import ProgressBar

REMEMBERED = "verified.json"


def check_store(store: FeatureStore, accelerator: Accelerator, *, when: str) -> None:
    """Compares every shard with its recorded SHA-256, shared out among the processes (a collective).

    when: "once", "always" or "never" (train.verify_store). Raises EagleError, in every process, naming the first shard
    that differs and how to mend it.
    """
    if when == "never":
        return
    known = _remembered(store.directory) if when == "once" else {}
    shards = store.manifest["shards"]
    todo = [shard for shard in shards if known.get(shard["file"]) != _stamp(store.directory, shard)]
    mine = todo[accelerator.process_index :: accelerator.num_processes]
    problems: list[str] = []
    quiet = not accelerator.is_main_process or sum(shard["bytes"] for shard in todo) < 2**28
    with ProgressBar("checking the feature store", total=len(mine), unit="shards", quiet=quiet) as bar:
        for shard in mine:
            digest = sha256_file(store.directory / shard["file"])
            if digest != shard["sha256"]:
                problems.append(
                    f"shard {shard['file']} of the feature store {store.directory} is damaged: its SHA-256 is {digest}, the "
                    f"manifest says {shard['sha256']}; delete it and run `eagle features RECIPE` again, which writes only what "
                    "is missing"
                )
            bar.advance(1)
    found: list[str] = gather_object(problems) if accelerator.num_processes > 1 else problems
    if found:
        raise EagleError(min(found))
    if todo and accelerator.is_main_process:
        stamps = {shard["file"]: _stamp(store.directory, shard) for shard in shards}
        try:
            write_json(store.directory / REMEMBERED, stamps)
        except OSError:
            return  # a store that may not be written to is simply read again at the next start


def _stamp(directory: Path, shard: dict[str, Any]) -> list[Any]:
    status = (directory / shard["file"]).stat()
    return [shard["sha256"], status.st_size, status.st_mtime_ns]


def _remembered(directory: Path) -> dict[str, Any]:
    try:
        values: Any = json.loads((directory / REMEMBERED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
