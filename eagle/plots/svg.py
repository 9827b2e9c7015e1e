"""Plots as SVG text, made here: no library, no font, no request. Points joined by lines, a forest of ratios with their
intervals, stacked bars, a histogram.

Colours are CSS variables (`STYLE`), so that one drawing serves light pages, dark ones and paper (a plotting library writes fixed
colours, and outlines of its font into every drawing); series differ in marker and dash too, so nothing depends on colour alone.
Coordinates are the drawing's own units, WIDTH across.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

WIDTH, LEFT, RIGHT, CHARACTER = 440, 46, 14, 6.3
"""Drawing, its margins, and the average width of a character at the font size of 12."""

LIGHT = ("#0b62b0", "#b8480b", "#00795a", "#9c3d7a", "#80600a", "#4f5a68")
DARK = ("#6fb6f5", "#f2965a", "#42cb9e", "#e393c5", "#dcb84a", "#aeb9c7")
"""Series colours on white and on black; told apart with protanopia and deuteranopia, and by their lightness in print."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4")

STYLE = """\
.plot{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;width:100%;height:auto;display:block}
.plot text{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}
.plot .small{font-size:10.5px}.plot .strong{font-weight:600}
.plot .grid{stroke:var(--line);stroke-width:1}.plot .axis{stroke:var(--faint);stroke-width:1.2}
.plot .ref{stroke:var(--ink);stroke-width:1.4;stroke-dasharray:5 4}
.plot .mark{fill:var(--s);stroke:var(--s);stroke-width:1.4}.plot .hollow{fill:var(--paper)}
.plot .curve{fill:none;stroke:var(--s);stroke-width:2}.plot .whisker{stroke:var(--s);stroke-width:2}
.plot .bar{fill:var(--s);stroke:var(--paper);stroke-width:1.5}
.plot .inside{fill:var(--paper);stroke:none;font-weight:600;font-size:10.5px}
"""


def variables(*, dark: bool) -> str:
    """CSS declarations of the colours that STYLE and the series use."""
    ink, faint, line, paper = (
        ("#e8ebf0", "#98a2b0", "#343b46", "#14171c") if dark else ("#1b1f24", "#626b77", "#dfe3e8", "#ffffff")
    )
    series = "".join(f"--c{i}:{colour};" for i, colour in enumerate(DARK if dark else LIGHT))
    return f"--ink:{ink};--faint:{faint};--line:{line};--paper:{paper};{series}"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: what it says, its range, where its ticks are."""

    label: str
    """With the unit."""
    low: float
    high: float
    ticks: tuple[float, ...]
    scale: Literal["linear", "log"] = "linear"
    digits: int = 1
    """Of the tick labels, behind the point"""

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        low, high, value = (math.log(v) if self.scale == "log" else v for v in (self.low, self.high, value))
        return (value - low) / (high - low)

    def along(self, start: float, end: float) -> Callable[[float], float]:
        """Where a value stands between two places; the ends are the most."""
        return lambda value: start + min(1.0, max(0.0, self.share(value))) * (end - start)

    def said(self, tick: float) -> str:
        return f"{tick:.{self.digits}f}"

    @classmethod
    def over(cls, label: str, values: Sequence[float], *, zero: bool = False, count: int = 5) -> "Axis":
        """A linear axis with round ticks that holds the values (and 0)."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        low = min(low, 0.0) if zero else low
        if high - low < 1e-9:
            low, high = (low, low + 1.0) if zero else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
        step = nice_step((high - low) / count)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(round(step * i, 10) for i in range(first, last + 1))
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        if digits and round(step * 10**digits, 6) % 1:
            digits += 1
        return cls(label=label, low=ticks[0], high=ticks[-1], ticks=ticks, digits=digits)

    @classmethod
    def of_shares(cls, label: str) -> "Axis":
        """0 to 1."""
        return cls(label=label, low=0, high=1, ticks=(0, 0.25, 0.5, 0.75, 1), digits=2)

    @classmethod
    def doubling(cls, label: str, values: Sequence[float]) -> "Axis":
        """A logarithmic axis whose ticks are the values themselves, such as 1, 2, 4, 8."""
        ticks = tuple(sorted(set(values)))
        low, high = (ticks[0], ticks[-1]) if len(ticks) > 1 else (ticks[0] / 2, ticks[0] * 2)
        return cls(label=label, low=low, high=high, ticks=ticks, scale="log", digits=0)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value, with its interval where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points under one name. style: which colour, marker and dash (any non-negative number)."""

    name: str
    points: tuple[Point, ...]
    style: int
    line: bool = True
    markers: bool = True
    notes: tuple[str, ...] = field(default=())
    """What a pointer over each point reads; empty: its coordinates"""


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


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One stacked bar."""

    name: str
    parts: tuple[float, ...]
    labels: tuple[str, ...]
    """What stands inside each part, where there is room"""
    shown: str
    """What stands behind the bar"""


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * (1 - 1e-9))


