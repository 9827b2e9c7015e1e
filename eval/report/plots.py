"""The plots of one sampling setting: results.json's figures of methods, drawn. Plots of all of it: report_more_plots.py.

Every function returns None (or nothing) where results.json has not what it draws.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle.eval.report.parts import Plot, Table, number
from eagle.eval.results import LABELS, label_of, main_method, ratio_text
from eagle.eval.statistics import FEWEST
from eagle.plots.svg_bars import Ratio, Stack, forest, histogram, stacked
from eagle.plots.svg_plot import Axis, Point, Series, line_plot

Result = Mapping[str, Any]
PARTS = ("verify", "draft", "host")
PART_STYLES = (5, 4, 2)
"""Not those of the first methods"""


def setting_plots(result: Result, setting: str) -> list[Plot]:
    """Speed-up over each baseline, acceptance by depth, time split, tau by request."""
    found = [
        speedup_plot(result, setting, "plain"),
        speedup_plot(result, setting, "hf"),
        acceptance_plot(result, setting),
        time_plot(result, setting),
        request_tau_plot(result, setting),
    ]
    return [plot for plot in found if plot is not None]


def styles(result: Result) -> dict[str, int]:
    """Method -> style: the same throughout the page, the main method first."""
    names = dict.fromkeys(name for body in result["settings"].values() for name in body["methods"])
    main = main_method(next(iter(result["settings"].values())))
    return {
        name: style
        for style, name in enumerate(sorted(names, key=lambda name: (name != main, name in ("hf", "plain"))))
    }


def speedup_plot(result: Result, setting: str, baseline: str) -> Plot | None:
    """A forest of speed-ups: one group per category, one row per method."""
    body, style = result["settings"][setting], styles(result)
    field = f"speedup_{baseline}"
    methods = [
        name
        for name, method in body["methods"].items()
        if name not in ("hf", "plain") and method["overall"][field] is not None
    ]
    if not methods:
        return None
    categories = list(body["methods"][methods[0]]["categories"])
    groups = {"all prompts": "overall"} | ({name: name for name in categories} if len(categories) > 1 else {})
    drawn, rows, values = [], [], [1.0]
    for group, key in groups.items():
        ratios = []
        for name in methods:
            method = body["methods"][name]
            figures = method["overall"] if key == "overall" else method["categories"][key]
            found = figures[field]
            value = None if found is None else found["median"]
            interval = None if found is None or found["units"] < FEWEST else (found["low"], found["high"])
            values += [one for one in (value, *(interval or ())) if one is not None]
            shown = "-" if found is None else f"{found['median']:.2f}x"
            ratios.append(Ratio(name=label_of(name), style=style[name], value=value, interval=interval, shown=shown))
            rows.append(
                (
                    group,
                    label_of(name),
                    ratio_text(found),
                    "-" if found is None else f"{found['pooled']:.2f}x",
                    str(figures["requests"]),
                )
            )
        drawn.append((group, ratios))
    best = max(methods, key=lambda name: body["methods"][name]["overall"][field]["median"])
    said = ratio_text(body["methods"][best]["overall"][field])
    return Plot(
        key=f"speedup-{baseline}-{_slug(setting)}",
        title=f"Speed-up over {LABELS[baseline]} by task",
        definition=f"Median over requests of ({LABELS[baseline]}'s time per token / the method's) on the same "
        f"request, with its 95% bootstrap interval (of {FEWEST} prompts or more, drawn with all their turns). "
        "Right of the line: faster. "
        "Methods that were found not exact are left out; "
        "the column exact of the table above says what each one's text is held against.",
        drawing=forest(drawn, x=Axis.over("speed-up (ratio)", values), reference=(1.0, f"{LABELS[baseline]} = 1")),
        alt=f"Speed-ups of {len(methods)} methods over {LABELS[baseline]} in {len(groups)} groups of prompts. "
        f"Over all prompts the "
        f"highest is {label_of(best)}'s, {said}.",
        table=Table(
            caption=f"Speed-up over {LABELS[baseline]}, {setting}",
            headings=("task", "method", "median [95% interval]", "pooled", "requests"),
            rows=tuple(rows),
        ),
    )


def acceptance_plot(result: Result, setting: str) -> Plot | None:
    """Acceptance by depth of every method that drafts."""
    body, style = result["settings"][setting], styles(result)
    rates = {name: method["overall"]["acceptance"] for name, method in body["methods"].items()}
    rates = {name: values for name, values in rates.items() if values}
    if not rates:
        return None
    deepest = max(len(values) for values in rates.values())
    series = [
        Series(
            name=label_of(name),
            style=style[name],
            points=tuple(Point(x=depth, y=rate) for depth, rate in enumerate(values)),
            notes=tuple(f"{label_of(name)}, depth {depth}: {rate:.2f}" for depth, rate in enumerate(values)),
        )
        for name, values in rates.items()
    ]
    ticks = tuple(float(depth) for depth in range(deepest))
    x = Axis(
        label="depth in the draft tree (0: behind the root)", low=0, high=max(1, deepest - 1), ticks=ticks, digits=0
    )
    y = Axis(label="share accepted", low=0, high=1, ticks=(0, 0.25, 0.5, 0.75, 1), digits=2)
    first = next(iter(rates))
    return Plot(
        key=f"acceptance-{_slug(setting)}",
        title="Acceptance by depth",
        definition="Of the walks that stood at this depth on a node with children, the share that went on to a "
        "child. Of a chain this is "
        "n-alpha, n the depth: acceptance of the draft token behind n others, given that those were accepted.",
        drawing=line_plot(series, x=x, y=y),
        alt=f"Acceptance by depth of {len(rates)} methods; {label_of(first)}: "
        + ", ".join(f"{rate:.2f}" for rate in rates[first])
        + ".",
        table=Table(
            caption=f"Share accepted by depth, {setting}",
            headings=("method", *(f"depth {depth}" for depth in range(deepest))),
            rows=tuple(
                (label_of(name), *(number(values[depth] if depth < len(values) else None) for depth in range(deepest)))
                for name, values in rates.items()
            ),
        ),
    )


def time_plot(result: Result, setting: str) -> Plot | None:
    """Where a cycle's time goes, for every method of our own loop."""
    body = result["settings"][setting]
    rows = {
        name: method["overall"]
        for name, method in body["methods"].items()
        if method["overall"]["shares"] is not None and method["overall"]["step_ms"] is not None
    }
    if not rows:
        return None
    stacks = [
        Stack(
            name=label_of(name),
            parts=tuple(row["step_ms"] * row["shares"][part] for part in PARTS),
            labels=tuple(f"{100 * row['shares'][part]:.0f}%" for part in PARTS),
            shown=f"{row['step_ms']:.1f} ms",
        )
        for name, row in rows.items()
    ]
    longest = max(rows, key=lambda name: rows[name]["step_ms"])
    main = main_method(body)
    shares = rows.get(main, rows[longest])["shares"]
    return Plot(
        key=f"time-{_slug(setting)}",
        title="Where a cycle's time goes",
        definition="A bar is the mean time of one verify step behind the first token (of the plain loop: one "
        "token), in milliseconds, "
        "split as the wall clock behind the prefill is: verify (target forwards and LM head), draft (proposing "
        "trees, feeding the "
        "head), host (the rest).",
        drawing=stacked(
            stacks,
            kinds=PARTS,
            styles=PART_STYLES,
            x=Axis.over("milliseconds per verify step", [sum(stack.parts) for stack in stacks], zero=True, count=4),
        ),
        alt=f"Time per verify step of {len(rows)} methods. {label_of(main if main in rows else longest)}: "
        + ", ".join(f"{part} {100 * shares[part]:.1f}%" for part in PARTS)
        + ".",
        table=Table(
            caption=f"Time per verify step and its split, {setting}",
            headings=("method", "ms per step", *PARTS),
            rows=tuple(
                (label_of(name), f"{row['step_ms']:.1f}", *(f"{100 * row['shares'][part]:.1f}%" for part in PARTS))
                for name, row in rows.items()
            ),
        ),
    )


