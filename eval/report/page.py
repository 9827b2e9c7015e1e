"""report.html: everything that results.json says, in one file without a request to anywhere.

A section is there when its data is. Texts are escaped by the template; drawings come from our own SVG (eagle/plots/svg.py).
"""

import functools
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from eagle.eval.report.cost_plots import batch_plot, cost_plot, curve_plot
from eagle.eval.report.parts import exact_text, label_of
from eagle.eval.report.plots import calibration_plot, setting_plots, training_plot
from eagle.eval.report.summary import footnotes, headline, notes, print_tables, summary_markdown, write_text
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
from eagle.eval.report.verdict import facts, target_name, tiles, verdict
from eagle.eval.results import RESULTS, Results, load_results, parse
from eagle.files import write_json
from eagle.plots.svg import STYLE, variables
from eagle.progress import console

REPORT = "report.html"
_HERE = Path(__file__).parent
_SHOWN = (
    *(target_name, verdict, tiles, facts, headline, notes, exact_text, footnotes),
    *(method_table, category_table, record_table, tune_table, divergence_table, ledger_tables),
    *(setting_plots, batch_plot, cost_plot, curve_plot, calibration_plot, training_plot, tree_picture),
)
"""What the template calls."""
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
    write_text(folder / "summary.md", summary_markdown(result))
    write_text(folder / REPORT, render(result))
    return folder / REPORT


def rerender(folder: str | Path) -> Path:
    """Makes summary.md and report.html anew from the results.json in `folder`. Raises EagleError when it cannot be read."""
    return _write(Path(folder), load_results(Path(folder)))


def render(result: Results) -> str:
    """The page."""
    return _template().render(
        result=result,
        recipe=yaml.safe_dump(result.recipe, sort_keys=False, allow_unicode=True),
        light=Markup(variables(dark=False)),
        dark=Markup(variables(dark=True)),
        style=Markup(STYLE + (_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
    )


@functools.cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"drawing": Markup, "label": label_of}
    environment.globals |= {each.__name__: each for each in _SHOWN}
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


def report_folders(folders: Sequence[Path]) -> None:
    """Makes every folder's pages anew; puts several side by side on the terminal."""
    for folder in folders:
        console.print(f"wrote {rerender(folder)}", markup=False, soft_wrap=True)
    if len(folders) > 1:
        named = {_letters(i): load_results(folder) for i, folder in enumerate(folders)}
        lines = [f"{name}: {folder}" for name, folder in zip(named, folders, strict=True)]
        print_tables([comparison(list(named), list(named.values()))], [*lines, *differences(named)])
