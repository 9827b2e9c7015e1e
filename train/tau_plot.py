"""The acceptance length over a run: what was decoded against what the validation estimated, as a drawing and a table.

Both are made anew from metrics.jsonl: train/tau.svg (opens in any browser) and train/tau.txt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle.files import atomic_path

WIDTH, HEIGHT, MARGIN = 640, 360, 48
SERIES = (("decoded_tau", "decoded tau", "#1f6feb"), ("estimated_tau", "estimated tau", "#d1741f"))


def write_tau(directory: Path) -> None:
    """Draws the decodings in `directory`/metrics.jsonl; nothing where there is none."""
    rows = read_decodings(directory / "metrics.jsonl")
    if not rows:
        return
    with atomic_path(directory / "tau.txt") as temporary:
        temporary.write_text(table(rows), encoding="utf-8")
    with atomic_path(directory / "tau.svg") as temporary:
        temporary.write_text(drawing(rows), encoding="utf-8")


def read_decodings(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that hold a decoded tau, by step."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return sorted((line for line in lines if "decoded_tau" in line), key=lambda line: int(line["step"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Step, decoded and estimated tau; the best decoding is marked."""
    best = max(rows, key=lambda row: (row["decoded_tau"], -row["step"]))
    lines = ["    step  decoded tau  estimated tau"]
    for row in rows:
        estimate = row.get("estimated_tau")
        text = f"{estimate:13.3f}" if estimate is not None else f"{'-':>13}"
        lines.append(f"{row['step']:8d}  {row['decoded_tau']:11.3f}  {text}{'  best' if row is best else ''}")
    return "\n".join(lines) + "\n"


def drawing(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of both over the steps."""
    taus = [row[key] for row in rows for key, _, _ in SERIES if row.get(key) is not None]
    low, high = min(1.0, *taus), max(*taus, 1.1) if len(taus) > 1 else max(taus[0], 1.1)
    first, last = rows[0]["step"], rows[-1]["step"]

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return MARGIN + share * (WIDTH - 2 * MARGIN)

    def y(tau: float) -> float:
        return HEIGHT - MARGIN - (tau - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">optimiser steps</text>',
    ]
    for part in range(5):
        tau = low + part * (high - low) / 4
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(tau):.1f}" y2="{y(tau):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(tau) + 4:.1f}" text-anchor="end">{tau:.2f}</text>')
    for step in dict.fromkeys((first, last)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{step}</text>')
    for place, (key, label, colour) in enumerate(SERIES):
        points = [(x(row["step"]), y(row[key])) for row in rows if row.get(key) is not None]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points]
        parts.append(f'<text x="{MARGIN + 8}" y="{20 + 16 * place}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
