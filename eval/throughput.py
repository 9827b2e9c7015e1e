"""Throughput against batch size: speculative against plain decoding in one run, and where the gain vanishes.

    python -m eagle.eval.throughput --config RECIPE [--head PATH] --batches 1 2 4 8 16

The same prompts are answered at every batch size, by both methods alternately, group by group: a machine's slow minute hits
both. Every row's tokens must be equal (or differ first at a tie) at every batch size and between the methods; a batch size
where they are not gets no ratio.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from eagle.config import read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.environment import git_commit, hardware
from eagle.errors import EagleError
from eagle.eval.batch_answer import BatchAnswer, answer_batch
from eagle.eval.checks.check import checked_decoder
from eagle.eval.checks.exactness import divergence
from eagle.eval.report.parts import number
from eagle.eval.runner import first_turn
from eagle.eval.settings import Setting, parse_setting
from eagle.eval.statistics import FEWEST, Estimate, falls_through_one, paired_ratio
from eagle.eval.suites.prompt_set import recipe_prompts, spread
from eagle.eval.warm_up import warm_ups
from eagle.progress import ProgressBar, console
from eagle.sample.stats import AcceptanceLength
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target


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


def _table(points: Sequence[BatchPoint]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("batch", "plain tok/s", "drafted tok/s", "tau", "speed-up", "[95%]", "pooled", "exact"):
        table.add_column(heading, justify="right")
    for point in points:
        ratio = point.speedup
        table.add_row(
            str(point.batch),
            f"{point.plain_tokens_per_second:.1f}",
            f"{point.tokens_per_second:.1f}",
            number(point.tau),
            "-" if ratio is None else f"{ratio.median:.2f}x",
            "-" if ratio is None or ratio.units < FEWEST else f"[{ratio.low:.2f}, {ratio.high:.2f}]",
            "-" if ratio is None else f"{ratio.pooled:.2f}x",
            "yes" if not point.different else f"{point.different} DIFFERENT",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="recipe: its target, decode and eval sections are used")
    parser.add_argument("--head", help="default: the recipe's own")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=16, help="how many of eval.prompts; every batch size divides it")
    parser.add_argument("--setting", default="T=0", help='such as "T=1 top_p=0.9"')
    known, overrides = parser.parse_known_args(arguments)
    try:
        if known.prompts < 1:
            raise EagleError(f"--prompts is {known.prompts}, expected 1 or more (a multiple of every batch size)")
        recipe = read_recipe(known.config, overrides)
        setting = parse_setting(known.setting)
        chosen = spread(recipe_prompts(dataclasses.replace(recipe.eval, limit=None)), known.prompts)
        target = Target.from_config(recipe.target, recipe.data.chat_template)
        decoder = checked_decoder(recipe, target, known.head)
        points = measure(
            decoder,
            [prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in chosen],
            batches=known.batches,
            setting=setting,
            max_new_tokens=recipe.eval.max_new_tokens,
        )
    except EagleError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(_table(points))
    console.print(f"{setting.label}: {_verdict(points)}", markup=False, soft_wrap=True)
    limit = recipe.eval.max_new_tokens
    found = curve(points, setting=setting.label, max_new_tokens=limit, prompts=len(chosen))
    print(json.dumps({"benchmark": "throughput", **found, "hardware": hardware(), "commit": git_commit()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
