"""One method's answer to one request, and the log that makes an evaluation resumable."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eagle.errors import EagleError
from eagle.eval.line_log import LineLog, Record
from eagle.eval.meter import Use

FORMAT = 4
"""Version of the answers' log. 4: every line has its key."""


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
    """A `LineLog` of requests: `answers.jsonl`."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, process: int = 0):
        self._log = LineLog(path, identity, format=FORMAT, process=process, refuse=_check_threads)
        self.requests: dict[tuple[str, int, str], Request] = {}

    def __enter__(self) -> "AnswerLog":
        self._log.__enter__()
        self.requests = {one.key: one for one in map(_request, self._log.records.values())}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._log.__exit__(kind, error, traceback)

    def append(self, request: Request) -> None:
        """Adds a request; it is on disk when this returns."""
        self.requests[request.key] = request
        self._log.append(" ".join(map(str, request.key)), dataclasses.asdict(request))


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


def _request(record: Record) -> Request:
    answers = {name: Answer(**{**answer, "use": Use(**answer["use"])}) for name, answer in record["answers"].items()}
    return Request(**{**{name: value for name, value in record.items() if name != "key"}, "answers": answers})
