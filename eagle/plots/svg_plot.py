"""Plots as SVG text, made here: no library, no font, no request. Axes, palette, and points joined by lines.

Colours are CSS variables (`STYLE`), so that one drawing serves light and dark pages; series differ in marker and dash too,
so nothing depends on colour alone. Bars are in eagle/plots/svg_bars.py. Coordinates are the drawing's own units, WIDTH across.
"""

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
    ink, faint, line, paper = ("#e8ebf0", "#98a2b0", "#343b46", "#14171c") if dark else _LIGHT_INK
    series = "".join(f"--c{i}:{colour};" for i, colour in enumerate(DARK if dark else LIGHT))
    return f"--ink:{ink};--faint:{faint};--line:{line};--paper:{paper};{series}"


_LIGHT_INK = ("#1b1f24", "#626b77", "#dfe3e8", "#ffffff")


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
    legend, top = legend_rows([(one.name, one.style, one.line, one.markers) for one in series], y=30)
    bottom, height = top + 200, top + 242

    def across(value: float) -> float:
        return LEFT + 4 + x.share(value) * (WIDTH - LEFT - RIGHT - 8)

    def down(value: float) -> float:
        return bottom - y.share(value) * (bottom - top - 10)

    parts = [text(4, 13, y.label, kind="strong"), legend]
    for tick in y.ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        )
        parts.append(text(LEFT - 6, down(tick) + 4, f"{tick:.{y.digits}f}", anchor="end"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    for tick in _spaced(x.ticks, across):
        parts.append(text(across(tick), bottom + 17, f"{tick:.{x.digits}f}", anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, height - 6, x.label, anchor="middle"))
    if reference is not None:
        value, label = reference
        parts.append(
            f'<line class="ref" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(value):.1f}" y2="{down(value):.1f}"/>'
        )
        parts.append(text(WIDTH - RIGHT - 2, down(value) - 5, label, anchor="end", kind="small"))
        if cross is not None:
            place = f'x1="{across(cross):.1f}" x2="{across(cross):.1f}" y1="{down(value) - 9:.1f}" y2="{down(value) + 9:.1f}"'
            parts.append(f'<line class="axis" {place}/>')
            parts.append(
                text(across(cross), down(value) + 21, f"crosses at {cross:.1f}", anchor="middle", kind="small")
            )
    for one in series:
        parts.append(_drawn(one, across, down))
    return svg(parts, height)


def _drawn(one: Series, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    places = [(across(point.x), down(point.y)) for point in one.points]
    parts = []
    if one.line and len(places) > 1:
        path = " ".join(f"{a:.1f},{d:.1f}" for a, d in places)
        parts.append(f'<polyline class="curve" points="{path}"{dash(one.style)}/>')
    for number, (point, (a, d)) in enumerate(zip(one.points, places)):
        if point.low is not None and point.high is not None:
            parts.append(
                f'<line class="whisker" x1="{a:.1f}" x2="{a:.1f}" y1="{down(point.low):.1f}" y2="{down(point.high):.1f}"/>'
            )
        if one.markers:
            note = one.notes[number] if one.notes else f"{one.name}: {point.x:g}, {point.y:.3g}"
            parts.append(marker(a, d, one.style, note=note))
    return styled(parts, one.style)


def _spaced(ticks: Sequence[float], across: Callable[[float], float], *, room: float = 26) -> list[float]:
    """The ticks whose labels do not touch, from the left."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or across(tick) - across(kept[-1]) >= room:
            kept.append(tick)
    return kept


def legend_rows(entries: Sequence[tuple[str, int, bool, bool]], *, y: float) -> tuple[str, float]:
    """(name, style, line, marker) in as many rows as needed, from height y on. Returns the SVG and the height below it."""
    parts, x = [], 6.0
    for name, style, line, mark in entries:
        width = 34 + CHARACTER * len(name)
        if x > 6 and x + width > WIDTH:
            x, y = 6.0, y + 18
        sample = f'<line class="curve" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"{dash(style)}/>' if line else ""
        sample += marker(x + 11, y - 4, style) if mark else ""
        parts.append(styled([sample], style) + text(x + 27, y, name))
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


def dash(style: int) -> str:
    """The attribute that dashes a series' line."""
    pattern = DASHES[style % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def styled(parts: Sequence[str], style: int) -> str:
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
