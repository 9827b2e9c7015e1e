"""The tables of the report, from results.json; the terminal's and summary.md's are in results.py and show the same figures."""

from collections.abc import Mapping
from typing import Any

from eagle.eval.report_parts import Table, number
from eagle.eval.results import CATEGORY_HEADINGS, HEADINGS, category_rows, label_of, main_method, method_rows

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
    rows = []
    for setting, methods in record.items():
        for name, row in methods.items():
            base = row["baseline_inter_token_ms"]
            memory = row["peak_memory"]
            cuda, rss = memory.get("cuda_bytes"), memory.get("rss_bytes")
            rows.append(
                (
                    f"{label_of(name)}, {setting}",
                    number(base.get("hf"), 1),
                    number(base.get("plain"), 1),
                    number(row["inter_token_ms"], 1),
                    "-" if row["device_use"] is None else f"{100 * row['device_use']:.0f}%",
                    "-" if (cuda or rss) is None else f"{(cuda or rss) / 2**20:,.0f}",
                    number(row["tau"]),
                    " ".join(f"{rate:.2f}" for rate in row["acceptance"]) or "-",
                )
            )
    return Table(
        caption="Record table: inter-token latency (p50) in milliseconds, device use, peak memory, acceptance",
        headings=("method", "HF ms", "plain ms", "its own ms", "device use", "peak MiB", "tau", "acceptance by depth"),
        rows=tuple(rows),
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
            f"{found['margin']:.2g}",
            "tie" if found["tie"] else "DIFFERENT",
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
