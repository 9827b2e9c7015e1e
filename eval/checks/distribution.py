"""`eagle eval RECIPE --check distribution`: do the head's lossless rules draw from the target's distribution?

For every sampling setting above temperature 0, many rows continue one prompt under every lossless rule; the joint counts of
their tokens are tested against the target's exact probabilities (eagle/eval/checks/chi_square.py says how).
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from eagle.config import Recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.environment import git_commit, hardware, versions
from eagle.errors import EagleError
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.checks.chi_square import (
    LEVEL,
    LOSSLESS,
    MOST_KEPT,
    NEW_TOKENS,
    Joint,
    chi_squares,
    continuations,
    degrees_text,
    exact_joint,
    holm,
    not_tested,
)
from eagle.eval.identity import evaluation_identity, text_identity
from eagle.eval.line_log import LineLog
from eagle.eval.runner import first_turn, fits
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.suites.prompt_set import recipe_prompts
from eagle.eval.which_head import own_or_given
from eagle.files import write_json
from eagle.formats.checkpoint import load_head
from eagle.progress import ProgressBar, console
from eagle.sample.sampling import Sampling
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

KEPT = 5
"""Tokens kept (top_k) where a setting keeps more than MOST_KEPT; its own top_k up to that stays as it is."""
BATCH = 128
TESTS = ("tokens 2-3", "tokens 2-4")


def check_distribution(recipe: Recipe, head: str | Path | None = None) -> bool:
    """True when every rule was tested and none is told apart from the target at a family-wise error of LEVEL; writes
    eval/distribution.json. A rule is not tested when so few rows, or so cold a setting, leave its tests a single cell.

    A killed check continues behind the last finished rule. Raises EagleError for no setting above temperature 0, a missing
    head, or prompts that are all too long.
    """
    settings = [setting for setting in parse_settings(recipe.eval.sampling) if not setting.greedy]
    if not settings:
        raise EagleError(
            f"eval.sampling is {list(recipe.eval.sampling)}: at temperature 0 there is one outcome, which --check exact takes; "
            'add a setting such as "T=1"'
        )
    head_path = own_or_given(recipe, head)
    loaded, prompts = load_head(head_path), recipe_prompts(recipe.eval)
    target = Target.from_config(recipe.target, recipe.data.chat_template)
    weights = text_identity(target)
    assert target.tokenizer is not None
    ids = {prompt.id: prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in prompts}
    fitting = [prompt for prompt in prompts if fits(target, ids[prompt.id], NEW_TOKENS)]
    if not fitting:
        raise EagleError("every prompt is longer than the target's context; see eval.prompts")
    prompt = min(fitting, key=lambda one: len(ids[one.id]))  # the cheapest: every row reads it
    ids_1T = torch.tensor([ids[prompt.id]], device=target.device)
    identity = {
        "check": "distribution",
        **evaluation_identity(recipe, head_path, prompts),
        "weights": weights,
    }
    with LineLog(recipe.eval_dir / "distribution.jsonl", identity) as log:
        total, rows = len(settings) * len(LOSSLESS) * recipe.eval.check_rows, recipe.eval.check_rows
        with ProgressBar("check", total=total, unit="rows", done=len(log.records) * rows) as bar:
            for setting in settings:
                sampling, exact = enumerable(setting, seed=recipe.eval.seed), dict[Any, float]()
                for name in LOSSLESS:
                    key = f"{setting.label} {name}"
                    if key in log.records:
                        continue
                    with bare_generation_config(target):
                        exact = exact or exact_joint(target, ids_1T, sampling, tokens=NEW_TOKENS)
                        decoder = _decoder(recipe, target, loaded, name)
                        values = _values(decoder, ids_1T, sampling, exact, rows=rows, bar=bar)
                    log.append(key, {"setting": setting.label, "rule": name, **values})
        records = list(log.records.values())
    lines = verdicts({record["key"]: record for record in records})
    result = {
        "identity": identity,
        "prompt": prompt.id,
        "rows": rows,
        "level": LEVEL,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drawn_with": {one.label: dataclasses.asdict(enumerable(one, seed=recipe.eval.seed)) for one in settings},
        "rules": lines,
        "hardware": hardware(),
        "versions": versions(),
        "commit": git_commit(),
    }
    write_json(recipe.eval_dir / "distribution.json", result)
    _print(result)
    console.print(f"eval: {recipe.eval_dir / 'distribution.json'} holds this", markup=False, soft_wrap=True)
    return all(line["tested"] and not line["rejected"] for line in lines)


def enumerable(setting: Setting, *, seed: int) -> Sampling:
    """The setting's sampling with few enough tokens kept that all continuations can be listed."""
    kept = setting.sampling.top_k
    return dataclasses.replace(setting.sampling, top_k=kept if 0 < kept <= MOST_KEPT else KEPT, seed=seed)


