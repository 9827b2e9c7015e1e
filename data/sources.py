"""Where conversations come from: names of sources -> files or hub data sets -> raw rows with their origin.

A source is a JSONL / JSON / Parquet file (.gz too), a folder or a glob pattern of such files, a hub id (`OWNER/NAME` or
`OWNER/NAME:CONFIG`), or `shipped:NAME` for a file that comes with this package. JSON is read row by row by this module,
so that a broken row is reported with its file and line; Parquet and hub data sets go through `datasets`.
"""

import dataclasses
import difflib
import glob
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import eagle
from eagle.errors import EagleError
from eagle.files import sha256_file, sha256_text

SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One file or one hub data set; `name` is how the recipe calls it and how reports name it."""

    name: str
    path: Path | None
    """The local file; None for a hub data set."""
    split: str = "train"
    """Split of a hub data set."""


@dataclasses.dataclass(frozen=True)
class SourceRow:
    """A row as it was read, not interpreted yet."""

    origin: str
    value: Any


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A row that cannot be used. `reason` is the same for all rows of its kind, `detail` tells this one's story."""

    origin: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.origin}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


class RowError(Exception):
    """Carries (reason, detail) of a row that cannot be used up to where it becomes Rejected."""


def shipped_files() -> dict[str, Path]:
    """Every `shipped:NAME`: conversations of data/shipped and prompts of eval/prompts, inside the installed package."""
    root = Path(eagle.__file__).parent
    found: dict[str, Path] = {}
    for folder in (root / "eval" / "prompts", root / "data" / "shipped"):
        for path in sorted(folder.glob("*")):
            if path.name.endswith(SUFFIXES):
                found[path.name.split(".")[0]] = path
    return found


