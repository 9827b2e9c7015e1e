"""The figures of the report: each is one function that gives its drawing, its words and its table, or None where results.json
has not what it draws. Those of the costs are in cost_plots.py."""

import itertools
import math
from collections.abc import Sequence

from eagle.eval.report.parts import LABELS, Plot, label_of, number, pooled, ratio_text, times
from eagle.eval.results import Results, SettingResult
from eagle.eval.results_parts import Bin
from eagle.eval.statistics import FEWEST, Estimate
from eagle.plots.svg import Axis, Point, Ratio, Series, Stack, forest, histogram, line_plot, stacked
from eagle.plots.tau import drawing as tau_drawing

PARTS = {"verify": 5, "draft": 4, "host": 2}
"""Of a cycle, in styles that are not those of the first methods."""


def setting_plots(result: Results, setting: str) -> list[Plot]:
    """Speed-up over each baseline, acceptance by depth, time split, tau by request."""
    body, style = result.settings[setting], styles(result)
    found = [
        *(speedup_plot(body, style, baseline, setting) for baseline in ("plain", "hf")),
        *(acceptance_plot(body, style, setting), time_plot(body, setting), request_tau_plot(body, setting)),
    ]
    return [plot for plot in found if plot is not None]


def styles(result: Results) -> dict[str, int]:
    """Method -> style: the same throughout the page, the main method first."""
    names = dict.fromkeys(name for body in result.settings.values() for name in body.methods)
    main = next(iter(result.settings.values())).main
    ordered = sorted(names, key=lambda name: (name != main, name in ("hf", "plain")))
    return {name: style for style, name in enumerate(ordered)}


def speedup_plot(body: SettingResult, style: dict[str, int], baseline: str, setting: str) -> Plot | None:
    """A forest of speed-ups: one group per category, one row per method."""

    def over(name: str, group: str = "all prompts") -> tuple[Estimate | None, int]:
        row = body.methods[name].categories.get(group, body.methods[name].overall)
        return row.speedup_plain if baseline == "plain" else row.speedup_hf, row.requests

    best = {name: ratio.median for name in body.methods if name not in ("hf", "plain") and (ratio := over(name)[0])}
    if not best:
        return None
    categories = list(body.methods[next(iter(best))].categories)
    groups = ["all prompts", *(categories if len(categories) > 1 else [])]
    drawn, rows, values = [], [], [1.0]
    for group in groups:
        ratios = []
        for name in best:
            found, requests = over(name, group)
            interval = None if found is None or found.units < FEWEST else (found.low, found.high)
            value = None if found is None else found.median
            values += [one for one in (value, *(interval or ())) if one is not None]
            shown, label = times(value), label_of(name)
            ratios.append(Ratio(name=label, style=style[name], value=value, interval=interval, shown=shown))
            rows.append((group, label, ratio_text(found), pooled(found), str(requests)))
        drawn.append((group, ratios))
    highest, against = max(best, key=lambda name: best[name]), LABELS[baseline]
    return Plot(
        key=f"speedup-{baseline}-{_slug(setting)}",
        title=f"Speed-up over {against} by task",
        definition=f"Median over requests of ({against}'s time per token / the method's) on the same "
        f"request, with its 95% bootstrap interval (of {FEWEST} prompts or more, drawn with all their turns). "
        "Right of the line: faster. Methods that were found not exact are left out; "
        "the column exact of the table above says what each one's text is held against.",
        drawing=forest(drawn, x=Axis.over("speed-up (ratio)", values), reference=(1.0, f"{against} = 1")),
        alt=f"Speed-ups of {len(best)} methods over {against} in {len(groups)} groups of prompts. Over all prompts the "
        f"highest is {label_of(highest)}'s, {ratio_text(over(highest)[0])}.",
        caption=f"Speed-up over {against}, {setting}",
        headings=("task", "method", "median [95% interval]", "pooled", "requests"),
        rows=tuple(rows),
    )


