"""The evaluation prompts: suites, shipped files, question files, hub data sets and any conversation file.

A question file has rows {"question_id", "category", "turns": [...], "reference"?}; of every other shape that training
conversations may have, the user turns are the prompt.
"""

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle.config import EvalConfig
from eagle.data.conversations import Conversation, read_conversation
from eagle.data.sources import Rejected, SourceRow, read_rows, resolve
from eagle.errors import EagleError
from eagle.eval.suites.prompt import Prompt as Prompt
from eagle.eval.suites.spec_bench import foreign, looks_like
from eagle.eval.suites.suites import NOTES, PREFIX, SPEC_BENCH_TASK, SUITES, Part, Suite, suite_of
from eagle.files import sha256_text

Item = TypeVar("Item")
FOLDER = Path(__file__).resolve().parents[1] / "prompts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSet:
    """What one entry of eval.prompts gave, and how a report may call it."""

    source: str
    """The entry"""
    title: str
    prompts: tuple[Prompt, ...]
    """After eval.tasks and eval.limit"""
    available: Mapping[str, int]
    """Prompts by task that the source holds"""
    is_spec_bench: bool = False
    """True only of Spec-Bench's own questions"""
    wording: str | None = None
    note: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "source": self.source,
            "title": self.title,
            "is_spec_bench": self.is_spec_bench,
            "tasks": dict(Counter(prompt.task for prompt in self.prompts)),
            "available": dict(self.available),
            "wording": self.wording,
            "note": self.note,
        }


def shipped_prompts() -> list[str]:
    """Names that `shipped:NAME` accepts."""
    return sorted(path.name.removesuffix(".jsonl.gz") for path in FOLDER.glob("*.jsonl.gz"))


def recipe_sets(config: EvalConfig) -> list[PromptSet]:
    """The prompts of a recipe's eval section, entry by entry."""
    return load_sets(config.prompts, config.limit, tasks=config.tasks, split=config.split)


def recipe_prompts(config: EvalConfig) -> list[Prompt]:
    """The prompts of a recipe's eval section."""
    return prompts_in(recipe_sets(config))


def prompts_in(sets: Sequence[PromptSet]) -> list[Prompt]:
    """All prompts of the sets, in order."""
    return [prompt for one in sets for prompt in one.prompts]


def load_prompts(
    sources: Sequence[str], limit: int | None = None, *, tasks: Sequence[str] | None = None, split: str = "train"
) -> list[Prompt]:
    """The prompts of `load_sets`."""
    return prompts_in(load_sets(sources, limit, tasks=tasks, split=split))


def load_sets(
    sources: Sequence[str], limit: int | None = None, *, tasks: Sequence[str] | None = None, split: str = "train"
) -> list[PromptSet]:
    """Reads prompts. limit: at most that many of each task, spread evenly over its categories; tasks: only of these tasks or
    categories; split: of hub data sets.

    Raises EagleError for a missing or empty source, a broken row (with file and line), an unknown suite or task, and for no
    source at all.
    """
    if not sources:
        raise EagleError(
            f"eval.prompts is empty; name a suite ({', '.join(PREFIX + name for name in SUITES)}), a prompt file or "
            f"shipped:NAME ({', '.join(shipped_prompts())})"
        )
    if limit is not None and limit < 1:
        raise EagleError(f"eval.limit is {limit}, expected at least 1 prompt per task (or leave it out for all)")
    sets = [_read_set(source, split) for source in sources]
    if tasks is not None:
        _check_tasks(tasks, prompts_in(sets))
    chosen = [_choose(one, tasks, limit) for one in sets]
    seen: set[str] = set()
    for prompt in prompts_in(chosen):
        if prompt.id in seen:
            raise EagleError(
                f"prompt id {prompt.id} occurs twice in eval.prompts; give each question_id (and source) once"
            )
        seen.add(prompt.id)
    return [one for one in chosen if one.prompts]


def spread(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """`limit` prompts (or all), evenly over the categories and evenly within each, always the same ones, in file order.

    Raises EagleError for a limit below 1.
    """
    if limit < 1:
        raise EagleError(f"{limit} prompts are asked for, expected 1 or more")
    groups: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.file_category or prompt.category, []).append(i)
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


