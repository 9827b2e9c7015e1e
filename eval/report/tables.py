"""The tables of the report, from results.json; the terminal's and summary.md's are in results.py and show the same figures."""

from collections.abc import Mapping
from typing import Any

from eagle.eval.checks.exactness import kind_of, margins_of
from eagle.eval.report.parts import Table
from eagle.eval.results import (
    CATEGORY_HEADINGS,
    HEADINGS,
    RECORD_HEADINGS,
    category_rows,
    label_of,
    main_method,
    method_rows,
    record_rows,
)

Result = Mapping[str, Any]


def method_table(result: Result, setting: str) -> Table:
    """Every method over all requests of a setting."""
    body = result["settings"][setting]
    return Table(
        caption=f"Methods side by side, {setting}",
        headings=HEADINGS,
        rows=tuple(tuple(row) for row in method_rows(body)),
        strong=list(body["methods"]).index(main_method(body)),
    )


def category_table(result: Result, setting: str) -> Table | None:
    """The main method by category, where there is more than one."""
    body = result["settings"][setting]
    method = main_method(body)
    if len(body["methods"][method]["categories"]) < 2:
        return None
    rows = tuple(tuple(row) for row in category_rows(body, method))
    return Table(caption=f"{label_of(method)} by task, {setting}", headings=CATEGORY_HEADINGS, rows=rows)


def record_table(result: Result) -> Table | None:
    """What an experiment notes: latency of the baselines and of the method, device use, memory, acceptance."""
    record = result.get("record")
    if not record:
        return None
    return Table(
        caption="Record table: inter-token latency (p50) in milliseconds, device use, peak memory, acceptance",
        headings=RECORD_HEADINGS,
        rows=tuple(tuple(row) for row in record_rows(record)),
    )


def divergence_table(result: Result) -> Table | None:
    """Every answer that leaves its reference, ties included."""
    rows = [
        (
            label_of(found["method"]),
            setting,
            found["prompt"],
            str(found["turn"]),
            str(found["index"]),
            margins_of(found).removeprefix("top-2 margin "),
            kind_of(found),
        )
        for setting, body in result["settings"].items()
        for found in body["divergences"]
    ]
    if not rows:
        return None
    return Table(
        caption="Answers that leave those they are held against, at their first different token",
        headings=("method", "setting", "prompt", "turn", "token", "top-2 margin", "kind"),
        rows=tuple(rows),
    )