def request_tau_plot(result: Result, setting: str) -> Plot | None:
    """A histogram of the main method's tau over requests."""
    body = result["settings"][setting]
    main = main_method(body)
    taus = body["methods"][main].get("request_tau") or []
    if not taus:
        return None
    edges = bins(taus)
    counts = [sum(low <= tau < high for tau in taus) for low, high in itertools.pairwise(edges)]
    tau = body["methods"][main]["overall"]["tau"]
    return Plot(
        key=f"request-tau-{_slug(setting)}",
        title=f"Acceptance length (tau) by request, {label_of(main)}",
        definition="Requests by their own tau: tokens per verify step of that request's answer. "
        "1 means that no draft was "
        f"ever right. Pooled over all requests tau is {number(tau)}.",
        drawing=histogram(
            counts,
            edges,
            label="tau of a request (tokens per verify step)",
            y_label="requests",
            digits=2 if edges[1] - edges[0] < 0.1 else 1,
        ),
        alt=f"Histogram of {len(taus)} requests: tau from {min(taus):.2f} to {max(taus):.2f}.",
        table=Table(
            caption=f"Requests by tau, {setting}",
            headings=("tau from", "to below", "requests"),
            rows=tuple(
                (f"{low:.2f}", f"{high:.2f}", str(count))
                for (low, high), count in zip(itertools.pairwise(edges), counts)
            ),
        ),
    )


def bins(values: Sequence[float], *, at_most: int = 12) -> list[float]:
    """Edges of equal bins of a round width that hold all values."""
    if max(values) - min(values) < 0.05:
        first = math.floor(min(values) * 10)
        return [round((first + i) / 10, 10) for i in range(4)]
    axis = Axis.over("", values, count=at_most - 2)
    step = axis.ticks[1] - axis.ticks[0]
    edges = list(axis.ticks)
    return edges if max(values) < edges[-1] else [*edges, round(edges[-1] + step, 10)]


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