def line_plot(
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    reference: tuple[float, str] | None = None,
    cross: float | None = None,
) -> str:
    """Points with intervals, joined by lines. reference: a horizontal line and its label; cross: an x to mark on it."""
    legend, top = _legend([(one.name, one.style, one.line, one.markers) for one in series], y=30)
    bottom = top + 200
    across, down = x.along(LEFT + 4, WIDTH - RIGHT - 4), y.along(bottom, top + 10)
    parts = [text(4, 13, y.label, kind="strong"), legend, *_rows_of_grid(y, y.ticks, down)]
    parts.append(_line("axis", (LEFT, WIDTH - RIGHT), (bottom, bottom)))
    parts += [text(across(tick), bottom + 17, x.said(tick), anchor="middle") for tick in _spaced(x.ticks, across)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, x.label, anchor="middle"))
    if reference is not None:
        value, label = reference
        parts.append(_line("ref", (LEFT, WIDTH - RIGHT), (down(value), down(value))))
        parts.append(text(WIDTH - RIGHT - 2, down(value) - 5, label, anchor="end", kind="small"))
        if cross is not None:
            parts.append(_line("axis", (across(cross), across(cross)), (down(value) - 9, down(value) + 9)))
            said = f"crosses at {cross:.1f}"
            parts.append(text(across(cross), down(value) + 21, said, anchor="middle", kind="small"))
    parts += [_drawn(one, across, down) for one in series]
    return svg(parts, bottom + 42)


