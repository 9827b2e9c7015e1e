"""quality.json, quality.md and the table of a comparison of lossy rules with the lossless one."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from eagle.eval.report.parts import Table, number, ratio_text
from eagle.eval.report.summary import bullets, measured_on, print_tables
from eagle.eval.statistics import FEWEST, Estimate


def rules_table(body: Mapping[str, Any], caption: str) -> Table:
    """One row per rule, under one setting."""
    return Table(
        caption=caption,
        headings=(
            *("rule", "NLL/token", "difference", "#### right", "difference", "last number right", "difference"),
            *("tau", "tok/s"),
        ),
        rows=tuple(
            (
                *(rule, f"{one['nll_per_token']:.3f}", _difference(one.get("nll_difference"), percent=False)),
                *(_right(one, "####"), _difference(one.get("accuracy_difference_####"), percent=True)),
                *(_right(one, "last number"), _difference(one.get("accuracy_difference_last number"), percent=True)),
                *(number(one["tau"]), f"{one['tokens_per_second']:.1f}{_over_lossless(one)}"),
            )
            for rule, one in body.items()
        ),
    )


def _tables(result: Mapping[str, Any]) -> list[Table]:
    asked = (
        f"{result['prompts']} prompts ({result['with_reference']} with a number to get right), at most "
        f"{result['max_new_tokens']} tokens each"
    )
    return [rules_table(body, f"{label}: {asked}") for label, body in result["settings"].items()]


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
    print_tables(_tables(result), notes(result), out, style="dim")


def markdown(result: Mapping[str, Any]) -> str:
    """The same for reading later, with what it was measured on."""
    lines = ["# Quality under lossy rules", ""]
    for table in _tables(result):
        lines += [f"## {table.caption}", "", *table.markdown(), ""]
    return "\n".join([*lines, *bullets(notes(result)), *measured_on(result)])


def _over_lossless(one: Mapping[str, Any]) -> str:
    """Behind a lossy rule's speed: its ratio to the lossless one's."""
    if "speed_over_lossless" not in one:
        return ""
    found = one["speed_over_lossless"]
    return f", {ratio_text(None if found is None else Estimate(**found))}"


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
