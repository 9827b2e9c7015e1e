"""`eagle eval RECIPE --quality`: what lossy verification rules cost in quality, and what they gain in speed.

The same prompts and seeds under the lossless rule (coupled) and the lossy ones (top_k, typical), with the recipe's drafter:
the likelihood of the text under the target and, of prompts with a GSM8K reference ("#### 42"), how many are answered right.
First turns only; the rules take turns prompt by prompt, their order rotating.
"""

import dataclasses
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle.config import Recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Plain
from eagle.errors import EagleError
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.experiment import Experiment, Job
from eagle.eval.line_log import Record
from eagle.eval.quality.likelihood import negative_log_likelihood
from eagle.eval.quality.quality_report import markdown, print_quality
from eagle.eval.runner import request_seed
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.statistics import FEWEST, RESAMPLES, paired_difference, paired_ratio
from eagle.eval.suites.prompt import Prompt
from eagle.eval.which_head import drafting_head
from eagle.progress import ProgressBar
from eagle.sample.stats import AcceptanceLength
from eagle.verify.rules import make_rule

LOSSLESS = "coupled"
RULES = (LOSSLESS, "top_k", "typical")

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
EXTRACTIONS: dict[str, str] = {
    "####": 'the number behind the last "####", as GSM8K writes answers; an answer without it is wrong',
    "last number": "the last number in the text",
}
DEFINITIONS = {
    "NLL/token": "negative log-likelihood of the produced text under the target at temperature 1, without filters, in nats, "
    "summed over all answers and divided by their tokens. Lower is likelier",
    **{
        f"accuracy, {name}": f"share of prompts whose number equals the reference's; {how}"
        for name, how in EXTRACTIONS.items()
    },
    "difference": "rule minus coupled over the same prompts and seeds, with its 95% paired bootstrap interval (prompts are drawn "
    f"with replacement, {RESAMPLES} times; given for {FEWEST} prompts or more); an interval that holds 0 shows no difference",
    "tau": "tokens that verifications gave to the answers per verify step, pooled (tau_raw in quality.json: before EOS and the "
    "length limit cut)",
    "tok/s": "new tokens over the wall time of the whole calls, then the median over prompts of its ratio to coupled's with a "
    "95% bootstrap interval",
}


def compare_quality(recipe: Recipe, head: str | Path | None = None) -> dict[str, Any]:
    """Answers every prompt under every rule; writes eval/quality.json and quality.md and prints them.

    A killed comparison continues. Raises EagleError without a drafter or head, or when all prompts are too long.
    """
    settings, limit = parse_settings(recipe.eval.sampling), recipe.eval.max_new_tokens
    if isinstance(recipe.decode.drafter, Plain):
        raise EagleError('decode.drafter is "none": without drafts all rules say the same; name a drafter')
    head_path = drafting_head(recipe, head)
    rules = {name: make_rule(recipe.decode.kind_of_rule(name)) for name in RULES}
    experiment = Experiment.of("quality", recipe, max_new_tokens=limit)
    decode = recipe.decode.as_published()  # the same trees for all: tuned ones are the lossless rule's only
    decoders = {
        name: SpeculativeDecoder.from_pretrained(experiment.target, head_path, decode=decode, rule=rule)
        for name, rule in rules.items()
    }
    described = {name: _described(rule) for name, rule in rules.items()}
    identity = experiment.identity(head_path, described)

    def answer(prompt: Prompt, name: str, setting: Setting, *, seed: int, tokens: int) -> dict[str, Any]:
        return _answer(decoders[name], prompt, experiment.ids[prompt.id], setting, seed=seed, limit=tokens)

    def job(prompt: Prompt, name: str, setting: Setting) -> Job:
        def run(bar: ProgressBar) -> dict[str, Any]:
            seed = request_seed(recipe.eval.seed, prompt, 0, setting)
            found = answer(prompt, name, setting, seed=seed, tokens=limit)
            bar.advance(1)
            return found

        about = {"prompt": prompt.id, "setting": setting.label, "rule": name}
        return Job(key=f"{prompt.id} {setting.label} {name}", about=about, run=run)

    records = experiment.run(
        [job(prompt, name, setting) for setting in settings for prompt, name in experiment.in_turns(rules)],
        identity,
        before=experiment.warm_up(
            rules, lambda prompt, name, tokens: answer(prompt, name, settings[0], seed=0, tokens=tokens)
        ),
    )
    result = {
        "prompts": len(experiment.prompts),
        "with_reference": sum(reference_number(prompt) is not None for prompt in experiment.prompts),
        "max_new_tokens": limit,
        "rules": described,
        "settings": {
            one.label: summary([r for r in records if r["setting"] == one.label], seed=recipe.eval.seed)
            for one in settings
        },
        "definitions": DEFINITIONS,
        "skipped": experiment.skipped,
        "identity": identity,
    }
    return experiment.keep(result, show=print_quality, page=markdown, more=", quality.jsonl every answer")


