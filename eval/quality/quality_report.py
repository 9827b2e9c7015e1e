"""quality.json, quality.md and the table of a comparison of lossy rules with the lossless one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle.eval.report.parts import number
from eagle.eval.results import ratio_text
from eagle.eval.statistics import FEWEST
from eagle.files import atomic_path, write_json

_HEADINGS = (
    "rule",
    "NLL/token",
    "difference",
    "#### right",
    "difference",
    "last number right",
    "difference",
    "tau",
    "tok/s",
)


def write_quality(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes quality.json and quality.md into `folder`, each atomically."""
    write_json(folder / "quality.json", result)
    with atomic_path(folder / "quality.md") as temporary:
        temporary.write_text(markdown(result), encoding="utf-8")


def rows(body: Mapping[str, Any]) -> list[list[str]]:
    """One row per rule, under one setting."""
    return [
        [
            rule,
            f"{one['nll_per_token']:.3f}",
            _difference(one.get("nll_difference"), percent=False),
            _right(one, "####"),
            _difference(one.get("accuracy_difference_####"), percent=True),
            _right(one, "last number"),
            _difference(one.get("accuracy_difference_last number"), percent=True),
            number(one["tau"]),
            f"{one['tokens_per_second']:.1f}"
            + (f", {ratio_text(one['speed_over_lossless'])}" if rule != "coupled" else ""),
        ]
        for rule, one in body.items()
    ]


def notes(result: Mapping[str, Any]) -> list[str]:
    """What the table needs beside it."""
    lines = [f"rule {name}: {about}" for name, about in result["rules"].items()]
    if not result["with_reference"]:
        lines.append(
            'no prompt has a reference with "#### NUMBER", so accuracy is not measured; eval.prompts [shipped:gsm8k_test]'
        )
    for label, body in result["settings"].items():
        same = ", ".join(
            f"{rule} {one['same_text']}/{one['answers']}" for rule, one in body.items() if rule != "coupled"
        )
        lines.append(f"{label}: texts equal to coupled's: {same}")
    lines += [f"{name}: {text}" for name, text in result["definitions"].items()]
    if result["skipped"]:
        lines.append(f"too long, passed over: {', '.join(result['skipped'])}")
    return lines


def print_quality(result: Mapping[str, Any], out: Console | None = None) -> None:
    """Prints a table per setting and the notes."""
    out = out or Console(highlight=False)
    for label, body in result["settings"].items():
        table = Table(
            title=_headline(result, label), title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
        )
        for column, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if column == 0 else "right", no_wrap=column == 0)
        for row in rows(body):
            table.add_row(*(cell.replace(" [", "\n[") for cell in row))
        out.print(table)
    for line in notes(result):
        out.print(line, markup=False, soft_wrap=True, style="dim")


def markdown(result: Mapping[str, Any]) -> str:
    """The same for reading later, with what it was measured on."""
    lines = ["# Quality under lossy rules", ""]
    for label, body in result["settings"].items():
        lines += [
            f"## {_headline(result, label)}",
            "",
            "| " + " | ".join(_HEADINGS) + " |",
            "|---" * len(_HEADINGS) + "|",
        ]
        lines += ["| " + " | ".join(row) + " |" for row in rows(body)]
        lines.append("")
    machine = result["hardware"]
    lines += [f"- {line}" for line in notes(result)]
    lines += [
        "",
        "## Measured on",
        "",
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['torch_threads']} threads",
    ]
    lines += [f"- GPU: {', '.join(machine['gpus']) or 'none'}; commit {result['commit'] or '(installed package)'}"]
    lines += ["- " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()), ""]
    return "\n".join(lines)


def _headline(result: Mapping[str, Any], label: str) -> str:
    return (
        f"{label}: {result['prompts']} prompts ({result['with_reference']} with a number to get right), at most "
        f"{result['max_new_tokens']} tokens each"
    )


def _right(one: Mapping[str, Any], name: str) -> str:
    share = one[f"accuracy_{name}"]
    return "-" if share is None else f"{100 * share:.1f}% ({round(share * one['judged'])}/{one['judged']})"


def _difference(found: Mapping[str, float] | None, *, percent: bool) -> str:
    """With its interval, where there are prompts enough for one."""
    if found is None:
        return ""
    scale, digits = (100, 1) if percent else (1, 3)
    difference, low, high = (f"{scale * found[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    return difference if found["pairs"] < FEWEST else f"{difference} [{low}, {high}]"
