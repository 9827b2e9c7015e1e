"""decoding.json, decoding.md and the terminal's view of a comparison of ways to decode."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from eagle.eval.report.parts import Table, number
from eagle.eval.report.summary import bullets, measured_on, print_tables

TEXTS_SHOWN = 2
"""Prompts whose texts the terminal shows."""


def ways_table(result: Mapping[str, Any]) -> Table:
    """One row per way to decode."""
    rows = []
    for name, way in result["ways"].items():
        drafted = way.get("drafted")
        rows.append(
            (
                *(name, f"{way['tokens']:.0f}", f"{way['first_token_ms']:.0f}", f"{way['ms_per_token']:.1f}"),
                *(f"{way['kv_mib']:.2f}", f"{way['nll_per_token']:.3f}", f"{way['distinct_2']:.2f}"),
                *(("", "") if drafted is None else (number(drafted["ms_per_token"], 1), number(drafted["tau"]))),
            )
        )
    return Table(
        caption=f"{result['prompts']} prompts, at most {result['max_new_tokens']} tokens, medians",
        headings=(
            *("decoding", "tokens", "TTFT\nms", "ms per\ntoken", "KV\nMiB", "NLL per\ntoken", "dis-\ntinct-2"),
            *("drafted: ms\nper token", "tau"),
        ),
        rows=tuple(rows),
    )


def notes(result: Mapping[str, Any]) -> list[str]:
    """What the table needs beside it: whether drafting left the texts, or why nothing was drafted."""
    drafted = {name: way["drafted"] for name, way in result["ways"].items() if "drafted" in way}
    if not drafted:
        return [
            "nothing was drafted: the recipe has no drafter, or its head is not there yet (eagle train RECIPE, or --head PATH)"
        ]
    counts = ", ".join(f"{name} {one['same_text']}/{one['answers']}" for name, one in drafted.items())
    left = any(one["same_text"] < one["answers"] for one in drafted.values())
    if left and result["lossless"]:
        return [
            f"DIFFERENT: drafted texts equal to the plain ones: {counts}; is it a numerical tie? See eagle eval --check exact"
        ]
    return [f"drafted texts equal to the plain ones: {counts}"]


def print_decoding(result: Mapping[str, Any], out: Console | None = None) -> None:
    """Prints the table, the definitions and the first texts."""
    out = out or Console(highlight=False)
    print_tables([ways_table(result)], notes(result), out)
    print_tables([], [f"{name}: {text}" for name, text in result["definitions"].items()], out, style="dim")
    for one in result["texts"][:TEXTS_SHOWN]:
        texts = TerminalTable(
            title=Text(f"{one['prompt']}: {_short(one['question'])}"),
            title_justify="left",
            box=None,
            show_header=False,
            padding=(0, 2, 0, 0),
        )
        texts.add_column(no_wrap=True)
        texts.add_column()
        for name, answer in one["answers"].items():
            texts.add_row(Text(name, style="bold"), Text(_short(answer["text"], 400)))
        out.print(texts)
    if result["skipped"]:
        print_tables([], [f"too long, passed over: {', '.join(result['skipped'])}"], out)


def markdown(result: Mapping[str, Any]) -> str:
    """All texts, the table, the definitions and what it was measured on."""
    table = ways_table(result)
    lines = ["# Ways to decode", "", f"{table.caption}.", "", *table.markdown(), "", *bullets(notes(result)), ""]
    lines += bullets(f"`{name}`: {about}" for name, about in result["about"].items())
    lines += ["", "## Definitions", "", *bullets(f"**{name}**: {text}" for name, text in result["definitions"].items())]
    lines += [
        *measured_on(result),
        f"- target: {result['target']}; head: {result['head'] or 'none'}",
        "",
        "## Texts",
        "",
    ]
    for one in result["texts"]:
        lines += [f"### {one['prompt']}", "", *(f"> {line}" for line in one["question"].splitlines()), ""]
        lines += ["| decoding | ended by | answer |", "|---|---|---|"]
        for name, answer in one["answers"].items():
            lines.append(f"| {name} | {answer['finish_reason']} | {_cell(answer['text'])} |")
        lines.append("")
    return "\n".join(lines)


def _short(text: str, length: int = 120) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "\u2026"


def _cell(text: str) -> str:
    """A text in a Markdown table's cell: lines by <br>, and nothing that ends the cell or starts HTML."""
    for raw, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|")):
        text = text.replace(raw, written)
    return "<br>".join(text.splitlines())
