"""The acceptance length over a run: what was decoded against what the validation estimated, as a drawing and a table.

Both are made anew from metrics.jsonl: train/tau.svg (opens in any browser) and train/tau.txt. The evaluation's report shows
the same drawing.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.files import atomic_path
from eagle.plots.svg import Axis, Point, Series, line_plot, standalone

SERIES = (("decoded_tau", "decoded tau"), ("estimated_tau", "estimated tau"))


def write_tau(directory: Path) -> None:
    """Draws the decodings in `directory`/metrics.jsonl; nothing where there is none."""
    rows = [row for row in read_taus(directory / "metrics.jsonl") if row["decoded_tau"] is not None]
    if not rows:
        return
    with atomic_path(directory / "tau.txt") as temporary:
        temporary.write_text(table(rows), encoding="utf-8")
    with atomic_path(directory / "tau.svg") as temporary:
        temporary.write_text(standalone(drawing(rows), title="Acceptance length over training"), encoding="utf-8")


def read_taus(path: Path) -> list[dict[str, Any]]:
    """[{step, decoded_tau, estimated_tau}] by step, from a metrics file's validations and decodings; None: not measured.

    A step that was trained twice (after a kill) counts as it was the last time. No file: nothing.
    """
    if not path.is_file():
        return []
    taus: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        estimate = row.get("estimated_tau", row.get("val_tau"))
        if estimate is None and "decoded_tau" not in row:
            continue
        step = int(row["step"])
        at = taus.setdefault(step, {"step": step, "decoded_tau": None, "estimated_tau": None})
        if "decoded_tau" in row:
            at["decoded_tau"] = row["decoded_tau"]
        at["estimated_tau"] = at["estimated_tau"] if estimate is None else estimate
    return [taus[step] for step in sorted(taus)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Step, decoded and estimated tau; the best decoding is marked."""
    best = max(rows, key=lambda row: (row["decoded_tau"], -row["step"]))
    lines = ["    step  decoded tau  estimated tau"]
    for row in rows:
        estimate = row.get("estimated_tau")
        text = f"{estimate:13.3f}" if estimate is not None else f"{'-':>13}"
        lines.append(f"{row['step']:8d}  {row['decoded_tau']:11.3f}  {text}{'  best' if row is best else ''}")
    return "\n".join(lines) + "\n"


def drawing(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of both over the steps, to stand in a page (eagle.plots.svg.py)."""
    series = [
        Series(
            name=name,
            style=style,
            points=tuple(Point(x=row["step"], y=row[key]) for row in rows if row[key] is not None),
        )
        for style, (key, name) in enumerate(SERIES)
    ]
    series = [one for one in series if one.points]
    taus = [point.y for one in series for point in one.points]
    x = Axis.over("optimiser steps", [row["step"] for row in rows])
    return line_plot(series, x=x, y=Axis.over("tau (tokens per verify step)", [1.0, *taus]))