def _check_tasks(tasks: Sequence[str], prompts: Sequence[Prompt]) -> None:
    known = sorted({name for prompt in prompts for name in prompt.names})
    for task in tasks:
        if task not in known:
            near = difflib.get_close_matches(task, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise EagleError(f"eval.tasks holds {task}, which no prompt is of; {hint}known: {', '.join(known)}")
    if not tasks:
        raise EagleError(f"eval.tasks is empty; leave it out for all, or name some of {', '.join(known)}")


def _choose(one: PromptSet, tasks: Sequence[str] | None, limit: int | None) -> PromptSet:
    by_task: dict[str, list[Prompt]] = {}
    for prompt in one.prompts:
        if tasks is None or prompt.names & set(tasks):
            by_task.setdefault(prompt.task, []).append(prompt)
    if limit is not None:
        by_task = {task: spread(members, limit) for task, members in by_task.items()}
    kept = {prompt.id for members in by_task.values() for prompt in members}
    prompts = tuple(prompt for prompt in one.prompts if prompt.id in kept)
    title = one.title
    if one.is_spec_bench and len(prompts) < len(one.prompts):
        title = f"Spec-Bench, {len(prompts)} of its {len(one.prompts)} questions"
    return dataclasses.replace(one, prompts=prompts, title=title)


def _read_set(source: str, split: str) -> PromptSet:
    suite = suite_of(source)
    if suite is not None:
        prompts = tuple(prompt for part in suite.parts for prompt in _read_part(suite, part))
        title, note = suite.title, suite.note
        return _set(source, title, prompts, wording=suite.wording, note=note)
    prompts = tuple(_read_source(source, split))
    title = Path(source).name if Path(source).expanduser().exists() else source
    if looks_like(prompts):
        wrong = foreign(prompts, own=_shipped("spec_bench_open"), stand_ins=_stand_ins())
        if not wrong:
            folded = tuple(_of_task(prompt, SPEC_BENCH_TASK[prompt.file_category]) for prompt in prompts)
            return _set(source, "Spec-Bench", folded, is_spec_bench=True, wording="Spec-Bench's own (Xia et al. 2024)")
        note = f"This is not Spec-Bench, though it has its categories: {wrong} of its questions are not Spec-Bench's."
        return _set(source, title, prompts, note=note)
    return _set(source, title, prompts, note=NOTES.get(source.removeprefix("shipped:")))


def _set(source: str, title: str, prompts: tuple[Prompt, ...], **more: Any) -> PromptSet:
    available = dict(Counter(prompt.task for prompt in prompts))
    return PromptSet(source=source, title=title, prompts=prompts, available=available, **more)


def _of_task(prompt: Prompt, task: str) -> Prompt:
    return dataclasses.replace(prompt, task=task, category=task)


def _shipped(file: str) -> list[Prompt]:
    return list(_read_source(f"shipped:{file}", "train"))


def _stand_ins() -> list[Prompt]:
    return [*_shipped("translation_tatoeba"), *_shipped("summarization_wiki")]


def _read_part(suite: Suite, part: Part) -> Iterator[Prompt]:
    prompts = [prompt for prompt in _shipped(part.file) if part.only in (None, prompt.file_category)]
    for prompt in prompts if part.count is None else spread(prompts, part.count):
        question = str(int(prompt.question_id) + part.first_id)
        task = part.task or SPEC_BENCH_TASK[prompt.file_category]
        # Spec-Bench's tools find a question's task by its category: what stands in for one is called as it.
        category = part.task if suite.by_task and part.task else prompt.file_category
        yield dataclasses.replace(
            prompt,
            id=f"{suite.name}/{question}",
            question_id=question,
            task=task,
            category=task if suite.by_task else prompt.category,
            file_category=category,
            turns=(part.before + prompt.turns[0].replace(*part.replace, 1), *prompt.turns[1:]),
            source=suite.name,
        )


def _read_source(name: str, split: str) -> Iterator[Prompt]:
    short = name.removeprefix("shipped:").rsplit("/", 1)[-1].split(".")[0]
    for source in resolve(name, split=split):
        for row in read_rows(source):
            conversation = row if isinstance(row, Rejected) else read_conversation(_as_question(row))
            if isinstance(conversation, Rejected):
                raise EagleError(f"{conversation}; mend or remove that row of eval.prompts")
            assert isinstance(row, SourceRow)
            yield _prompt(conversation, row.value, short)


def _as_question(row: SourceRow) -> SourceRow:
    """Rows of the hub's evaluation sets in a shape that conversations have: a list of turns as prompt, a bare question."""
    value = row.value
    if not isinstance(value, Mapping) or value.get("turns") is not None:
        return row
    prompt = value.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(turn, str) for turn in prompt):
        return SourceRow(row.origin, {**value, "turns": prompt})
    shapes = ("messages", "conversations", "conversation", "instruction", "prompt")
    if isinstance(value.get("question"), str) and all(value.get(key) is None for key in shapes):
        return SourceRow(row.origin, {**value, "turns": [value["question"]]})
    return row


def _prompt(conversation: Conversation, row: Mapping[str, Any], source: str) -> Prompt:
    reference = row.get("reference") or []
    system = [message["content"] for message in conversation.messages if message["role"] == "system"]
    if not conversation.user_turns:
        raise EagleError(f"{conversation.origin}: no user turn to answer; mend or remove that row of eval.prompts")
    category = str(row.get("category") or source)
    return Prompt(
        id=f"{source}/{conversation.id}",
        category=category,
        turns=conversation.user_turns,
        reference=tuple(map(str, reference)) if isinstance(reference, list) else (str(reference),),
        source=source,
        system=system[0] if system else None,
        question_id=conversation.id,
        task=source,
        file_category=category,
    )
