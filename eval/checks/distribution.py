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
from eagle.eval.experiment import Experiment, Job
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.which_head import own_or_given
from eagle.formats.checkpoint import load_head
from eagle.progress import ProgressBar
from eagle.sample.sampling import Sampling
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
    loaded = load_head(head_path)
    experiment = Experiment.of("distribution", recipe, max_new_tokens=NEW_TOKENS)
    target, rows = experiment.target, recipe.eval.check_rows
    prompt = min(experiment.prompts, key=lambda one: len(experiment.ids[one.id]))  # the cheapest: every row reads it
    ids_1T = torch.tensor([experiment.ids[prompt.id]], device=target.device)

    def job(setting: Setting, name: str, exact: Joint) -> Job:
        """exact: of the setting, enumerated by the first rule that needs it."""

        def run(bar: ProgressBar) -> dict[str, Any]:
            sampling = enumerable(setting, seed=recipe.eval.seed)
            with bare_generation_config(target):
                if not exact:
                    exact.update(exact_joint(target, ids_1T, sampling, tokens=NEW_TOKENS))
                decoder = _decoder(recipe, target, loaded, name)
                return _values(decoder, ids_1T, sampling, exact, rows=rows, bar=bar)

        return Job(key=f"{setting.label} {name}", about={"setting": setting.label, "rule": name}, run=run)

    identity = experiment.identity(head_path, "lossless rules")
    jobs = [job(setting, name, exact) for setting in settings for exact in (Joint(),) for name in LOSSLESS]
    lines = verdicts({record["key"]: record for record in experiment.run(jobs, identity, unit="rows", units=rows)})
    result = {
        "identity": identity,
        "prompt": prompt.id,
        "rows": rows,
        "level": LEVEL,
        "dtype": str(target.dtype).removeprefix("torch."),
        "drawn_with": {one.label: dataclasses.asdict(enumerable(one, seed=recipe.eval.seed)) for one in settings},
        "rules": lines,
    }
    experiment.keep(result, show=_print)
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
