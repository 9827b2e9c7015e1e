"""An experiment beside the evaluation: variants take turns at the first turn of every prompt, and a killed one continues.

An experiment (checks/exact.py, checks/distribution.py, quality/quality.py, quality/decoding.py) is its variants, what one answer
notes, and its summary; what they share is here: which prompts fit, the identity, the resumable log, warm-up, rotation, progress,
and the facts that go with every result.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle.config import Recipe
from eagle.environment import git_commit, hardware, versions
from eagle.errors import EagleError
from eagle.eval.identity import evaluation_identity, text_identity
from eagle.eval.line_log import LineLog, Record
from eagle.eval.methods import rotated
from eagle.eval.report.summary import write_text
from eagle.eval.runner import first_turn, fits
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.prompt_set import recipe_prompts
from eagle.eval.warm_up import warm_ups
from eagle.files import write_json
from eagle.progress import ProgressBar, console
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is done once, and kept."""

    key: str
    about: Mapping[str, Any]
    """What its record says of it beside what it found"""
    run: Callable[[ProgressBar], Mapping[str, Any]]
    """It moves the bar on by what it did."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """name: of its files in the evaluation's folder, NAME.json and NAME.jsonl."""

    name: str
    recipe: Recipe
    target: Target
    prompts: Sequence[Prompt]
    """Those whose first turn and answer fit into the target's positions"""
    skipped: Sequence[str]
    """Ids of the others"""
    ids: Mapping[str, list[int]]
    """Prompt id -> token ids of its first turn"""
    _all: Sequence[Prompt]
    _weights: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, recipe: Recipe, *, max_new_tokens: int) -> "Experiment":
        """Loads target and prompts. Raises EagleError where no prompt fits."""
        prompts = recipe_prompts(recipe.eval)
        target = Target.from_config(recipe.target, recipe.data.chat_template)
        weights = text_identity(target)
        ids = {prompt.id: prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in prompts}
        fitting = [prompt for prompt in prompts if fits(target, ids[prompt.id], max_new_tokens)]
        if not fitting:
            raise EagleError(
                "every prompt is longer than the target's context; see eval.prompts and eval.max_new_tokens"
            )
        skipped = [prompt.id for prompt in prompts if prompt not in fitting]
        return cls(
            **dict(name=name, recipe=recipe, target=target, prompts=fitting, skipped=skipped, ids=ids),  # type: ignore[arg-type]
            _all=prompts,
            _weights=weights,
        )

    def identity(self, head: str | Path | None, what: Any) -> dict[str, Any]:
        """What must be the same for what was answered earlier to stand; what: the experiment's own settings."""
        return {self.name: what, **evaluation_identity(self.recipe, head, self._all), "weights": dict(self._weights)}

    def in_turns(self, variants: Iterable[str]) -> Iterator[tuple[Prompt, str]]:
        """Every prompt with every variant; each variant comes first equally often."""
        for number, prompt in enumerate(self.prompts):
            for name in rotated(dict.fromkeys(variants), number):
                yield prompt, name

    def warm_up(self, variants: Iterable[str], answer: Callable[[Prompt, str, int], Any]) -> Callable[[], None]:
        """To be given to `run`. answer(prompt, variant, new tokens)."""

        def before() -> None:
            limit = self.recipe.eval.max_new_tokens
            first = warm_ups(
                self.target, [[self.ids[prompt.id]] for prompt in self.prompts], few=8, max_new_tokens=limit
            )
            for (number, tokens), name in itertools.product(first, list(variants)):
                answer(self.prompts[number], name, tokens)

        return before

    def run(
        self,
        jobs: Sequence[Job],
        identity: Mapping[str, Any],
        *,
        unit: str = "answers",
        units: int = 1,
        before: Callable[[], None] = lambda: None,
    ) -> list[Record]:
        """The records of all jobs, those that an earlier run of this identity did among them; units: of a job, for the bar.

        before: what is done first where anything is left to do.
        """
        with LineLog(self.recipe.eval_dir / f"{self.name}.jsonl", identity) as log:
            left = [job for job in jobs if job.key not in log.records]
            done = units * (len(jobs) - len(left))
            with ProgressBar(self.name, total=units * len(jobs), unit=unit, done=done) as bar:
                if left:
                    before()
                for job in left:
                    log.append(job.key, {**job.about, **job.run(bar)})
            return [log.records[job.key] for job in jobs]

    def keep(
        self,
        result: Mapping[str, Any],
        *,
        show: Callable[[dict[str, Any]], None],
        page: Callable[[dict[str, Any]], str] | None = None,
        more: str = "",
    ) -> dict[str, Any]:
        """Adds on what it was measured, writes NAME.json (and NAME.md: `page`), shows it and tells where it lies."""
        whole = {**result, "hardware": hardware(), "versions": versions(), "commit": git_commit()}
        path = self.recipe.eval_dir / f"{self.name}.json"
        write_json(path, whole)
        if page is not None:
            write_text(path.with_suffix(".md"), page(whole))
        show(whole)
        console.print(f"eval: {path} holds this{more}", markup=False, soft_wrap=True)
        return whole