def acceptance_plot(body: SettingResult, style: dict[str, int], setting: str) -> Plot | None:
    """Acceptance by depth of every method that drafts."""
    rates = {name: method.overall.acceptance for name, method in body.methods.items() if method.overall.acceptance}
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
    depths = "depth in the draft tree (0: behind the root)"
    ticks = tuple(float(depth) for depth in range(deepest))
    first = next(iter(rates))
    return Plot(
        key=f"acceptance-{_slug(setting)}",
        title="Acceptance by depth",
        definition="Of the walks that stood at this depth on a node with children, the share that went on to a child. Of a "
        "chain this is n-alpha, n the depth: acceptance of the draft token behind n others, given that those were accepted.",
        drawing=line_plot(
            series,
            x=Axis(label=depths, low=0, high=max(1, deepest - 1), ticks=ticks, digits=0),
            y=Axis.of_shares("share accepted"),
        ),
        alt=f"Acceptance by depth of {len(rates)} methods; {label_of(first)}: {', '.join(map(number, rates[first]))}.",
        caption=f"Share accepted by depth, {setting}",
        headings=("method", *(f"depth {depth}" for depth in range(deepest))),
        rows=tuple(
            (label_of(name), *map(number, values), *("-" for _ in range(deepest - len(values))))
            for name, values in rates.items()
        ),
    )


def time_plot(body: SettingResult, setting: str) -> Plot | None:
    """Where a cycle's time goes, for every method of our own loop."""
    rows = {
        name: (figures.step_ms, figures.shares)
        for name, method in body.methods.items()
        for figures in (method.overall,)
        if figures.shares is not None and figures.step_ms is not None
    }
    if not rows:
        return None
    stacks = [
        Stack(
            name=label_of(name),
            parts=tuple(step * shares[part] for part in PARTS),
            labels=tuple(f"{100 * shares[part]:.0f}%" for part in PARTS),
            shown=f"{step:.1f} ms",
        )
        for name, (step, shares) in rows.items()
    ]
    percent = {name: [f"{100 * shares[part]:.1f}%" for part in PARTS] for name, (_, shares) in rows.items()}
    told = body.main if body.main in rows else max(rows, key=lambda name: rows[name][0])
    return Plot(
        key=f"time-{_slug(setting)}",
        title="Where a cycle's time goes",
        definition="A bar is the mean time of one verify step behind the first token (of the plain loop: one token), in "
        "milliseconds, split as the wall clock behind the prefill is: verify (target forwards and LM head), draft (proposing "
        "trees, feeding the head), host (the rest).",
        drawing=stacked(
            stacks,
            kinds=list(PARTS),
            styles=list(PARTS.values()),
            x=Axis.over("milliseconds per verify step", [sum(stack.parts) for stack in stacks], zero=True, count=4),
        ),
        alt=f"Time per verify step of {len(rows)} methods. {label_of(told)}: "
        + ", ".join(map(" ".join, zip(PARTS, percent[told])))
        + ".",
        caption=f"Time per verify step and its split, {setting}",
        headings=("method", "ms per step", *PARTS),
        rows=tuple((label_of(name), f"{step:.1f}", *percent[name]) for name, (step, _) in rows.items()),
    )


def request_tau_plot(body: SettingResult, setting: str) -> Plot | None:
    """A histogram of the main method's tau over requests."""
    taus = body.methods[body.main].request_tau
    if not taus:
        return None
    edges = bins(taus)
    counts = [sum(low <= tau < high for tau in taus) for low, high in itertools.pairwise(edges)]
    return Plot(
        key=f"request-tau-{_slug(setting)}",
        title=f"Acceptance length (tau) by request, {label_of(body.main)}",
        definition="Requests by their own tau: tokens per verify step of that request's answer. 1 means that no draft was "
        f"ever right. Pooled over all requests tau is {number(body.main_figures.tau)}.",
        drawing=histogram(
            counts,
            edges,
            label="tau of a request (tokens per verify step)",
            y_label="requests",
            digits=2 if edges[1] - edges[0] < 0.1 else 1,
        ),
        alt=f"Histogram of {len(taus)} requests: tau from {min(taus):.2f} to {max(taus):.2f}.",
        caption=f"Requests by tau, {setting}",
        headings=("tau from", "to below", "requests"),
        rows=tuple((f"{low:.2f}", f"{high:.2f}", str(n)) for (low, high), n in zip(itertools.pairwise(edges), counts)),
    )


def bins(values: Sequence[float], *, at_most: int = 12) -> list[float]:
    """Edges of equal bins of a round width that hold all values."""
    if max(values) - min(values) < 0.05:
        first = math.floor(min(values) * 10)
        return [round((first + i) / 10, 10) for i in range(4)]
    edges = list(Axis.over("", values, count=at_most - 2).ticks)
    return edges if max(values) < edges[-1] else [*edges, round(2 * edges[-1] - edges[-2], 10)]


