"""Prompt: one evaluation question of one or several turns."""

import dataclasses
import functools
import json

from eagle.files import sha256_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One evaluation prompt: `turns` user messages, answered one after the other in one conversation."""

    id: str
    """Unique within the evaluation: SOURCE/QUESTION_ID."""
    category: str
    """What figures are grouped by: the task, or the file's own category."""
    turns: tuple[str, ...]
    reference: tuple[str, ...]
    """Reference answers where the file has them (unused by the figures, kept for the reader)."""
    source: str
    system: str | None = None
    """The conversation's system message, where it has one."""
    question_id: str = ""
    """As the file has it."""
    task: str = ""
    """What eval.limit counts by: a suite's task; of anything else the source."""
    file_category: str = ""
    """As the file has it: Spec-Bench's mt_bench task has eight."""

    @functools.cached_property
    def sha256(self) -> str:
        """Of what is asked, and what answers are grouped by: the same hash, the same question."""
        asked = (self.id, self.category, self.system, self.turns)
        return sha256_text(json.dumps(asked, ensure_ascii=False))[:16]

    @property
    def names(self) -> frozenset[str]:
        """What eval.tasks may call it."""
        return frozenset(filter(None, (self.task, self.category, self.file_category)))
