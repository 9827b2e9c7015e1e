"""A log of JSON lines that makes a measurement resumable: a header with its identity, then a record per key."""

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from eagle.files import atomic_path, sha256_text
from eagle.progress import console

Record = dict[str, Any]


class LineLog:
    """`with LineLog(path, identity) as log`: `log.records` are those of an earlier run of the same identity, by their "key".

    A log of another identity is set aside, which is said, and what was set aside of this one is taken back; a half-written
    last line (a kill) is cut off. Of several processes the first one writes NAME.jsonl, process k NAME.k.jsonl; when the first
    one opens its log, it takes over what lies in the others'. The others must open theirs after it, and before anybody appends:
    all then know the same records.

    format: the version of the records, part of the header. refuse(path, found, wanted): raises where a log of the header
    `found` must not be set aside for one of the header `wanted`.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        *,
        format: int | None = None,
        process: int = 0,
        refuse: Callable[[Path, Record, Record], None] = lambda path, found, wanted: None,
    ):
        self.path, self._process, self._refuse = path, process, refuse
        header = {"identity": identity} if format is None else {"format": format, "identity": identity}
        self._header: Record = json.loads(json.dumps(header))  # as it will be read again
        self.records: dict[str, Record] = {}
        """All that is known: those of the log when it was opened, and this process's since."""
        self._file: TextIO | None = None

    def __enter__(self) -> "LineLog":
        own = self.path
        if self._process:
            self._take(self.path)
            own = self.path.with_suffix(f".{self._process}{self.path.suffix}")
            self._begin(own, [])
        else:
            others = _others(self.path)
            for path in (own, *others):
                self._set_aside(path)
            others += _aside(self.path, self._header)
            for path in (*others, own):
                self._take(path)
            self._begin(own, self.records.values())
            for path in others:
                path.unlink(missing_ok=True)
        self._file = open(own, "a", encoding="utf-8")
        return self

    def _set_aside(self, path: Path) -> None:
        lines = whole_lines(path)
        if lines and lines[0] != self._header:
            self._refuse(path, lines[0], self._header)
            set_aside(path, lines[0], self._header)

    def _take(self, path: Path) -> None:
        self.records |= {record["key"]: record for record in lines_of(path, self._header) if "key" in record}

    def _begin(self, path: Path, records: Iterable[Record]) -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("".join(map(_line, (self._header, *records))), encoding="utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, key: str, record: Mapping[str, Any]) -> None:
        """Adds a record; it is on disk when this returns."""
        assert self._file is not None
        self.records[key] = {"key": key, **record}
        self._file.write(_line(self.records[key]))
        self._file.flush()
        os.fsync(self._file.fileno())


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _others(path: Path) -> list[Path]:
    """Logs of processes behind the first one, of this start or an earlier one."""
    found = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return sorted(one for one in found if len(one.suffixes) == 2 and one.suffixes[0].removeprefix(".").isdigit())


def _aside(path: Path, header: Record) -> list[Path]:
    """What was set aside of the logs of this header, the first process's and the others'."""
    end = aside_path(path, header).name.removeprefix(path.stem)
    return sorted(path.parent.glob(f"{path.stem}*{end}"))


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
