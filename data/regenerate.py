"""`eagle data regenerate`: the target answers prompts itself, so that the head trains on what the target would say.

Writes JSON lines {"id", "source", "temperature", "finished", "conversations": [{"role", "content"}, ...]} in the order
in which answers end, and OUTPUT.settings.json beside them. Further answers to a prompt have the ids ID~1, ID~2 ... An
answer depends on the settings and its id only, so an interrupted run goes on where it stopped: ids already in the file
are passed over, a torn last line is cut off. Where the chat template's generation prompt opens the answer itself
("<think>"), the content begins with that, so that it is the whole answer.
"""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle.config import Recipe
from eagle.data.chat_template import RenderError, frame_of
from eagle.data.continuous import Answering, ContinuousDecoder, Queued
from eagle.data.conversations import Conversation, Message, read_conversations
from eagle.data.own_settings import followed
from eagle.data.sources import SUFFIXES, Rejected
from eagle.data.store import read_json, require_same
from eagle.errors import EagleError
from eagle.files import write_json
from eagle.progress import ProgressBar, console
from eagle.target.engine import why_not_packed
from eagle.target.loading import tokenizer_identity
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

WRITE_EVERY = 16
"""Answers per write and fsync: what a kill can lose, besides the answers under way."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A conversation's beginning, up to its first user turn, and where it is from."""

    prompt: Queued
    source: str
    messages: tuple[Message, ...]


def regenerate(recipe: Recipe) -> dict[str, Any]:
    """Answers the prompts of `data.regenerate` and returns {"rows", "written", "tokens", "seconds"} of this run.

    Raises EagleError for missing prompts, an output file made with other settings, answers that would not fit into the
    target's positions, and a full disk (what is written stays).
    """
    settings = recipe.data.regenerate
    if not settings.prompts:
        raise EagleError("data.regenerate.prompts is empty; name the files whose first user turns are to be answered")
    if not settings.temperatures or min(settings.temperatures) < 0:
        raise EagleError(f"data.regenerate.temperatures is {settings.temperatures}; expected one or more numbers >= 0")
    if min(settings.batch_size, settings.max_new_tokens, settings.samples_per_prompt) < 1:
        raise EagleError("data.regenerate.batch_size, max_new_tokens and samples_per_prompt must be at least 1")
    if _answers_twice_greedily(settings.temperatures, settings.samples_per_prompt):
        raise EagleError(
            f"data.regenerate.samples_per_prompt is {settings.samples_per_prompt} with temperatures "
            f"{list(settings.temperatures)}: a prompt would get the same greedy answer twice; name that many different "
            "temperatures, or none of 0"
        )
    output = regenerated(recipe)
    target = Target.from_config(recipe.target, recipe.data.chat_template)
    assert target.tokenizer is not None
    limit = settings.max_prompt_tokens + settings.max_new_tokens
    if target.max_positions is not None and limit > target.max_positions:
        raise EagleError(
            f"data.regenerate.max_prompt_tokens + max_new_tokens is {limit}, the target {target.name} has "
            f"{target.max_positions} positions; lower one of them"
        )
    opened = _opened(target.tokenizer)
    target = _claim(output, recipe, target, opened=opened)
    questions = list(_questions(recipe, target.tokenizer, vocab_size=target.vocab_size))
    with AnswerFile(output) as file:
        waiting = [question for question in questions if question.prompt.key not in file.done]
        if not waiting:
            _say(f"regenerate: {output} has all {len(questions):,} answers")
            return {"rows": len(questions), "written": 0, "tokens": 0, "seconds": 0.0}
        decoder = ContinuousDecoder(
            target,
            [question.prompt for question in waiting],
            batch_size=settings.batch_size,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            prefill_tokens=recipe.features.batch_tokens,
        )
        of_key = {question.prompt.key: question for question in waiting}
        start, total = time.monotonic(), len(questions)
        with ProgressBar("regenerate", total=total, done=total - len(waiting), unit="rows") as bar:
            while decoder.busy:
                ended = decoder.step()
                for row in ended:
                    file.add(_line(of_key[row.prompt.key], row, target.tokenizer, opened=opened))
                rate = decoder.generated / (time.monotonic() - start)
                bar.advance(len(ended), note=f"{decoder.live} decoding, {rate:,.0f} tokens/s")
    seconds = time.monotonic() - start
    _say(
        f"regenerate: {output} has {total:,} answers, {len(waiting):,} of them new: {decoder.generated:,} tokens, "
        f"{decoder.generated / seconds:,.0f} tokens/s"
    )
    return {"rows": total, "written": len(waiting), "tokens": decoder.generated, "seconds": seconds}


def regenerated(recipe: Recipe) -> Path:
    """The file that holds, or will hold, the answers."""
    return Path(recipe.data.regenerate.output or Path(recipe.output_dir) / "regenerated.jsonl")


