"""Throughput against batch size (eval.batches): speculative against plain decoding in one run, and where the gain vanishes.

The same prompts are answered at every batch size, by both methods alternately, group by group: a machine's slow minute hits
both. Every row's tokens must be equal (or differ first at a tie) at every batch size and between the methods; a batch size
where they are not gets no ratio.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.config import Recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval.batch_answer import BatchAnswer, answer_batch
from eagle.eval.checks.check import checked_decoder
from eagle.eval.checks.exactness import divergence
from eagle.eval.runner import first_turn, fits
from eagle.eval.settings import Setting
from eagle.eval.statistics import Estimate, falls_through_one, paired_ratio
from eagle.eval.suites.prompt_set import Prompt, spread
from eagle.eval.warm_up import warm_ups
from eagle.files import sha256_text, write_json
from eagle.progress import ProgressBar
from eagle.sample.stats import AcceptanceLength
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

FEWEST_PROMPTS = 16
"""At least so many prompts are answered at every batch size, where there are as many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """One batch size, over all groups."""

    batch: int
    plain_tokens_per_second: float
    tokens_per_second: float
    tau: float | None
    """None: every answer ended with the prefill's token"""
    tau_raw: float | None
    different: int
    """Answers (of both methods) that are not plain decoding's at the smallest batch size, nor leave it at a tie"""
    speedup: Estimate | None
    """Median over the groups of plain's time per token / the drafted one's"""


def measure(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    *,
    batches: Sequence[int],
    setting: Setting,
    max_new_tokens: int,
) -> list[BatchPoint]:
    """prompts: token ids; every batch size must divide their number. Row i has seed i, whatever its batch mates.

    What every answer must equal is plain decoding's at the smallest batch size.
    """
    batches = sorted(set(batches))
    if not prompts:
        raise EagleError("there is no prompt to answer; expected as many as the largest batch size, or a multiple")
    if max_new_tokens < 2:
        raise EagleError(
            f"eval.max_new_tokens is {max_new_tokens}, expected 2 or more: throughput is timed behind the first token"
        )
    for batch in batches:
        if batch < 1 or len(prompts) % batch:
            raise EagleError(f"batch size {batch} does not divide the {len(prompts)} prompts; choose sizes that do")
    plain = decoder.plain()
    points: list[BatchPoint] = []
    reference: dict[int, list[int]] = {}
    with ProgressBar("throughput", total=len(batches) * len(prompts), unit="prompts") as bar:
        for batch in batches:
            groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
            for number, limit in warm_ups(decoder.target, groups, few=16, max_new_tokens=max_new_tokens):
                for each in (plain, decoder):
                    _answer(each, groups[number], number * batch, setting, limit)
            pairs: list[tuple[BatchAnswer, BatchAnswer]] = []
            for number, rows in enumerate(groups):
                order = (plain, decoder) if number % 2 == 0 else (decoder, plain)
                said = {each: _answer(each, rows, number * batch, setting, max_new_tokens) for each in order}
                pairs.append((said[plain], said[decoder]))
                bar.advance(batch)
            different = 0
            for row in range(len(prompts)):
                for group in pairs[row // batch]:
                    tokens = group.tokens[row % batch]
                    expected = reference.setdefault(row, tokens)
                    different += not _same(decoder.target, prompts[row], tokens, expected, setting, row)
            points.append(_point(batch, pairs, different))
    return points


def _answer(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], first: int, setting: Setting, max_new_tokens: int
) -> BatchAnswer:
    seeds = range(first, first + len(prompts))
    return answer_batch(decoder, prompts, seeds=seeds, setting=setting, max_new_tokens=max_new_tokens)


def _same(
    target: Target, prompt: list[int], tokens: list[int], expected: list[int], setting: Setting, seed: int
) -> bool:
    found = divergence(
        target,
        prompt_ids=prompt,
        tokens=tokens,
        reference=expected,
        versus="plain",
        sampling=setting.seeded(seed),
    )
    return found is None or bool(found["tie"])


