"""Spec-Bench: telling whether a question file is its own, and answer files that its tools read.

Its `question.jsonl` (480 questions) is not shipped: a user gives the path. Two of its tasks are not shipped at all, so the
file is known by its shape, and by its other 320 questions, which are.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle.eval.answers import Answer, Request
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.suites import SPEC_BENCH_TASK
from eagle.files import atomic_path, sha256_text

QUESTIONS = 480
PER_TASK = 80


def looks_like(prompts: Sequence[Prompt]) -> bool:
    """Whether they have Spec-Bench's shape: its 13 categories, 480 questions, 80 of each of its six tasks."""
    categories = {prompt.file_category for prompt in prompts}
    if len(prompts) != QUESTIONS or categories != set(SPEC_BENCH_TASK):
        return False
    return set(Counter(SPEC_BENCH_TASK[prompt.file_category] for prompt in prompts).values()) == {PER_TASK}


def foreign(prompts: Sequence[Prompt], *, own: Sequence[Prompt], stand_ins: Sequence[Prompt]) -> int:
    """How many of `prompts` are certainly not Spec-Bench's.

    own: Spec-Bench's questions that are known, by their ids; stand_ins: what stands in for those that are not.
    """
    known = {(prompt.question_id, prompt.file_category): prompt.turns for prompt in own}
    replaced = {prompt.turns for prompt in stand_ins}
    return sum(
        prompt.turns in replaced
        if prompt.file_category in ("translation", "summarization")
        else known.get((prompt.question_id, prompt.file_category)) != prompt.turns
        for prompt in prompts
    )


def write_answer_files(
    folder: Path,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: str,
) -> list[Path]:
    """Writes folder/SETTING/METHOD.jsonl, a line per question, as Spec-Bench's evaluation/eval.py does, so that its
    evaluation/speed.py reads them (--file-path METHOD.jsonl --base-path hf.jsonl). Returns the paths.
    What an earlier evaluation left of other methods in a setting's folder is removed: it may be of other questions.

    Its mean accepted tokens is the mean of accept_lengths: accepted drafts + 1 per verify step, as Spec-Bench counts them, before
    anything is cut off: this package's tau_raw, not its tau.
    Its tokens per second is the mean over questions of new tokens / seconds - here it is the ratio of the sums -, and it
    counts a baseline's tokens by tokenising the text again, less one.
    """
    answered: dict[str, dict[str, list[Request]]] = {}
    for request in sorted(requests, key=lambda request: request.turn):
        answered.setdefault(request.setting, {}).setdefault(request.prompt, []).append(request)
    written = []
    for setting, by_prompt in answered.items():
        methods = next(iter(by_prompt.values()))[0].answers
        for method in methods:
            path = folder / setting.replace(" ", "_") / f"{method}.jsonl"
            lines = [
                answer_line(
                    prompt, [turn.answers[method] for turn in by_prompt[prompt.id]], tokenizer, f"{model}-{method}"
                )
                for prompt in prompts
                if prompt.id in by_prompt
            ]
            with atomic_path(path) as temporary:
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                temporary.write_text(text, encoding="utf-8")
            written.append(path)
        for path in (folder / setting.replace(" ", "_")).glob("*.jsonl"):
            if path not in written:
                path.unlink()
    return written


def answer_line(
    prompt: Prompt, turns: Sequence[Answer], tokenizer: PreTrainedTokenizerBase, model_id: str
) -> dict[str, Any]:
    """One question's line. Lists have an entry per turn, accept_lengths one per verify step of all turns."""
    steps = [_accept_lengths(answer) for answer in turns]
    choice: Mapping[str, Any] = {
        "index": 0,
        "turns": [tokenizer.decode(answer.tokens, skip_special_tokens=True).strip() for answer in turns],
        "decoding_steps": [len(lengths) for lengths in steps],
        "new_tokens": [len(answer.tokens) for answer in turns],
        "wall_time": [answer.seconds for answer in turns],
        "accept_lengths": [length for lengths in steps for length in lengths],
    }
    number = prompt.question_id
    return {
        "question_id": int(number) if number.lstrip("-").isdigit() else number,
        "category": prompt.file_category or prompt.category,
        "answer_id": sha256_text(f"{model_id} {prompt.id}")[:22],
        "model_id": model_id,
        "choices": [choice],
        "tstamp": time.time(),
    }


def _accept_lengths(answer: Answer) -> list[int]:
    """Per verify step, the bonus token counted; of Hugging Face's loops, which tell of no steps, per commit."""
    if answer.accepted:
        return [accepted + 1 for accepted in answer.accepted]
    return [len(answer.tokens) - sum(answer.commit_tokens), *answer.commit_tokens]
