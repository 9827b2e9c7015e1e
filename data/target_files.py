"""Which weights lie in a target's files? Told from some of their bytes, without loading them."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from eagle.config import TargetConfig
from eagle.reading import shard_names
from eagle.target.loading import local_path

_INDEX = ".index.json"
_NAMES = ("model.safetensors", f"model.safetensors{_INDEX}", "pytorch_model.bin", f"pytorch_model.bin{_INDEX}")
"""What transformers looks for, in its order."""
_BLOCK = 512
"""Bytes read at a place."""
_PLACES_PER_TENSOR, _PLACES_PER_FILE = 8, 4096


def weights_stamp(config: TargetConfig) -> str | None:
    """SHA-256 over the dtype asked for and over every tensor's name, dtype, shape and bytes at a few evenly spaced places.

    The same for a hub id, for its snapshot and for a copy elsewhere, however the tensors are shared out over files; another
    once weights are trained, or converted. (Files that are no safetensors are taken as one tensor each.) None: the weights
    are not on this machine, or their files cannot be read.
    """
    digest = hashlib.sha256(config.dtype.encode())
    try:
        parts = sorted(part for file in _weight_files(config) for part in _parts(file))
        for name, path, start, end, places in parts:
            digest.update(name.encode())
            with open(path, "rb") as file:
                for offset in _offsets(start, end, places):
                    file.seek(offset)
                    digest.update(file.read(min(_BLOCK, end - offset)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return digest.hexdigest() if parts else None


def _weight_files(config: TargetConfig) -> list[Path]:
    """The files that hold the target's weights; none where one of them is not here."""
    folder = _folder(config)
    for name in _NAMES if folder is not None else ():
        path = Path(folder or "") / name
        if path.is_file():
            names = shard_names(path, remedy="fetch it again") if name.endswith(_INDEX) else [name]
            files = [path.with_name(name) for name in names]
            return files if all(file.is_file() for file in files) else []
    return []


def _folder(config: TargetConfig) -> Path | None:
    """Where the target lies: its own folder, or the hub's cache."""
    path = local_path(config)
    if Path(path).is_dir():
        return Path(path)
    try:
        cached = try_to_load_from_cache(path, "config.json", revision=config.revision)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def _parts(path: Path) -> Iterator[tuple[str, Path, int, int, int]]:
    """(name with dtype and shape, file, first byte, end, places to read) of each tensor in a file."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        yield path.name, path, 0, size, _PLACES_PER_FILE
        return
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(min(length, size)))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield f"{name} {tensor['dtype']} {tensor['shape']}", path, start, end, _PLACES_PER_TENSOR


def _offsets(start: int, end: int, places: int) -> Iterator[int]:
    """Where to read: `places` evenly spaced blocks from `start` to `end`, or the blocks of all that is there."""
    if end - start <= places * _BLOCK:
        yield from range(start, end, _BLOCK)
        return
    for place in range(places):
        yield start + (end - _BLOCK - start) * place // (places - 1)