def _drawn(one: Series, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    places = [(across(point.x), down(point.y)) for point in one.points]
    parts = []
    if one.line and len(places) > 1:
        path = " ".join(f"{a:.1f},{d:.1f}" for a, d in places)
        parts.append(f'<polyline class="curve" points="{path}"{_dash(one.style)}/>')
    for number, (point, (a, d)) in enumerate(zip(one.points, places)):
        if point.low is not None and point.high is not None:
            parts.append(_line("whisker", (a, a), (down(point.low), down(point.high))))
        if one.markers:
            note = one.notes[number] if one.notes else f"{one.name}: {point.x:g}, {point.y:.3g}"
            parts.append(marker(a, d, one.style, note=note))
    return _styled(parts, one.style)


def forest(groups: Sequence[tuple[str, Sequence[Ratio]]], *, x: Axis, reference: tuple[float, str]) -> str:
    """Rows of values with intervals in named groups, against a vertical line."""
    seen = {row.name: row.style for _, rows in groups for row in rows}
    legend, y = _legend([(name, style, False, True) for name, style in seen.items()], y=14)
    right, top = WIDTH - RIGHT - 44, y + 14
    height = top + sum(22 + 16 * len(rows) for _, rows in groups)
    across = x.along(10, right)
    at, label = across(reference[0]), reference[1]
    anchor = "start" if at < 60 else "end" if at > right - 60 else "middle"
    parts = [legend, *_columns_of_grid(x, across, (top, height))]
    parts.append(_line("ref", (at, at), (top - 4, height)))
    parts.append(text(at, top - 8, label, anchor=anchor, kind="small"))
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
        drawn.append(_line("whisker", (across(low), across(high)), (y, y)))
    return _styled([*drawn, marker(across(row.value), y, row.style, note=note)], row.style)


def stacked(rows: Sequence[Stack], *, kinds: Sequence[str], styles: Sequence[int], x: Axis) -> str:
    """Horizontal stacked bars, one below its name each; the parts are of the `kinds`, in the `styles`."""
    parts, x_at = [], 6.0
    for kind, style in zip(kinds, styles):
        parts += [_bar(style, x_at, 4, 14, 12), text(x_at + 19, 14, kind)]
        x_at += 36 + CHARACTER * len(kind)
    right, top = WIDTH - RIGHT - 62, 30.0
    height = top + 42 * len(rows) + 4
    across = x.along(6, right)
    parts += _columns_of_grid(x, across, (top, height))
    for number, row in enumerate(rows):
        y = top + 42 * number + 16
        parts.append(text(6, y, row.name))
        start = 0.0
        for style, part, label in zip(styles, row.parts, row.labels):
            left, width = across(start), across(start + part) - across(start)
            parts.append(_bar(style, left, y + 5, max(width, 0), 18))
            if width > CHARACTER * len(label) + 4:
                parts.append(text(left + width / 2, y + 18, label, anchor="middle", kind="inside"))
            start += part
        parts.append(text(across(start) + 6, y + 18, row.shown, kind="small"))
    parts.append(text((6 + right) / 2, height + 34, x.label, anchor="middle"))
    return svg(parts, height + 42)


def histogram(counts: Sequence[int], edges: Sequence[float], *, label: str, y_label: str, digits: int = 1) -> str:
    """counts[i] lies between edges[i] and edges[i + 1]."""
    y = Axis.over(y_label, [*counts, 1], zero=True)
    bottom = 220
    down, width = y.along(bottom, 30), (WIDTH - LEFT - RIGHT) / len(counts)
    whole = [tick for tick in y.ticks if not tick % 1]
    parts = [text(4, 13, y_label, kind="strong"), *_rows_of_grid(dataclasses.replace(y, digits=0), whole, down)]
    for i, count in enumerate(counts):
        parts.append(_bar(0, LEFT + i * width, down(count), width, bottom - down(count)))
        parts.append(
            text(LEFT + (i + 0.5) * width, down(count) - 4, str(count), anchor="middle", kind="small") if count else ""
        )
    every = max(1, round(len(edges) / 8))
    for i, edge in list(enumerate(edges))[::every]:
        parts.append(text(LEFT + i * width, bottom + 17, f"{edge:.{digits}f}", anchor="middle"))
    parts.append(_line("axis", (LEFT, WIDTH - RIGHT), (bottom, bottom)))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 36, label, anchor="middle"))
    return svg(parts, bottom + 44)


def _rows_of_grid(y: Axis, ticks: Sequence[float], down: Callable[[float], float]) -> list[str]:
    """Horizontal lines with their values at the left."""
    return [
        _line("grid", (LEFT, WIDTH - RIGHT), (down(tick), down(tick)))
        + text(LEFT - 6, down(tick) + 4, y.said(tick), anchor="end")
        for tick in ticks
    ]


def _columns_of_grid(x: Axis, across: Callable[[float], float], ends: tuple[float, float]) -> list[str]:
    """Vertical lines with their values below."""
    return [
        _line("grid", (across(tick), across(tick)), ends)
        + text(across(tick), ends[1] + 16, x.said(tick), anchor="middle")
        for tick in x.ticks
    ]