def calibration_plot(result: Results) -> Plot | None:
    """Acceptance by confidence: of the tuner's held-out prompts where the head was tuned, else of the recorded answer."""
    tuned = result.tune.measured.batches if result.tune is not None else []
    found = next((one for one in tuned if one.calibration.confidence), None)
    if found is not None:
        columns = found.calibration
        bins = [
            Bin(confidence=confidence, accepted=accepted, calibrated=calibrated, nodes=nodes)
            for confidence, accepted, calibrated, nodes in zip(
                columns.confidence, columns.accepted, columns.calibrated, columns.nodes
            )
        ]
        source = (
            f"From the tuner's prompts, {found.setting}; mean absolute difference {columns.error:.3f}. The calibrated line is a "
            "monotone fit. The tuner prices trees by what they would have had accepted, prompt by prompt."
        )
    elif result.trees and result.trees[0].calibration:
        one = result.trees[0]
        bins = one.calibration
        source = (
            f"All drafted nodes of one answer ({one.verify_steps} verify steps of {label_of(one.method)}, {one.setting}): a "
            "sketch, not a calibration set."
        )
    else:
        return None
    fitted = found is not None
    measured = Series(
        name="measured",
        style=0,
        points=tuple(_share_point(one) for one in bins),
        line=not fitted,
        notes=tuple(
            f"confidence {one.confidence:.2f}: {one.accepted:.2f} of {one.nodes} nodes accepted" for one in bins
        ),
    )
    diagonal = Series(name="perfectly calibrated", style=5, points=(Point(x=0, y=0), Point(x=1, y=1)), markers=False)
    fit = tuple(Point(x=one.confidence, y=one.calibrated) for one in bins if one.calibrated is not None)
    fits = [Series(name="calibrated", style=1, points=fit, markers=False)] if fit else []
    nodes = sum(one.nodes for one in bins)
    mean = sum(one.nodes * one.confidence for one in bins) / nodes
    share = sum(one.nodes * one.accepted for one in bins) / nodes
    lean = "surer than it is right" if mean > share else "less sure than it is right"
    return Plot(
        key="calibration",
        title="Is the draft's confidence right?",
        definition="Drafted nodes by path confidence (the product of the draft's probabilities along the path): the share of "
        "them that verification accepted. Lines: Wilson 95% intervals, as if nodes were independent (those of one tree are not). "
        f"Below the diagonal the head is too sure of itself. {source}",
        drawing=line_plot(
            [diagonal, measured, *fits],
            x=Axis.of_shares("path confidence of the draft"),
            y=Axis.of_shares("share of nodes accepted"),
        ),
        alt=f"{nodes:,} drafted nodes, mean confidence {mean:.2f}, {share:.2f} of them accepted: the head is {lean}.",
        caption="Acceptance by confidence",
        headings=("mean confidence", "nodes", "share accepted", *(("calibrated",) if fitted else ())),
        rows=tuple(
            (
                *(f"{one.confidence:.3f}", f"{one.nodes:,}", f"{one.accepted:.3f}"),
                *((number(one.calibrated, 3),) if fitted else ()),
            )
            for one in bins
        ),
    )


def _share_point(one: Bin, *, z: float = 1.96) -> Point:
    """With Wilson's 95% interval."""
    share, n = one.accepted, one.nodes
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + side) / (1 + z * z / n) for side in (-half, half))
    return Point(x=one.confidence, y=share, low=max(0.0, low), high=min(1.0, high))


def training_plot(result: Results) -> Plot | None:
    """Tau over the training of the head, estimated and decoded."""
    rows = result.training.tau if result.training is not None else []
    if not rows:
        return None
    decoded = [row.decoded_tau for row in rows if row.decoded_tau is not None]
    said = f"decoded tau from {decoded[0]:.2f} to {decoded[-1]:.2f}" if decoded else "only estimated tau"
    return Plot(
        key="training-tau",
        title="Acceptance length (tau) over training",
        definition="Decoded tau: of the real decoder on held-out prompts. Estimated tau: of a chain on validation documents, "
        "teacher-forced, from agreement with the target's greedy choice; nothing is cut off of it.",
        drawing=tau_drawing([vars(row) for row in rows]),
        alt=f"Tau at {len(rows)} steps of training, up to step {rows[-1].step}: {said}.",
        caption="Tau by optimiser step",
        headings=("step", "decoded tau", "estimated tau"),
        rows=tuple((str(row.step), number(row.decoded_tau, 3), number(row.estimated_tau, 3)) for row in rows),
    )


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