def _described(rule: Any) -> str:
    options = ", ".join(f"{key} {value:g}" for key, value in sorted(vars(rule).items()) if key != "noise")
    return f"{'lossless' if rule.lossless else 'lossy'}{f': {options}' if options else ''}"


def _answer(
    decoder: SpeculativeDecoder, prompt: Prompt, ids: list[int], setting: Setting, *, seed: int, limit: int
) -> dict[str, Any]:
    target = decoder.target
    assert target.tokenizer is not None
    with bare_generation_config(target):
        start = time.perf_counter()
        out = decoder.generate(
            torch.tensor([ids], device=target.device), max_new_tokens=limit, seed=[seed], **setting.arguments()
        )
        seconds = time.perf_counter() - start
    assert out.stats is not None
    (stats,) = out.stats
    tokens = out.sequences[0, len(ids) : len(ids) + stats.new_tokens].tolist()
    text = target.tokenizer.decode(tokens, skip_special_tokens=True)
    expected = reference_number(prompt)
    return {
        "seed": seed,
        "text": text,
        "tokens": len(tokens),
        "seconds": seconds,
        "nll": negative_log_likelihood(target, ids, tokens),
        "accepted": stats.accepted,
        "tree": stats.tree,
        "finish_reason": stats.finish_reason,
        "expected": expected,
        "right": None if expected is None else {name: extract(text, name) == expected for name in EXTRACTIONS},
    }


def extract(text: str, rule: str) -> float | None:
    """The number that a text answers with, by one of EXTRACTIONS; None: there is none."""
    if rule == "####":
        _, mark, text = text.rpartition("####")
        found = _NUMBER.findall(text)[:1] if mark else []
    else:
        found = _NUMBER.findall(text)[-1:]
    return float(found[0].replace(",", "")) if found else None


def reference_number(prompt: Prompt) -> float | None:
    """The number behind "####" in the prompt's reference; None for prompts of another kind."""
    return extract(prompt.reference[0], "####") if prompt.reference else None


def summary(records: Sequence[Record], *, seed: int) -> dict[str, Any]:
    """Figures of every rule under one setting, and its differences from the lossless one's on the same prompts."""
    by_rule = {rule: {r["prompt"]: r for r in records if r["rule"] == rule} for rule in RULES}
    base = by_rule[LOSSLESS]
    result: dict[str, Any] = {}
    for rule, answers in by_rule.items():
        prompts = [prompt for prompt in answers if prompt in base]
        pairs = [(answers[prompt], base[prompt]) for prompt in prompts]
        judged = [(mine, theirs) for mine, theirs in pairs if mine["right"] is not None]
        body = _figures(list(answers.values()))
        body["same_text"] = sum(mine["text"] == theirs["text"] for mine, theirs in pairs)
        if rule != LOSSLESS:
            speedup = paired_ratio(
                [theirs["seconds"] / theirs["tokens"] for _, theirs in pairs],
                [mine["seconds"] / mine["tokens"] for mine, _ in pairs],
                tokens=[mine["tokens"] for mine, _ in pairs],
                unit="prompt",
                seed=seed,
            )
            body["speed_over_lossless"] = None if speedup is None else dataclasses.asdict(speedup)
            parts = [[(one["nll"], one["tokens"]) for one in pair] for pair in pairs]
            body["nll_difference"] = paired_difference(parts, seed=seed)
            for name in EXTRACTIONS if judged else ():
                parts = [[(one["right"][name], 1) for one in pair] for pair in judged]
                body[f"accuracy_difference_{name}"] = paired_difference(parts, seed=seed)
        result[rule] = body
    return result


def _figures(answers: Sequence[Record]) -> dict[str, Any]:
    judged = [one for one in answers if one["right"] is not None]
    return {
        "answers": len(answers),
        "tokens": sum(one["tokens"] for one in answers),
        "nll_per_token": _nll_per_token(answers),
        **{
            f"accuracy_{name}": sum(one["right"][name] for one in judged) / len(judged) if judged else None
            for name in EXTRACTIONS
        },
        "judged": len(judged),
        **AcceptanceLength.of((one["tokens"], one["accepted"]) for one in answers).as_dict(),
        "tokens_per_second": sum(one["tokens"] for one in answers) / sum(one["seconds"] for one in answers),
    }


def _nll_per_token(answers: Sequence[Record]) -> float:
    return float(sum(one["nll"] for one in answers) / max(sum(one["tokens"] for one in answers), 1))