def _line(kind: str, xs: tuple[float, float], ys: tuple[float, float], more: str = "") -> str:
    return f'<line class="{kind}" x1="{xs[0]:.1f}" x2="{xs[1]:.1f}" y1="{ys[0]:.1f}" y2="{ys[1]:.1f}"{more}/>'


def _bar(style: int, x: float, y: float, width: float, height: float) -> str:
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return _styled([f'<rect class="bar" {box}/>'], style)


def _spaced(ticks: Sequence[float], across: Callable[[float], float], *, room: float = 26) -> list[float]:
    """The ticks whose labels do not touch, from the left."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or across(tick) - across(kept[-1]) >= room:
            kept.append(tick)
    return kept


def _legend(entries: Sequence[tuple[str, int, bool, bool]], *, y: float) -> tuple[str, float]:
    """(name, style, line, marker) in as many rows as needed, from height y on. Returns the SVG and the height below it."""
    parts, x = [], 6.0
    for name, style, line, mark in entries:
        width = 34 + CHARACTER * len(name)
        if x > 6 and x + width > WIDTH:
            x, y = 6.0, y + 18
        sample = _line("curve", (x, x + 22), (y - 4, y - 4), _dash(style)) if line else ""
        sample += marker(x + 11, y - 4, style) if mark else ""
        parts.append(_styled([sample], style) + text(x + 27, y, name))
        x += width + 12
    return "".join(parts), y + 12 if entries else y - 10


def marker(x: float, y: float, style: int, *, note: str = "", size: float = 4.2) -> str:
    """A small shape: circle, square, triangle, diamond, hollow circle, hollow square ... by style."""
    s = size
    hollow = " hollow" if style % 8 >= 4 else ""
    outlines = (
        f'<circle class="mark{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="{s:.1f}">',
        f'<path class="mark{hollow}" d="M{x - s:.1f} {y - s:.1f}h{2 * s:.1f}v{2 * s:.1f}h{-2 * s:.1f}z">',
        f'<path class="mark{hollow}" d="M{x:.1f} {y - 1.2 * s:.1f}l{1.2 * s:.1f} {2.1 * s:.1f}h{-2.4 * s:.1f}z">',
        f'<path class="mark{hollow}" d="M{x:.1f} {y - 1.4 * s:.1f}l{1.3 * s:.1f} {1.4 * s:.1f}l{-1.3 * s:.1f} {1.4 * s:.1f}'
        f'l{-1.3 * s:.1f} {-1.4 * s:.1f}z">',
    )
    shape = outlines[style % 4]
    name = "circle" if style % 4 == 0 else "path"
    return shape[:-1] + "/>" if not note else f"{shape}<title>{html.escape(note)}</title></{name}>"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    """A line of text. kind: small, strong or inside (see STYLE)."""
    of = f' class="{kind}"' if kind else ""
    align = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{align}{of}>{html.escape(words)}</text>'


def _dash(style: int) -> str:
    """The attribute that dashes a series' line."""
    pattern = DASHES[style % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _styled(parts: Sequence[str], style: int) -> str:
    """A group whose --s is the style's colour."""
    return f'<g style="--s:var(--c{style % len(LIGHT)})">{"".join(parts)}</g>'


def svg(parts: Sequence[str], height: float) -> str:
    """The drawing, to stand in a page that has STYLE and the variables; it is hidden from screen readers: name it there."""
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {height:.0f}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'


def standalone(drawing: str, *, title: str) -> str:
    """The drawing as a file of its own, light or dark as the viewer prefers."""
    head, _, rest = drawing.partition(">")
    head = head.replace(' aria-hidden="true" focusable="false"', "").replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" role="img" ', 1
    )
    light, dark = variables(dark=False), variables(dark=True)
    style = f"svg{{{light}background:var(--paper)}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}{STYLE}"
    return f"{head}><title>{html.escape(title)}</title><style>{style}</style>{rest}\n"
