"""Bars and rows as SVG text: a forest of ratios with their intervals, stacked bars, a histogram. See eagle/plots/svg_plot.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle.plots.svg_plot import CHARACTER, LEFT, RIGHT, WIDTH, Axis, legend_rows, marker, styled, svg, text


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One row of a forest: a value and its interval, drawn in a style. Without a value `shown` says why."""

    name: str
    style: int
    value: float | None
    shown: str
    """What stands at the right end of the row"""
    interval: tuple[float, float] | None = None
    """(low, high); None: there is none"""


def forest(groups: Sequence[tuple[str, Sequence[Ratio]]], *, x: Axis, reference: tuple[float, str]) -> str:
    """Rows of values with intervals in named groups, against a vertical line."""
    seen = {row.name: row.style for _, rows in groups for row in rows}
    legend, y = legend_rows([(name, style, False, True) for name, style in seen.items()], y=14)
    right = WIDTH - RIGHT - 44
    top = y + 14
    height = top + sum(22 + 16 * len(rows) for _, rows in groups)

    def across(value: float) -> float:
        return 10 + min(1.0, max(0.0, x.share(value))) * (right - 10)

    value, label = reference
    parts = [legend]
    for tick in x.ticks:
        parts.append(f'<line class="grid" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{top}" y2="{height}"/>')
        parts.append(text(across(tick), height + 16, f"{tick:.{x.digits}f}", anchor="middle"))
    parts.append(f'<line class="ref" x1="{across(value):.1f}" x2="{across(value):.1f}" y1="{top - 4}" y2="{height}"/>')
    parts.append(
        text(
            across(value),
            top - 8,
            label,
            anchor="start" if across(value) < 60 else "end" if across(value) > right - 60 else "middle",
            kind="small",
        )
    )
    y = top
    for group, rows in groups:
        y += 18
        parts.append(text(4, y, group, kind="strong"))
        y += 4
        for row in rows:
            y += 16
            parts.append(_ratio_row(row, y - 4, across))
            parts.append(text(WIDTH - 4, y, row.shown, anchor="end", kind="small"))
    parts.append(text((10 + right) / 2, height + 34, x.label, anchor="middle"))
    return svg(parts, height + 42)


def _ratio_row(row: Ratio, y: float, across: Callable[[float], float]) -> str:
    if row.value is None:
        return ""
    note, drawn = f"{row.name}: {row.value:.2f}", list[str]()
    if row.interval is not None:
        low, high = row.interval
        note += f" [{low:.2f}, {high:.2f}]"
        drawn.append(f'<line class="whisker" x1="{across(low):.1f}" x2="{across(high):.1f}" y1="{y}" y2="{y}"/>')
    return styled([*drawn, marker(across(row.value), y, row.style, note=note)], row.style)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stacked bar."""

    name: str
    parts: tuple[float, ...]
    labels: tuple[str, ...]
    """What stands inside each part, where there is room"""
    shown: str
    """What stands behind the bar"""


def stacked(rows: Sequence[Stack], *, kinds: Sequence[str], styles: Sequence[int], x: Axis) -> str:
    """Horizontal stacked bars, one below its name each; the parts are of the `kinds`, in the `styles`."""
    parts, x_at = [], 6.0
    for kind, style in zip(kinds, styles):
        parts.append(styled([f'<rect class="bar" x="{x_at:.1f}" y="4" width="14" height="12"/>'], style))
        parts.append(text(x_at + 19, 14, kind))
        x_at += 36 + CHARACTER * len(kind)
    right, y = WIDTH - RIGHT - 62, 30.0
    top = y
    height = top + 42 * len(rows) + 4
    for tick in x.ticks:
        place = 6 + x.share(tick) * (right - 6)
        parts.append(f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{height}"/>')
        parts.append(text(place, height + 16, f"{tick:.{x.digits}f}", anchor="middle"))
    for row in rows:
        y += 16
        parts.append(text(6, y, row.name))
        y += 5
        start = 0.0
        for style, (part, label) in zip(styles, zip(row.parts, row.labels)):
            left, width = 6 + x.share(start) * (right - 6), (x.share(start + part) - x.share(start)) * (right - 6)
            box = f'<rect class="bar" x="{left:.1f}" y="{y}" width="{max(width, 0):.1f}" height="18"/>'
            inside = text(left + width / 2, y + 13, label, anchor="middle", kind="inside")
            parts.append(styled([box], style) + (inside if width > CHARACTER * len(label) + 4 else ""))
            start += part
        parts.append(text(6 + x.share(start) * (right - 6) + 6, y + 13, row.shown, kind="small"))
        y += 21
    parts.append(text((6 + right) / 2, height + 34, x.label, anchor="middle"))
    return svg(parts, height + 42)


def histogram(counts: Sequence[int], edges: Sequence[float], *, label: str, y_label: str, digits: int = 1) -> str:
    """counts[i] lies between edges[i] and edges[i + 1]."""
    y = Axis.over(y_label, [*counts, 1], zero=True)
    top, bottom = 30, 220

    def across(index: float) -> float:
        return LEFT + index / len(counts) * (WIDTH - LEFT - RIGHT)

    parts = [text(4, 13, y_label, kind="strong")]
    for tick in y.ticks:
        if tick % 1:
            continue
        down = bottom - y.share(tick) * (bottom - top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(text(LEFT - 6, down + 4, f"{tick:.0f}", anchor="end"))
    for i, count in enumerate(counts):
        down = bottom - y.share(count) * (bottom - top)
        box = f'x="{across(i):.1f}" width="{across(i + 1) - across(i):.1f}" y="{down:.1f}" height="{bottom - down:.1f}"'
        shape = f'<rect class="bar" {box}/>'
        parts.append(styled([shape], 0))
        parts.append(text(across(i + 0.5), down - 4, str(count), anchor="middle", kind="small") if count else "")
    every = max(1, round(len(edges) / 8))
    for i, edge in enumerate(edges):
        if i % every == 0:
            parts.append(text(across(i), bottom + 17, f"{edge:.{digits}f}", anchor="middle"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, label, anchor="middle"))
    return svg(parts, bottom + 44)
