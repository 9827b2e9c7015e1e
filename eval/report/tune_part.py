"""The tuner's part of the report: the trees it tried on this machine, and what the draft's confidence is worth.

Input: results.json `tune`, the entry of the head's tuned.json for this machine (eagle/eval/tuner/tune.py).
"""

from collections.abc import Mapping
from typing import Any

from eagle.eval.report.more_plots import calibration_plot, tree_calibration
from eagle.eval.report.parts import Plot, Table, number
from eagle.eval.results import ratio_text

Result = Mapping[str, Any]


def tune_table(result: Result) -> Table | None:
    """Every tree that decoded in earnest: forecast, measured, and which was kept."""
    found = _batches(result)
    if not found:
        return None
    rows = []
    for one in found:
        for tree in one["candidates"]:
            forecast = tree["forecast"]
            rows.append(
                (
                    tree["name"],
                    one["setting"],
                    str(one["batch"]),
                    number(tree["tau"]),
                    number(tree["tokens_per_second"], 1),
                    "-" if forecast is None else f"{forecast['speedup']:.2f}x",
                    ratio_text(tree["speedup"]),
                    "kept" if tree["chosen"] else "",
                )
            )
    return Table(
        caption=f"Trees tried on {result['tune']['hardware']}, engine {result['tune']['engine']}, {result['tune']['dtype']}",
        headings=("tree", "setting", "batch", "tau", "tokens/s", "forecast", "measured over plain", ""),
        rows=tuple(rows),
    )


def calibration(result: Result) -> Plot | None:
    """Of the tuner's held-out prompts where the head was tuned, else of the recorded answer."""
    found = next((one for one in _batches(result) if one["calibration"]["confidence"]), None)
    if found is None:
        return tree_calibration(result)
    columns = found["calibration"]
    keys = ("confidence", "accepted", "calibrated", "nodes")
    bins = [dict(zip(keys, values)) for values in zip(*(columns[key] for key in keys))]
    return calibration_plot(
        bins,
        key="calibration",
        source=f"From the tuner's prompts, {found['setting']}; mean absolute difference {columns['error']:.3f}. The calibrated "
        "line is a monotone fit. The tuner prices trees by what they would have had accepted, prompt by prompt.",
    )


def _batches(result: Result) -> list[Mapping[str, Any]]:
    return list(((result.get("tune") or {}).get("measured") or {}).get("batches") or [])
