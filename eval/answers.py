"""One method's answer to one request, and the log that makes an evaluation resumable."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from eagle.eval.meter import Use
from eagle.files import atomic_path

FORMAT = 3
"""Version of results.json and of the answers' log. 3: commits with their times, what the machine was used for, suites."""


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

    @property
    def key(self) -> tuple[str, int, str]:
        return self.prompt, self.turn, self.setting


class AnswerLog:
    """`answers.jsonl`: a header with the evaluation's identity, then one line per request, on disk before the next.

    A log with another identity is started afresh; a half-written last line (a kill) is cut off.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path, self.identity = path, dict(identity)
        self.requests: dict[tuple[str, int, str], Request] = {}
        self.restarted = False
        """True when answers of another evaluation lay here and were dropped."""
        self._file: TextIO | None = None

    def __enter__(self) -> "AnswerLog":
        header, lines = _read_whole_lines(self.path)
        matches = header == {"format": FORMAT, "identity": self.identity}
        self.restarted = header is not None and not matches
        if matches:
            for line in lines:
                request = _request(line)
                self.requests[request.key] = request
        kept = [{"format": FORMAT, "identity": self.identity}, *(lines if matches else [])]
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = open(self.path, "a", encoding="utf-8")
        return self

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


def _request(line: dict[str, Any]) -> Request:
    answers = {name: Answer(**{**answer, "use": Use(**answer["use"])}) for name, answer in line["answers"].items()}
    return Request(**{**line, "answers": answers})


def _read_whole_lines(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Header and lines of a log; a last line without its end is dropped. No file: (None, [])."""
    if not path.is_file():
        return None, []
    parsed: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return (parsed[0], parsed[1:]) if parsed else ({}, [])