def resolve(source: str, *, split: str = "train") -> list[Source]:
    """The files or the hub data set behind one entry of `data.sources`.

    Raises EagleError for an unknown shipped name (with the nearest), a missing file, an empty folder or pattern.
    """
    if source.startswith("shipped:"):
        name, known = source.removeprefix("shipped:"), shipped_files()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean shipped:{near[0]}? " if near else ""
            raise EagleError(f"there is no {source}; {hint}shipped files: {', '.join(sorted(known)) or 'none'}")
        return [Source(name=source, path=known[name])]
    path = Path(source).expanduser()
    if path.is_dir():
        return _several(source, sorted(item for item in path.rglob("*") if item.is_file()))
    if path.exists():
        if not path.name.endswith(SUFFIXES):
            raise EagleError(f"source {source} has an unknown ending; expected one of {', '.join(SUFFIXES)}")
        return [Source(name=source, path=path)]
    if glob.has_magic(source):
        return _several(source, sorted(Path(item) for item in glob.glob(str(path), recursive=True)))
    if _HUB_ID.fullmatch(source) and not source.endswith(SUFFIXES):
        return [Source(name=source, path=None, split=split)]
    names = [item.name for item in path.parent.glob("*")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"did you mean {path.parent / near[0]}?" if near else "give a file, a folder, a hub id or shipped:NAME"
    raise EagleError(f"source {source} does not exist; {hint}")


def _several(source: str, paths: Sequence[Path]) -> list[Source]:
    files = [path for path in paths if path.name.endswith(SUFFIXES)]
    if not files:
        raise EagleError(f"source {source} holds no file that ends in {', '.join(SUFFIXES)}")
    return [Source(name=str(path), path=path) for path in files]


def source_sha256(source: Source) -> str:
    """SHA-256 of a file's bytes; for a hub data set that of its `datasets` fingerprint (revision and files)."""
    if source.path is not None:
        return sha256_file(source.path)
    data = load_hub(source)
    return sha256_text(f"{source.name} {source.split} {data._fingerprint} {len(data)}")


def count_rows(source: Source) -> int:
    """How many rows `read_rows` will yield, found without interpreting them."""
    if source.path is None:
        return len(load_hub(source))
    if source.path.suffix == ".parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        with _damage_is_reported(source.path):
            return int(parquet.ParquetFile(source.path).metadata.num_rows)
    with _damage_is_reported(source.path), _open(source.path) as file:
        if not _is_json_document(source.path):
            return sum(1 for line in file if line.strip())
    return sum(1 for _ in read_rows(source))


def read_rows(source: Source) -> Iterator[SourceRow | Rejected]:
    """The rows of a source, one at a time; memory does not grow with the source.

    Raises EagleError when the source as a whole is unreadable or has no row at all.
    """
    rows: Iterator[SourceRow | Rejected]
    if source.path is None:
        rows = _data_set_rows(load_hub(source), name=source.name)
    elif source.path.suffix == ".parquet":
        rows = _parquet_rows(source.path, name=source.name)
    elif _is_json_document(source.path):
        rows = _document_rows(source.path, name=source.name)
    else:
        rows = _line_rows(source.path, name=source.name)
    empty = True
    with _damage_is_reported(source.path):
        for row in rows:
            empty = False
            yield row
    if empty:
        raise EagleError(f"source {source.name} is empty; expected one conversation per line (or row)")


class _damage_is_reported:  # noqa: N801 - reads as a phrase after `with`
    """Turns what a damaged or unreadable file raises into an EagleError that names the file."""

    def __init__(self, path: Path | None):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        from pyarrow import ArrowException

        if self.path is not None and isinstance(error, (OSError, EOFError, zlib.error, ArrowException)):
            text = str(error) or type(error).__name__
            raise EagleError(f"{self.path} cannot be read: {text}; is it whole, and what its name says?") from error


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")  # type: ignore[return-value]


def _line_rows(path: Path, *, name: str) -> Iterator[SourceRow | Rejected]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse(line, origin=f"{name}:{number}")


def _parse(line: bytes, *, origin: str) -> SourceRow | Rejected:
    try:
        return SourceRow(origin, json.loads(line.rstrip(b"\r\n").decode("utf-8")))
    except UnicodeDecodeError as error:
        return Rejected(origin, "not UTF-8", f"byte {error.start} of the line")
    except json.JSONDecodeError as error:
        return Rejected(origin, "not valid JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}")
    except RecursionError:
        return Rejected(origin, "not valid JSON", "nested too deeply")
    except ValueError:  # Python's limit of an int's digits
        return _too_long(origin)


def _too_long(origin: str) -> Rejected:
    return Rejected(origin, "a number of too many digits", f"expected at most {sys.get_int_max_str_digits()}")


def _is_json_document(path: Path) -> bool:
    """Whether a .json file is one array or a pretty-printed object rather than one row per line."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return False
    with _damage_is_reported(path), _open(path) as file:
        for line in file:
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                return line.startswith(b"[") or line == b"{"
    return False


def _document_rows(path: Path, *, name: str) -> Iterator[SourceRow | Rejected]:
    """The elements of a JSON array (or objects one after another), read in chunks; origins are where each begins."""
    decoder, lenient = json.JSONDecoder(), json.JSONDecoder(parse_int=float)
    buffer, line, at_end = "", 1, False
    with _open(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8-sig")
        try:
            while True:
                skipped = len(buffer) - len(buffer.lstrip(" \t\r\n,[]"))
                line += buffer.count("\n", 0, skipped)
                buffer = buffer[skipped:]
                row: SourceRow | Rejected
                try:
                    try:
                        value, end = decoder.raw_decode(buffer)
                        row = SourceRow(f"{name}:{line}", value)
                    except json.JSONDecodeError:
                        raise
                    except ValueError:
                        _, end = lenient.raw_decode(buffer)
                        row = _too_long(f"{name}:{line}")
                except RecursionError as error:
                    raise EagleError(
                        f"{path}:{line} is nested too deeply; mend it, or write one row per line (.jsonl)"
                    ) from error
                except json.JSONDecodeError as error:
                    chunk = "" if at_end else file.read(max(_CHUNK, len(buffer)))
                    at_end = not chunk
                    if at_end and not buffer:
                        return
                    if at_end:
                        bad, problem = line + error.lineno - 1, error.msg.removesuffix(" at")
                        raise EagleError(
                            f"{path}:{bad} is not valid JSON ({problem} at column {error.colno}); "
                            "mend it, or write one row per line (.jsonl)"
                        ) from error
                    buffer += chunk
                    continue
                yield row
                line += buffer.count("\n", 0, end)
                buffer = buffer[end:]
        except UnicodeDecodeError as error:
            raise EagleError(f"{path} is not UTF-8 ({error.reason} near line {line}); save it as UTF-8") from error


def _parquet_rows(path: Path, *, name: str) -> Iterator[SourceRow]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        data = load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        yield from _data_set_rows(data, name=name)
    except (DatasetGenerationError, ValueError) as error:
        raise EagleError(f"{path} is not a readable Parquet file: {error}") from error


def _data_set_rows(data: Any, *, name: str) -> Iterator[SourceRow]:
    for number, value in enumerate(data, 1):
        yield SourceRow(f"{name}:{number}", value)


def load_hub(source: Source) -> Any:
    """The hub data set of a source as `datasets` keeps it (downloaded once, memory-mapped)."""
    from datasets import load_dataset

    name, _, config = source.name.partition(":")
    try:
        return load_dataset(name, config or None, split=source.split)
    except Exception as error:  # the hub client raises many kinds; all mean that the data cannot be had
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EagleError(
            f"data set {source.name} (split {source.split}) cannot be loaded: {text}; check the id, data.split and the "
            "network, or give a local file"
        ) from error
