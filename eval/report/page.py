"""report.html: everything that results.json says, in one file without a request to anywhere.

    python -m eagle.eval.report.page FOLDER      # the same as eagle report FOLDER

A section is there when its data is. Texts are escaped by the template; drawings come from our own SVG (eagle/plots/svg.py).
"""

import argparse
import functools
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from eagle.eval.report.cost_plots import batch_plot, cost_plot, curve_plot
from eagle.eval.report.parts import label_of
from eagle.eval.report.plots import calibration_plot, setting_plots, training_plot
from eagle.eval.report.summary import footnotes, headline, notes, print_tables, summary_markdown, write_markdown
from eagle.eval.report.tables import (
    category_table,
    comparison,
    divergence_table,
    ledger_tables,
    method_table,
    record_table,
    tune_table,
)
from eagle.eval.report.tree_part import tree_picture
from eagle.eval.report.verdict import exact_rows, facts, tiles, verdict
from eagle.eval.results import RESULTS, Results, load_results, parse
from eagle.files import write_json
from eagle.plots.svg import STYLE, variables
from eagle.progress import console

REPORT = "report.html"
_HERE = Path(__file__).parent
_DIFFERENCES = {
    "hardware": "tokens per second and speed-ups do not compare",
    "target": "neither tau nor speed compares",
    "prompts_sha256": "they answered other prompts: tau and speed-ups do not compare",
    "eval": "eval settings differ",
    "decode": "decode settings (drafter, tree, rule, engine) differ",
    "head_sha256": "the heads differ",
    "tuned_sha256": "their tuned trees differ",
    "version": "versions of eagle differ",
    "libraries": "versions of torch or transformers differ: speeds may",
}
"""Of two evaluations' identities, and what it means."""


def write_results(folder: Path, values: Mapping[str, Any]) -> None:
    """Writes summary.md, report.html and, when they are there, results.json (`values`) into `folder`, each atomically."""
    write_report(folder, values)
    write_json(folder / RESULTS, values)


def write_report(folder: Path, values: Mapping[str, Any]) -> Path:
    """Writes summary.md and report.html into `folder`, each atomically; returns the page's path."""
    return _write(folder, parse(Results, values))


def _write(folder: Path, result: Results) -> Path:
    write_markdown(folder / "summary.md", summary_markdown(result))
    write_markdown(folder / REPORT, render(result))
    return folder / REPORT


def rerender(folder: str | Path) -> Path:
    """Makes summary.md and report.html anew from the results.json in `folder`. Raises EagleError when it cannot be read."""
    return _write(Path(folder), load_results(Path(folder)))


def render(result: Results) -> str:
    """The page."""
    ledger = result.ledger.settings if result.ledger is not None else []
    return _template().render(
        result=result,
        title=f"Speculative decoding of {target_name(result)}",
        tiles=tiles(next(iter(result.settings.values()))),
        facts=facts(result),
        settings=[_setting(result, setting) for setting in result.settings],
        record=record_table(result),
        batch=[batch_plot(entry, key=f"batch-{i}") for i, entry in enumerate(result.throughput)],
        ledgers=[
            (
                one,
                ledger_tables(one),
                list(filter(None, (cost_plot(one, key=f"cost-{i}"), curve_plot(one, key=f"curve-{i}")))),
            )
            for i, one in enumerate(ledger)
        ],
        training=training_plot(result),
        pictures=[
            [tree_picture(step, key=f"tree-{i}-{step.step}") for step in entry.steps]
            for i, entry in enumerate(result.trees)
        ],
        calibration=calibration_plot(result),
        tune=tune_table(result),
        exact=exact_rows(result),
        divergences=divergence_table(result),
        footnotes=footnotes(result),
        recipe=yaml.safe_dump(result.recipe, sort_keys=False, allow_unicode=True),
        light=Markup(variables(dark=False)),
        dark=Markup(variables(dark=True)),
        style=Markup(STYLE + (_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
    )


def target_name(result: Results) -> str:
    """The target as readers call it: the last part of its path or hub id."""
    name = result.target.model or "the target"
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _setting(result: Results, setting: str) -> dict[str, Any]:
    body = result.settings[setting]
    return {
        "name": setting,
        "id": "setting-" + "".join(c if c.isalnum() else "-" for c in setting.lower()),
        "verdict": verdict(body),
        "headline": headline(result, setting).partition(": ")[2],
        "errors": body.errors,
        "methods": method_table(body, f"Methods side by side, {setting}"),
        "categories": category_table(body, f"{label_of(body.main)} by task, {setting}"),
        "notes": [note for note in notes(body) if not note.startswith("ERROR")],
        "plots": setting_plots(result, setting),
    }


@functools.cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"drawing": Markup, "label": label_of}
    return environment.from_string((_HERE / "report.html.jinja").read_text(encoding="utf-8"))


def differences(named: Mapping[str, Results]) -> list[str]:
    """What is not the same in all of them, so that figures that depend on it do not compare."""
    first, *others = named
    found = []
    for key, meaning in _DIFFERENCES.items():
        values = {name: result.identity.get(key) for name, result in named.items()}
        other = [name for name in others if values[name] != values[first]]
        if other:
            found.append(f"{', '.join(other)} and {first} differ in {key}: {meaning}")
    return found


def _letters(index: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    return (_letters(index // 26 - 1) if index >= 26 else "") + string.ascii_uppercase[index % 26]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.eval.report.page", description="Make report.html and summary.md anew from results.json."
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="what eagle eval wrote: it holds results.json")
    folders = [Path(folder) for folder in parser.parse_args(arguments).folders]
    for folder in folders:
        console.print(f"wrote {rerender(folder)}", markup=False, soft_wrap=True)
    if len(folders) > 1:
        named = {_letters(i): load_results(folder) for i, folder in enumerate(folders)}
        lines = [f"{name}: {folder}" for name, folder in zip(named, folders, strict=True)]
        print_tables([comparison(list(named), list(named.values()))], [*lines, *differences(named)])
    return 0


if __name__ == "__main__":
    from eagle.exits import exit_code

    raise SystemExit(exit_code(main))
