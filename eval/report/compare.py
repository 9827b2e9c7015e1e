"""Several evaluations side by side: the main figures of each in one table, and what makes them hard to compare."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle.eval.report.parts import Table, number
from eagle.eval.results import label_of, ratio_text

Result = Mapping[str, Any]


def comparison(names: Sequence[str], results: Sequence[Result]) -> Table:
    """One row per setting and method, in the order of their first appearance; per evaluation: tau, tokens/s, over plain."""
    keys = dict.fromkeys(
        (setting, method)
        for result in results
        for setting, body in result["settings"].items()
        for method in body["methods"]
    )
    rows = []
    for setting, method in keys:
        cells = [f"{label_of(method)}, {setting}"]
        for result in results:
            found = result["settings"].get(setting, {}).get("methods", {}).get(method)
            row = None if found is None else found["overall"]
            cells += (
                ["-"] * 3
                if row is None
                else [number(row["tau"]), number(row["tokens_per_second"], 1), ratio_text(row["speedup_plain"])]
            )
        rows.append(tuple(cells))
    headings = [f"{name} {what}" for name in names for what in ("tau", "tok/s", "over plain")]
    return Table(caption="Evaluations side by side", headings=("method", *headings), rows=tuple(rows))


def differences(names: Sequence[str], results: Sequence[Result]) -> list[str]:
    """What is not the same in all of them, so that figures that depend on it do not compare."""
    what = {
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
    found = []
    for key, meaning in what.items():
        values = [result["identity"].get(key) for result in results]
        others = [name for name, value in zip(names, values, strict=True) if value != values[0]]
        if others:
            found.append(f"{', '.join(others)} and {names[0]} differ in {key}: {meaning}")
    return found