def verdicts(values: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line per setting and rule: p-values, their tests' degrees of freedom, whether there were any, and whether Holm over
    all tests of all of them rejects it at LEVEL."""
    adjusted = holm({f"{key}|{test}": line[test] for key, line in values.items() for test in TESTS})
    lines = []
    for key, line in values.items():
        low = min(adjusted[f"{key}|{test}"] for test in TESTS)
        lines.append(
            {
                **{name: line[name] for name in ("setting", "rule", *TESTS)},
                "holm": low,
                "rejected": low < LEVEL,
                "degrees_of_freedom": line["degrees_of_freedom"],
                "tested": any(line["degrees_of_freedom"].values()),
            }
        )
    return lines


def _decoder(recipe: Recipe, target: Target, head: Any, name: str) -> SpeculativeDecoder:
    decode = dataclasses.replace(LOSSLESS[name], engine=recipe.decode.engine, kernels=recipe.decode.kernels)
    return SpeculativeDecoder.from_pretrained(target, head, decode=decode)


def _values(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, sampling: Sampling, exact: Joint, *, rows: int, bar: ProgressBar
) -> dict[str, Any]:
    found = chi_squares(continuations(decoder, ids_1T, sampling, rows=rows, batch=BATCH, bar=bar), exact)
    degrees = {name: test.degrees for name, test in found.items()}
    return {**{name: test.p_value for name, test in found.items()}, "degrees_of_freedom": degrees}


def _print(result: Mapping[str, Any]) -> None:
    out = Console(highlight=False)
    title = f"chi-square p-values, {result['rows']} rows of {NEW_TOKENS} tokens, prompt {result['prompt']}, {result['dtype']}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("sampling", "rule", *TESTS, "degrees of freedom", "Holm", "the target's distribution"):
        table.add_column(heading, justify="left" if heading in ("sampling", "rule") else "right")
    for line in result["rules"]:
        values = [f"{line[name]:.3g}" for name in TESTS]
        said = "REJECTED" if line["rejected"] else "not rejected" if line["tested"] else "not tested"
        table.add_row(line["setting"], line["rule"], *values, degrees_text(line), f"{line['holm']:.3g}", said)
    out.print(table)
    untested = not_tested(
        [f"{line['setting']}, {line['rule']}" for line in result["rules"] if not line["tested"]],
        f"raise eval.check_rows (now {result['rows']}), or take a hotter setting in eval.sampling",
    )
    if untested:
        out.print(untested, markup=False, soft_wrap=True)
    for label, drawn in result["drawn_with"].items():
        kept = drawn["top_k"]
        out.print(
            f"{label}: drawn with top_k {kept}, so that all {kept}^{NEW_TOKENS} continuations can be enumerated",
            markup=False,
            soft_wrap=True,
        )
    out.print(
        f"rejected: Holm's adjusted p-value over all tests below {result['level']:g}; the first token, which no draft decides, "
        "is not tested",
        markup=False,
        soft_wrap=True,
    )
