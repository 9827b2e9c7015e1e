"""The evaluation prompts: shipped files, question files and any conversation file.

A question file has rows {"question_id", "category", "turns": [...], "reference"?}; of every other shape that training
conversations may have, the user turns are the prompt.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle.data.conversations import Conversation, read_conversation
from eagle.data.sources import Rejected, Row, read_rows, resolve
from eagle.errors import EagleError
from eagle.files import sha256_text

Item = TypeVar("Item")
FOLDER = Path(__file__).resolve().parent / "prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One evaluation prompt: `turns` user messages, answered one after the other in one conversation."""

    id: str
    """Unique within the evaluation: SOURCE/QUESTION_ID."""
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...]
    """Reference answers where the file has them (unused by the figures, kept for the reader)."""
    source: str
    system: str | None = None
    """The conversation's system message, where it has one."""


def shipped_prompts() -> list[str]:
    """Names that `shipped:NAME` accepts."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


def load_prompts(sources: Sequence[str], limit: int | None = None) -> list[Prompt]:
    """Reads prompts; `limit` keeps that many of each source, spread evenly over its categories.

    Raises EagleError for a missing or empty source, a broken row (with file and line) and for no source at all.
    """
    if not sources:
        raise EagleError(
            "eval.prompts is empty; name a prompt file or shipped:NAME (" + ", ".join(shipped_prompts()) + ")"
        )
    if limit is not None and limit < 1:
        raise EagleError(f"eval.limit is {limit}, expected at least 1 prompt per source (or leave it out for all)")
    prompts: list[Prompt] = []
    for source in sources:
        rows = list(_read_source(source))
        prompts += rows if limit is None else spread(rows, limit)
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise EagleError(
                f"prompt id {prompt.id} occurs twice in eval.prompts; give each question_id (and source) once"
            )
        seen.add(prompt.id)
    return prompts


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts, evenly over the categories and evenly within each, always the same ones, in file order."""
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(i)
    categories = list(groups.values())
    if limit < len(categories):
        categories = _evenly(categories, limit)
    quotas = [0] * len(categories)
    left = min(limit, len(prompts))
    while left:
        for k, members in enumerate(categories):
            if left and quotas[k] < len(members):
                quotas[k] += 1
                left -= 1
    chosen = [i for members, quota in zip(categories, quotas, strict=True) for i in _evenly(members, quota)]
    return [prompts[i] for i in sorted(chosen)]


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """What identifies a set of prompts: the hash of their texts, ids and order."""
    return sha256_text(
        json.dumps([dataclasses.asdict(prompt) for prompt in prompts], ensure_ascii=False, sort_keys=True)
    )


def _evenly(items: Sequence[Item], count: int) -> list[Item]:
    return [items[k * len(items) // count] for k in range(count)]


def _read_source(name: str) -> Iterator[Prompt]:
    short = name.removeprefix("shipped:").rsplit("/", 1)[-1].split(".")[0]
    for source in resolve(name):
        for row in read_rows(source):
            conversation = row if isinstance(row, Rejected) else read_conversation(row)
            if isinstance(conversation, Rejected):
                raise EagleError(f"{conversation}; mend or remove that row of eval.prompts")
            assert isinstance(row, Row)
            yield _prompt(conversation, row.value, short)


def _prompt(conversation: Conversation, row: Mapping[str, Any], source: str) -> Prompt:
    reference = row.get("reference") or []
    system = [message["content"] for message in conversation.messages if message["role"] == "system"]
    if not conversation.user_turns:
        raise EagleError(f"{conversation.origin}: no user turn to answer; mend or remove that row of eval.prompts")
    return Prompt(
        id=f"{source}/{conversation.id}",
        category=str(row.get("category") or source),
        turns=conversation.user_turns,
        reference=tuple(map(str, reference)) if isinstance(reference, list) else (str(reference),),
        source=source,
        system=system[0] if system else None,
    )
