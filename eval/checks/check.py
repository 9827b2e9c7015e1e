"""`eagle eval RECIPE --check exact`: does drafting leave every token as plain decoding would have said it?

Every prompt's first turn is answered in ragged batches, with and without drafting, under every sampling setting and with the
same seeds. Each answer must be equal token for token, or leave the plain one first at a numerical tie, which is listed.
Speed is not measured: `eagle eval` does that, one request at a time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle.config import Recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Plain
from eagle.errors import EagleError
from eagle.eval.answers import Answer, AnswerLog, Request
from eagle.eval.batch_answer import answer_batch
from eagle.eval.checks.bitwise import find
from eagle.eval.checks.exactness import divergence, exactness
from eagle.eval.checks.found import kind_of, margins_of
from eagle.eval.experiment import Experiment
from eagle.eval.methods import PLAIN
from eagle.eval.report.parts import number
from eagle.eval.runner import request_seed
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.statistics import FEWEST, pooled_interval
from eagle.eval.which_head import drafting_head
from eagle.progress import ProgressBar
from eagle.sample.stats import AcceptanceLength
from eagle.target.target import Target

DRAFTED = "drafted"
BATCH = 8
"""Prompts answered together"""


def check_exact(recipe: Recipe, head: str | Path | None = None) -> bool:
    """True when no answer differs otherwise than at a tie, or, where the target's bits do not depend on neighbours
    (eagle/eval/checks/bitwise.py), when none differs at all; writes eval/exactness.json and prints a table.

    A killed check continues. Raises EagleError for a rule whose tokens are another draw of the distribution, a missing head,
    or prompts that are all too long.
    """
    settings = parse_settings(recipe.eval.sampling)
    experiment = Experiment.of("exactness", recipe, max_new_tokens=recipe.eval.max_new_tokens)
    decoder = checked_decoder(recipe, experiment.target, head)
    identity = experiment.identity(drafting_head(recipe, head), "drafted beside plain")
    with AnswerLog(recipe.eval_dir / "exactness.jsonl", identity) as log:
        _answer_all(experiment, decoder, settings, log)
        requests = list(log.requests.values())
    bitwise = find(decoder.target)
    result: dict[str, Any] = {
        "identity": identity,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "skipped": experiment.skipped,
        "runs": decoder.target.engine_facts,
        "bitwise": dataclasses.asdict(bitwise),
        "settings": {one.label: _summary([r for r in requests if r.setting == one.label]) for one in settings},
    }
    experiment.keep(result, show=_print, more=" and every tie")
    wrong = ("different", "ties") if bitwise.holds else ("different",)
    return not any(body[kind] for body in result["settings"].values() for kind in wrong)


def checked_decoder(recipe: Recipe, target: Target, head: str | Path | None) -> SpeculativeDecoder:
    """The recipe's decoder, whose every token must be plain decoding's; head: None for the recipe's own. A tree that is left
    open is the published one: a tuned one may be small, or none at all, and then there would be nothing to check.

    Raises EagleError for a rule that does not promise that, for no drafter, and for a head that is missing or not read.
    """
    rule = recipe.decode.rule
    if rule.name != "coupled":
        raise EagleError(
            f'the rule "{rule.name}" does not promise plain decoding\'s tokens; take decode.rule coupled, or check the '
            "distribution: --check distribution"
        )
    if isinstance(recipe.decode.drafter, Plain):
        raise EagleError('decode.drafter is "none": plain decoding would be compared with itself; name a drafter')
    return SpeculativeDecoder.from_pretrained(target, drafting_head(recipe, head), decode=recipe.decode.as_published())


def _answer_all(
    experiment: Experiment, decoder: SpeculativeDecoder, settings: Sequence[Setting], log: AnswerLog
) -> None:
    """Fills the log."""
    target, ids, fitting = experiment.target, experiment.ids, experiment.prompts
    seed, limit = experiment.recipe.eval.seed, experiment.recipe.eval.max_new_tokens
    with ProgressBar("check", total=len(fitting) * len(settings), unit="answers", done=len(log.requests)) as bar:
        for setting in settings:
            missing = [prompt for prompt in fitting if (prompt.id, 0, setting.label) not in log.requests]
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                rows = [ids[prompt.id] for prompt in batch]
                seeds = [request_seed(seed, prompt, 0, setting) for prompt in batch]
                plain = answer_batch(decoder.plain(), rows, seeds=seeds, setting=setting, max_new_tokens=limit)
                drafted = answer_batch(decoder, rows, seeds=seeds, setting=setting, max_new_tokens=limit)
                for row, prompt in enumerate(batch):
                    found = divergence(
                        target,
                        prompt_ids=rows[row],
                        tokens=drafted.tokens[row],
                        reference=plain.tokens[row],
                        versus=PLAIN,
                        sampling=setting.seeded(seeds[row]),
                        alike=len(rows[row]),
                    )
                    answers = {PLAIN: plain, DRAFTED: drafted}
                    log.append(
                        Request(
                            prompt=prompt.id,
                            turn=0,
                            category=prompt.category,
                            setting=setting.label,
                            seed=seeds[row],
                            prompt_tokens=len(rows[row]),
                            order=list(answers),
                            answers={
                                name: Answer(
                                    tokens=answer.tokens[row],
                                    seconds=answer.seconds,
                                    first_token_seconds=answer.stats[row].prefill_ms / 1e3,
                                    accepted=answer.stats[row].accepted,
                                )
                                for name, answer in answers.items()
                            },
                            divergences={DRAFTED: found} if found is not None else {},
                        )
                    )
                bar.advance(len(batch))


def _summary(requests: Sequence[Request]) -> dict[str, Any]:
    counts = exactness(requests, DRAFTED)
    lengths = [AcceptanceLength.of([(len(one.tokens), one.accepted)]) for one in _drafted(requests)]
    drawn = pooled_interval([(one.committed, one.steps) for one in lengths], units=[r.prompt for r in requests])
    return {
        "answers": counts.requests,
        "tokens": sum(len(one.tokens) for one in _drafted(requests)),
        "equal": counts.equal,
        "ties": counts.ties,
        "router_ties": counts.router_ties,
        "different": counts.different,
        **AcceptanceLength.of((len(one.tokens), one.accepted) for one in _drafted(requests)).as_dict(),
        "tau_interval": drawn if counts.requests >= FEWEST else None,
        "divergences": [{"prompt": r.prompt, **r.divergences[DRAFTED]} for r in requests if DRAFTED in r.divergences],
    }


def _drafted(requests: Sequence[Request]) -> list[Answer]:
    return [request.answers[DRAFTED] for request in requests]


def _print(result: Mapping[str, Any]) -> None:
    out = Console(highlight=False)
    table = Table(title="drafted against plain, same seeds", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("sampling", "answers", "tokens", "equal", "ties", "different", "tau", "[95%]", "raw tau"):
        table.add_column(heading, justify="left" if heading == "sampling" else "right")
    for label, body in result["settings"].items():
        cells = [f"{body[key]:,}" for key in ("answers", "tokens", "equal", "ties", "different")]
        interval = body["tau_interval"]
        shown = "-" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"
        table.add_row(label, *cells, number(body["tau"]), shown, number(body["tau_raw"]))
    out.print(table)
    found = result["bitwise"]
    out.print(
        "bitwise: a token's features are the same bits alone, in trees and in batches here, so that no tie is an excuse"
        if found["holds"]
        else f"not bitwise, so that a tie is an excuse: {found['culprit']}",
        markup=False,
        soft_wrap=True,
    )
    out.print(
        "tau: tokens per verification that reached the answers, with its 95% bootstrap interval over prompts (of "
        f"{FEWEST} or more); raw tau: before EOS and the length limit cut, as servers count",
        markup=False,
        soft_wrap=True,
    )
    if result["dtype"] != "float32":
        margins = [found["margin"] for body in result["settings"].values() for found in body["divergences"]]
        seen = f"; top-2 margins at the first divergences: {min(margins):.2g} to {max(margins):.2g}" if margins else ""
        out.print(
            f"{result['dtype']}: an answer may leave plain at a tie, where the two best scores are closer than two spacings of "
            f"numbers of the top logit's size (2 * eps * |logit|, over the temperature): matrix products of other shapes round "
            f"differently there{seen}",
            markup=False,
            soft_wrap=True,
        )
    for label, body in result["settings"].items():
        for found in body["divergences"]:
            out.print(
                f"{label}: {found['prompt']} leaves plain at token {found['index']} ({kind_of(found)}): {margins_of(found)}; a "
                f"tie below {found['tie_below']:.2g}",
                markup=False,
                soft_wrap=True,
            )
    if result["skipped"]:
        out.print(f"too long, passed over: {', '.join(result['skipped'])}", markup=False, soft_wrap=True)