def _point(batch: int, pairs: Sequence[tuple[BatchAnswer, BatchAnswer]], different: int) -> BatchPoint:
    def per_second(groups: Sequence[BatchAnswer]) -> float:
        return sum(group.new_tokens for group in groups) / sum(group.seconds for group in groups)

    plain, drafted = [one for one, _ in pairs], [two for _, two in pairs]
    ratio = paired_ratio(
        [group.seconds / max(1, group.new_tokens) for group in plain],
        [group.seconds / max(1, group.new_tokens) for group in drafted],
        tokens=[max(1, group.new_tokens) for group in drafted],
        unit="group",
    )
    return BatchPoint(
        batch=batch,
        plain_tokens_per_second=per_second(plain),
        tokens_per_second=per_second(drafted),
        **AcceptanceLength.of(answer for group in drafted for answer in group.answers).as_dict(),
        different=different,
        speedup=None if different else ratio,
    )


def crossing(points: Sequence[BatchPoint]) -> float | None:
    """The batch size at which the pooled speed-up falls through 1 for good; None: it does not, or a size is not exact."""
    return falls_through_one([(p.batch, None if p.speedup is None else p.speedup.pooled) for p in points])


def curve(points: Sequence[BatchPoint], *, setting: str, max_new_tokens: int, prompts: int) -> dict[str, Any]:
    """The points with what they say, as results.json has it."""
    return {
        "setting": setting,
        "max_new_tokens": max_new_tokens,
        "prompts": prompts,
        "points": [dataclasses.asdict(point) for point in points],
        "crossing": crossing(points),
        "verdict": _verdict(points),
    }


def _verdict(points: Sequence[BatchPoint]) -> str:
    known = [(point.batch, point.speedup.pooled) for point in points if point.speedup is not None]
    if len(known) < len(points):
        return "not every batch size is exact: see the table"
    gains = [str(batch) for batch, pooled in known if pooled >= 1]
    if not gains:
        return "there is no gain at any of these batch sizes"
    vanishes = crossing(points)
    return f"there is a gain at batch {', '.join(gains)}" + (f"; it vanishes at {vanishes:.1f}" if vanishes else "")


class Curves:
    """What eval.batches asks for: nothing when it is [1].

    Raises EagleError for batch sizes below 1, for more rows than there are prompts, and for a verification rule that does not
    promise plain decoding's tokens: without that, nothing tells whether a batch is right.
    """

    def __init__(self, recipe: Recipe, target: Target, head: str | Path, prompts: Sequence[Prompt]):
        self.recipe, self.batches = recipe, sorted(set(recipe.eval.batches))
        self.ids: list[list[int]] = []
        if not self.batches or self.batches[0] < 1:
            raise EagleError(
                f"eval.batches is {list(recipe.eval.batches)}; expected sizes from 1 on, such as [1, 2, 4]"
            )
        if self.batches == [1]:
            return
        self.decoder = checked_decoder(recipe, target, head if recipe.decode.drafter.reads_head else None)
        rendered = {prompt.id: prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in prompts}
        fitting = [prompt for prompt in prompts if fits(target, rendered[prompt.id], recipe.eval.max_new_tokens)]
        every = math.lcm(*self.batches)
        if len(fitting) < every:
            raise EagleError(
                f"eval.batches {self.batches} need a multiple of {every} prompts, there are {len(fitting)} (that fit); raise "
                "eval.limit, or leave the larger sizes out"
            )
        wanted = every * math.ceil(FEWEST_PROMPTS / every)
        count = wanted if len(fitting) >= wanted else len(fitting) // every * every
        self.ids = [rendered[prompt.id] for prompt in spread(fitting, count)]

    def measure(self, settings: Sequence[Setting], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One entry of results.json's `throughput` per setting; throughput.json keeps what is done, of this identity."""
        if not self.ids:
            return []
        path = self.recipe.eval_dir / "throughput.json"
        key = {**identity, "batches": self.batches, "prompts_sha256": sha256_text(json.dumps(self.ids))}
        done: dict[str, Any] = _read(path, key)
        for setting in settings:
            if setting.label not in done:
                limit = self.recipe.eval.max_new_tokens
                points = measure(self.decoder, self.ids, batches=self.batches, setting=setting, max_new_tokens=limit)
                done[setting.label] = {
                    **curve(points, setting=setting.label, max_new_tokens=limit, prompts=len(self.ids)),
                    "drafter": self.recipe.decode.drafter.name,
                }
                write_json(path, {"identity": key, "curves": done})
        return [done[setting.label] for setting in settings]


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return found["curves"] if isinstance(found, dict) and found.get("identity") == identity else {}
