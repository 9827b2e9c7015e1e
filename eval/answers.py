"""One method's answer to one request, and the log that makes an evaluation resumable."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from eagle.errors import EagleError
from eagle.eval.line_log import Record, aside_path, lines_of, set_aside, whole_lines
from eagle.eval.meter import Use
from eagle.files import atomic_path

FORMAT = 3
"""Version of the answers' log. 3: commits with their times, what the machine was used for, suites."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What one method did with one request. Times are wall-clock seconds on this machine."""

    tokens: list[int]
    """New token ids, the EOS (when reached) included, nothing beyond it."""
    seconds: float
    """The whole call: prefill, drafting, verification, host work."""
    first_token_seconds: float
    """From the call to the first token's arrival at the streamer."""
    accepted: list[int] = dataclasses.field(default_factory=list)
    """Accepted drafts of each verify step, before EOS and length trimming; empty for Hugging Face's loop."""
    attempts_per_depth: list[int] = dataclasses.field(default_factory=list)
    """[d]: verify steps whose walk stood at depth d on a node with children."""
    accepted_per_depth: list[int] = dataclasses.field(default_factory=list)
    """[d]: those of them that went on to depth d + 1."""
    nodes: int = 0
    """Tree nodes verified over all verify steps, the roots included."""
    tree: str = ""
    """The tree, and where its sizes come from (DecodeStats.tree)."""
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    """Target forwards behind the prefill, with the LM head"""
    commit_tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens of each commit behind the first token: 1 of plain decoding, an accepted block of drafting."""
    commit_seconds: list[float] = dataclasses.field(default_factory=list)
    """From the commit before (of the first entry: from the first token) to this one."""
    use: Use = dataclasses.field(default_factory=Use)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One turn of one prompt, and every method's answer to it."""

    prompt: str
    """The prompt's id."""
    turn: int
    category: str
    setting: str
    """Label of the sampling setting (settings.py)"""
    seed: int
    """Of the row's noise; the same for every method"""
    prompt_tokens: int
    order: list[str]
    """Methods in the order they ran in."""
    answers: dict[str, Answer]
    divergences: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Method -> where its tokens first differ from plain decoding's (see exactness.py)."""
    processes: int = 1
    """Processes of the evaluation that shared this machine at the time"""
    prompt_sha256: str = ""
    """`Prompt.sha256`: an id may have had another text"""

    @property
    def key(self) -> tuple[str, int, str]:
        return self.prompt, self.turn, self.setting


class AnswerLog:
    """`answers.jsonl`: a header with the evaluation's identity, then one line per request, on disk before the next.

    A log with another identity is set aside, which is said, and what was set aside of this one is taken back; a half-written
    last line (a kill) is cut off. Of several processes the first one writes answers.jsonl, process k answers.k.jsonl; when the
    first one opens its log, it takes over what lies in the others'. The others must open theirs after it, and before anybody
    appends: all then know the same requests.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, process: int = 0):
        self.path, self.identity, self.process = path, dict(identity), process
        self.requests: dict[tuple[str, int, str], Request] = {}
        """All that is known: those of the log when it was opened, and this process's since."""
        self._file: TextIO | None = None

    @property
    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "identity": self.identity}

    def __enter__(self) -> "AnswerLog":
        own = self.path
        if self.process:
            self._take(self.path)
            own = self.path.with_suffix(f".{self.process}{self.path.suffix}")
            self._write(own, [])
        else:
            others = _others(self.path)
            for path in (own, *others):
                self._set_aside(path)
            others += _aside(self.path, self._header)
            for path in (*others, own):
                self._take(path)
            self._write(own, self.requests.values())
            for path in others:
                path.unlink(missing_ok=True)
        self._file = open(own, "a", encoding="utf-8")
        return self

    def _set_aside(self, path: Path) -> None:
        """Sets aside a log of another evaluation."""
        lines = whole_lines(path)
        if lines and lines[0] != self._header:
            _check_threads(path, lines[0], self._header)
            set_aside(path, lines[0], self._header)

    def _take(self, path: Path) -> None:
        """Reads the requests of a log of this evaluation."""
        self.requests.update({one.key: one for one in map(_request, lines_of(path, self._header))})

    def _write(self, path: Path, requests: Iterable[Request]) -> None:
        lines = [self._header, *map(dataclasses.asdict, requests)]
        with atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def append(self, request: Request) -> None:
        """Adds a request; it is on disk when this returns."""
        assert self._file is not None
        self.requests[request.key] = request
        self._file.write(json.dumps(dataclasses.asdict(request)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _others(path: Path) -> list[Path]:
    """Logs of processes behind the first one, of this start or an earlier one."""
    found = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return sorted(one for one in found if len(one.suffixes) == 2 and one.suffixes[0].removeprefix(".").isdigit())


def _aside(path: Path, header: Record) -> list[Path]:
    """What was set aside of the logs of this header, the first process's and the others'."""
    end = aside_path(path, header).name.removeprefix(path.stem)
    return sorted(path.parent.glob(f"{path.stem}*{end}"))


def _check_threads(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises EagleError when nothing but the number of threads differs: hours of answers must not go for that."""
    theirs, ours = (dict(header.get("identity", {})) for header in (found, wanted))
    machines = [dict(identity.pop("hardware", None) or {}) for identity in (theirs, ours)]
    threads = [machine.pop("torch_threads", None) for machine in machines]
    if found.get("format") == FORMAT and theirs == ours and machines[0] == machines[1] and threads[0] != threads[1]:
        raise EagleError(
            f"the answers in {path} were timed with torch_threads={threads[0]}, this process has {threads[1]}: times would not "
            f"mix; set OMP_NUM_THREADS={threads[0]} to go on (launchers of several processes set it to 1), or delete that file"
        )


def _request(line: dict[str, Any]) -> Request:
    answers = {name: Answer(**{**answer, "use": Use(**answer["use"])}) for name, answer in line["answers"].items()}
    return Request(**{**line, "answers": answers})
