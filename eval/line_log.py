"""A log of JSON lines that makes a measurement resumable: a header with its identity, then a record per key."""

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from eagle.files import atomic_path, sha256_text
from eagle.progress import console

Record = dict[str, Any]


class LineLog:
    """`with LineLog(path, identity) as log`: `log.records` are those of an earlier run of the same identity, by their "key".

    A log of another identity is set aside, which is said, and what was set aside of this one is taken back; a half-written
    last line (a kill) is cut off.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path = path
        self._header = json.loads(json.dumps({"identity": identity}))  # as it will be read again
        self.records: dict[str, Record] = {}
        self._file: TextIO | None = None

    def __enter__(self) -> "LineLog":
        aside = aside_path(self.path, self._header)
        lines = whole_lines(self.path)
        if lines and lines[0] != self._header:
            set_aside(self.path, lines[0], self._header)
        for path in (aside, self.path):
            self.records |= {record["key"]: record for record in lines_of(path, self._header) if "key" in record}
        kept = [self._header, *self.records.values()]
        with atomic_path(self.path) as temporary:
            temporary.write_text(
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8"
            )
        aside.unlink(missing_ok=True)
        self._file = open(self.path, "a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Adds a record; it is on disk when this returns."""
        assert self._file is not None
        self.records[key] = {"key": key, **record}
        self._file.write(json.dumps(self.records[key], ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def aside_path(path: Path, header: Record) -> Path:
    """Where the log of this header lies while `path` is another measurement's: NAME.before-HASH.jsonl."""
    return path.with_suffix(f".before-{sha256_text(json.dumps(header, sort_keys=True))[:8]}{path.suffix}")


def set_aside(path: Path, found: Record, wanted: Record) -> None:
    """Renames a log that is of another measurement (`aside_path`), and says so and why.

    found, wanted: the headers, that of the log and that of this measurement.
    """
    kept, old = aside_path(path, found), aside_path(path, wanted)
    os.replace(path, kept)
    now = f"going on with those in {old.name}" if lines_of(old, wanted) else "starting afresh"
    console.print(
        f"eval: {path} was of {_what_differs(found, wanted)}; {now}, the old answers are in {kept.name}",
        markup=False,
        soft_wrap=True,
    )


def lines_of(path: Path, header: Record) -> list[Record]:
    """The complete lines behind the header of a log; none where it is of another measurement, or not there."""
    lines = whole_lines(path)
    return lines[1:] if lines and lines[0] == header else []


def _what_differs(found: Record, wanted: Record) -> str:
    """Names what is not the same, as far down as it is named."""
    theirs: Any = found
    ours: Any = wanted
    path = ""
    while isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        if not keys:
            break
        path += f".{keys[0]}" if path else keys[0]
        theirs, ours = theirs.get(keys[0]), ours.get(keys[0])
    return f"another measurement ({path.removeprefix('identity.')} was {reprlib.repr(theirs)}, is {reprlib.repr(ours)})"


def whole_lines(path: Path) -> list[Record]:
    """The lines that are complete, up to the first one that is not.

    Lines end at "\\n" only: texts may hold other characters that str.splitlines takes for line ends, such as U+2028.
    """
    if not path.is_file():
        return []
    parsed: list[Record] = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        parsed.append(record)
    return parsed
