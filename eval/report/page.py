"""report.html: everything that results.json says, in one file without a request to anywhere.

    python -m eagle.eval.report.page FOLDER      # the same as eagle report FOLDER

A section is there when its data is. Texts are escaped by the template; drawings come from our own SVG (eagle/plots/svg_plot.py).
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
from rich.console import Console

from eagle.eval.report.compare import comparison, differences
from eagle.eval.report.facts import exact_rows, facts, tiles
from eagle.eval.report.ledger_part import ledgers
from eagle.eval.report.more_plots import batch_plots, training_plot
from eagle.eval.report.parts import Plot
from eagle.eval.report.plots import setting_plots
from eagle.eval.report.tables import category_table, divergence_table, method_table, record_table
from eagle.eval.report.tree_part import answer_markup, origin_counts, tree_picture
from eagle.eval.report.tune_part import calibration, tune_table
from eagle.eval.report.verdict import verdict
from eagle.eval.results import RESULTS, footnotes, headline, label_of, load_results, notes, rich_table, write_summary
from eagle.files import atomic_path, write_json
from eagle.plots.svg_plot import STYLE, variables
from eagle.progress import console

REPORT = "report.html"
_HERE = Path(__file__).parent


def write_results(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes summary.md, report.html and, when they are there, results.json into `folder`, each atomically."""
    write_summary(folder, result)
    write_report(folder, result)
    write_json(folder / RESULTS, result)


def write_report(folder: Path, result: Mapping[str, Any]) -> Path:
    """Writes report.html into `folder`, atomically; returns its path."""
    path = folder / REPORT
    with atomic_path(path) as temporary:
        temporary.write_text(render(result), encoding="utf-8")
    return path


def rerender(folder: str | Path) -> Path:
    """Makes summary.md and report.html anew from the results.json in `folder`. Raises EagleError when it cannot be read."""
    result = load_results(Path(folder))
    write_summary(Path(folder), result)
    return write_report(Path(folder), result)


def render(result: Mapping[str, Any]) -> str:
    """The page."""
    settings = list(result["settings"])
    return _template().render(
        result=result,
        title=f"Speculative decoding of {target_name(result)}",
        verdicts={setting: verdict(result, setting) for setting in settings},
        tiles=tiles(result, settings[0]),
        facts=facts(result),
        settings=[_setting(result, setting) for setting in settings],
        record=record_table(result),
        batch=batch_plots(result),
        ledgers=ledgers(result),
        training=training_plot(result),
        trees=[_tree(entry, number) for number, entry in enumerate(result.get("trees") or [])],
        calibration=calibration(result),
        tune=tune_table(result),
        exact=exact_rows(result),
        divergences=divergence_table(result),
        footnotes=footnotes(result),
        recipe=yaml.safe_dump(result["recipe"], sort_keys=False, allow_unicode=True),
        light=Markup(variables(dark=False)),
        dark=Markup(variables(dark=True)),
        style=Markup(STYLE + (_HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup((_HERE / "report.js").read_text(encoding="utf-8")),
    )


def target_name(result: Mapping[str, Any]) -> str:
    """The target as readers call it: the last part of its path or hub id."""
    name = str(result["target"].get("model") or "the target")
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def _setting(result: Mapping[str, Any], setting: str) -> dict[str, Any]:
    body = result["settings"][setting]
    plots: list[Plot] = setting_plots(result, setting)
    return {
        "name": setting,
        "id": "setting-" + "".join(c if c.isalnum() else "-" for c in setting.lower()),
        "headline": headline(result, setting).partition(": ")[2],
        "errors": body["errors"],
        "methods": method_table(result, setting),
        "categories": category_table(result, setting),
        "notes": [note for note in notes(body) if not note.startswith("ERROR")],
        "plots": plots,
    }


def _tree(entry: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {
        **entry,
        "label": label_of(entry["method"]),
        "answer": Markup(answer_markup(entry["tokens"])),
        "counts": origin_counts(entry["tokens"]),
        "pictures": [tree_picture(step, key=f"tree-{number}-{step['step']}") for step in entry["steps"]],
    }


@functools.cache
def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["drawing"] = Markup
    return environment.from_string((_HERE / "report.html.jinja").read_text(encoding="utf-8"))


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
        names, results = [_letters(i) for i in range(len(folders))], [load_results(folder) for folder in folders]
        table = comparison(names, results)
        out = Console(highlight=False)
        out.print(rich_table(table.caption, table.headings, table.rows))
        lines = [f"{name}: {folder}" for name, folder in zip(names, folders, strict=True)]
        for line in [*lines, *differences(names, results)]:
            out.print(line, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    from eagle.exits import exit_code

    raise SystemExit(exit_code(main))
