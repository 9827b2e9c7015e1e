"""Writing files so that a kill at any moment leaves either the old file or the new one, never half of one."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; what was written there replaces `path` when the block ends well.

    The bytes are on disk (fsync) before the rename. When the block raises, the temporary file is removed; a write that the
    safetensors library reports to have failed is an OSError, as any other's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _system_errors(path):
            yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Like `atomic_path` for a whole folder: yields an empty folder that takes the place of `path` at the end.

    A folder cannot replace one that is not empty: the old one is renamed aside, then the new one put in its place, then
    the old one deleted. A kill between the two renames leaves the old one aside, whole; `clear_leftovers` puts it back.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with _system_errors(path):
            yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(path, aside)
        try:
            os.replace(temporary, path)
        except OSError:
            if aside.exists():
                os.replace(aside, path)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Makes an OSError of what safetensors raises when the system refuses a write: its own class is none."""
    try:
        yield
    except SafetensorError as error:
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def clear_leftovers(folder: Path, names: str) -> None:
    """Mends what a kill left of `atomic_path` and `atomic_dir` in `folder`, for the files and folders that match `names`.

    names: a glob pattern of their final names. Half-written temporaries are removed; an old folder that was renamed aside
    is put back where nothing has taken its place, else removed. Nobody may be writing them.
    """
    for old in folder.glob(f".{names}.*.old"):
        path = old.with_name(old.name.removeprefix(".").rsplit(".", 2)[0])
        if path.exists():
            _remove(old)
        else:
            os.replace(old, path)
    for temporary in folder.glob(f".{names}.*.tmp"):
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_file(path: Path) -> str:
    """The hex SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """The hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def stamp(path: Path) -> str:
    """Tells whether a file, or a file in a folder, was written anew: a hash of names, sizes and modification times.

    For weights too large to be hashed whenever someone asks.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return sha256_text("".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n" for file in files))