class AnswerFile:
    """The JSON lines on disk, appended to in small groups. `done`: keys of the rows already there."""

    def __init__(self, path: Path):
        self.path = path
        self.done: set[str] = set()
        self._lines: list[bytes] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break  # torn: the process was killed while writing it
                    self.done.add(self._key(line, number))
                    whole += len(line)
            if whole < path.stat().st_size:
                os.truncate(path, whole)

    def _key(self, line: bytes, number: int) -> str:
        try:
            return str(json.loads(line)["id"])
        except (ValueError, KeyError, TypeError) as error:
            raise EagleError(
                f"{self.path}:{number} is not an answer written here ({error}); name another data.regenerate.output"
            ) from error

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.flush()  # after an error or an interrupt, too: answers that ended are kept

    def add(self, line: dict[str, Any]) -> None:
        self._lines.append(json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n")
        if len(self._lines) >= WRITE_EVERY:
            self.flush()

    def flush(self) -> None:
        """Appends what is held, down to the disk; what cannot be written whole is not written at all."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab") as file:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, size)
            raise EagleError(
                f"cannot write to {self.path} ({error.strerror}); {len(self.done):,} answers are saved. Mend that and "
                "run the same command again, it goes on from there"
            ) from error
        self.done.update(json.loads(line)["id"] for line in lines)


def _opened(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template's generation prompt begins an answer with; "" where that cannot be told."""
    try:
        return frame_of(tokenizer).opened
    except RenderError:
        return ""  # of a template that rejects the plainest conversation; what else it takes shows as it comes


def _line(question: Question, row: Answering, tokenizer: PreTrainedTokenizerBase, *, opened: str) -> dict[str, Any]:
    ids = row.tokens[:-1] if row.finished else row.tokens
    # An answer cut inside a character ends in half of it, which decodes to U+FFFD.
    text = tokenizer.decode(ids, skip_special_tokens=True).rstrip("�")
    if text.strip():
        text = opened + text
    return {
        "id": question.prompt.key,
        "source": question.source,
        "temperature": question.prompt.temperature,
        "finished": row.finished,
        "conversations": [*question.messages, {"role": "assistant", "content": text}],
    }


def _questions(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int) -> Iterator[Question]:
    """The prompts, rendered with the generation prompt; prints how many were passed over and why."""
    settings = recipe.data.regenerate
    passed: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    accepted = 0
    for row in read_conversations(settings.prompts, split=recipe.data.split):
        if settings.limit is not None and accepted >= settings.limit:
            break
        if isinstance(row, Rejected):
            passed[row.reason] += 1
            continue
        messages = _up_to_first_user(row)
        try:
            ids = prompt_ids(tokenizer, messages)
        except EagleError:
            if not tokenizer.chat_template:
                raise
            passed["the chat template rejects it"] += 1
            continue
        if len(ids) > settings.max_prompt_tokens:
            passed[f"more than {settings.max_prompt_tokens} prompt tokens"] += 1
            continue
        if max(ids) >= vocab_size:
            passed["with a token beyond the target's vocabulary"] += 1
            continue
        source = _stem(row.source)
        key = row.id if row.id not in keys else f"{source}/{row.id}"  # ids need only be unique within their source
        keys[key] += 1
        if keys[key] > 1:
            passed["whose id is taken"] += 1
            continue
        for sample in range(settings.samples_per_prompt):
            temperature = settings.temperatures[(accepted + sample) % len(settings.temperatures)]
            name = key if sample == 0 else f"{key}~{sample}"
            yield Question(
                prompt=Queued(key=name, input_ids_T=np.array(ids, dtype=np.int32), temperature=temperature),
                source=source,
                messages=tuple(messages),
            )
        accepted += 1
    if not accepted:
        raise EagleError(f"no prompt of {', '.join(settings.prompts)} can be answered: {_counted(passed)}")
    if passed:
        _say(f"regenerate: {accepted:,} prompts; passed over: {_counted(passed)}")


def _answers_twice_greedily(temperatures: Sequence[float], samples: int) -> bool:
    """Whether some row's answers include two at temperature 0."""
    count = len(temperatures)
    return any(sum(temperatures[(row + n) % count] == 0 for n in range(samples)) > 1 for row in range(count))


def _up_to_first_user(conversation: Conversation) -> Sequence[Message]:
    roles = [message["role"] for message in conversation.messages]
    return conversation.messages[: roles.index("user") + 1]


def _stem(source: str) -> str:
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        source = source.removesuffix(suffix)
    return source


def _claim(output: Path, recipe: Recipe, target: Target, *, opened: str) -> Target:
    """Writes OUTPUT.settings.json, or refuses an output that was begun with other settings. -> the target on its engine: the
    fastest, or the one that the output was begun with."""
    settings = recipe.data.regenerate
    assert target.tokenizer is not None
    identity = {
        "target": target.identity(),
        "tokenizer": tokenizer_identity(target.tokenizer),
        "temperatures": list(settings.temperatures),
        "max_prompt_tokens": settings.max_prompt_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "answers_begin_with": opened,
        "generation_config": [list(setting) for setting in followed(target).items()],
    }
    path = output.with_name(output.name + ".settings.json")
    remedy = "name another data.regenerate.output, or delete both files"
    if path.is_file():
        begun = read_json(path)
        require_same(begun, identity, what=f"the answer file {output}", remedy=remedy)
        if begun["runs"]["engine"] == "compiled" and (reason := why_not_packed(target.model)) is not None:
            raise EagleError(
                f"the answer file {output} was begun with engine compiled, which is not possible here ({reason}); go on where it "
                f"was begun, or {remedy}"
            )
        return target.as_before(begun["runs"])
    if output.exists() and output.stat().st_size > 0:
        raise EagleError(f"{output} exists without {path.name}, so its settings are unknown; {remedy}")
    packages = ("eagle-draft-toolkit", "torch", "transformers", "tokenizers")
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    if target.device.type == "cpu":  # on GPUs a graph pays for a few rows, not for a batch that changes
        target = target.on_engine("auto")
    write_json(path, {**identity, "prompts": list(settings.prompts), "versions": versions, "runs": target.engine_facts})
    return target


def _counted(passed: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in passed.most_common()) or "there is none"


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)
