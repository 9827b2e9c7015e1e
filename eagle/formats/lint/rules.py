"""The rules of `eagle lint`: a registry of small functions, one per thing that can break, and what they yield.

A rule looks at a head's files (and the target's facts, where a target was given) with the eyes of one runtime and yields
what it finds. What each runtime does was read from its loader (vLLM 0.33, SGLang 0.5.23, speculators 0.9, the EAGLE
authors' code); the words in `effect` say it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from eagle.formats.lint.files import FoundHead, TargetNumbers

Runtime = Literal["vllm", "sglang", "speculators", "reference"]
Severity = Literal["breaks", "silently wrong", "warning"]
Version = Literal["eagle1", "eagle3"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
NAMES: dict[Runtime, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators",
    "reference": "the EAGLE authors' code",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a rule has to say."""

    severity: Severity
    evidence: str
    """What the files hold, with numbers."""
    effect: str
    """What the runtime does with it."""
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What a rule looks at."""

    head: FoundHead
    target: TargetNumbers | None
    runtime: Runtime

    @property
    def name(self) -> str:
        """The runtime's name."""
        return NAMES[self.runtime]

    @property
    def again(self) -> str:
        """The remedy for a folder that was written for another runtime."""
        return f"export the head for it: eagle export HEAD OUT --to {self.runtime}"


Check = Callable[[Look], Iterator[Found]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that can be wrong."""

    id: str
    about: str
    check: Check
    runtimes: Sequence[Runtime]
    versions: Sequence[Version]

    def applies(self, look: Look) -> bool:
        return look.runtime in self.runtimes and look.head.version in self.versions


RULES: dict[str, Rule] = {}
READING = {
    "config-file": "config.json is there and is JSON",
    "weight-files": "the weights are there and can be read",
    "index": "an index names the files that are there and what is in them",
}
"""Rules that reading the folder checks (eagle/formats/lint/files.py)."""


def rule(
    id: str,
    about: str,
    *,
    runtimes: Sequence[Runtime] = RUNTIMES,
    versions: Sequence[Version] = ("eagle1", "eagle3"),
) -> Callable[[Check], Check]:
    """Registers a check under its id."""

    def register(check: Check) -> Check:
        assert id not in RULES.keys() | READING.keys(), id
        RULES[id] = Rule(id=id, about=about, check=check, runtimes=runtimes, versions=versions)
        return check

    return register
