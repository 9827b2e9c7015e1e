"""The figures of speed against batch size and of what verifying costs. See eagle/eval/report/plots.py."""

from collections.abc import Sequence

from eagle.eval.ledger.crossing import against_one
from eagle.eval.report.parts import Plot, label_of, number, pooled, ratio_text, times
from eagle.eval.results_parts import Curve, LedgerSetting
from eagle.eval.statistics import FEWEST
from eagle.plots.svg import Axis, Point, Series, line_plot


def batch_plot(entry: Curve, *, key: str) -> Plot:
    """Speed-up against batch size, as measured."""
    known = [(point.batch, point.speedup) for point in entry.points if point.speedup is not None]
    medians = tuple(
        Point(x=batch, y=ratio.median)
        if ratio.units < FEWEST
        else Point(x=batch, y=ratio.median, low=ratio.low, high=ratio.high)
        for batch, ratio in known
    )
    together = tuple(Point(x=batch, y=ratio.pooled) for batch, ratio in known)
    said = against_one([(p.batch, None if p.speedup is None else p.speedup.pooled) for p in entry.points])
    where = f" The pooled speed-up {said}." if said else ""
    return Plot(
        key=key,
        title=f"Speed-up against batch size, {entry.setting}",
        definition="Plain decoding's time per token / the drafted one's, behind the prefill, of the same prompts in ragged "
        f"batches, both methods alternately. At batch sizes where an answer was not exact there is no ratio.{where}",
        drawing=_against_batch(
            [
                Series(name=f"median, 95% interval of {FEWEST} groups or more", style=0, points=medians, line=False),
                Series(name="pooled", style=1, points=together),
            ],
            batches=[point.batch for point in entry.points],
            cross=entry.crossing,
        ),
        alt="Pooled speed-up by batch size: "
        + ", ".join(f"{batch}: {one.pooled:.2f}" for batch, one in known)
        + f".{where}",
        caption=f"Throughput by batch size, {entry.setting}",
        headings=("batch", "plain tokens/s", "drafted tokens/s", "tau", "median [95% interval]", "pooled", "exact"),
        rows=tuple(
            (
                *(str(point.batch), f"{point.plain_tokens_per_second:.1f}", f"{point.tokens_per_second:.1f}"),
                *(number(point.tau), ratio_text(point.speedup), pooled(point.speedup)),
                "yes" if not point.different else f"{point.different} DIFFERENT",
            )
            for point in entry.points
        ),
    )


def curve_plot(one: LedgerSetting, *, key: str) -> Plot | None:
    """Speed-up against batch size as the ledger predicts it, and as it was measured."""
    points, crossing = one.curve, one.crossing
    if not points or crossing is None:
        return None
    predicted = [(p.batch, p.predicted) for p in points]
    measured = [(p.batch, p.measured) for p in points]
    drawn: dict[str, list[tuple[int, float]]] = {
        "predicted": predicted,
        "measured (pooled)": [(batch, y) for batch, y in measured if y is not None],
    }
    series = [
        Series(name=name, style=style, points=tuple(Point(x=batch, y=y) for batch, y in known))
        for style, (name, known) in enumerate(drawn.items())
        if known
    ]
    said = {"predicted": against_one(predicted), "measured": against_one(measured)}
    where = " ".join(f"The {name} one {words}." for name, words in said.items() if words)
    return Plot(
        key=key,
        title=f"Speed-up against batch size, predicted, {one.setting}",
        definition=f"{label_of(one.main)} over the plain loop behind the prefill, from the parts of a cycle "
        f"at each batch size, beside what throughput measured. {where}",
        drawing=_against_batch(
            series,
            batches=[p.batch for p in points],
            cross=crossing.measured if crossing.measured is not None else crossing.predicted,
        ),
        alt="Predicted speed-up by batch size: "
        + ", ".join(f"{batch}: {y:.2f}" for batch, y in predicted)
        + f". {where}",
        caption=f"Speed-up by batch size, {one.setting}",
        headings=("batch", "predicted", "measured", "diagnosis"),
        rows=tuple((str(p.batch), times(p.predicted), times(p.measured), p.diagnosis.name) for p in points),
    )


def _against_batch(series: Sequence[Series], *, batches: Sequence[int], cross: float | None) -> str:
    heights = [y for one in series for p in one.points for y in (p.y, p.low, p.high) if y is not None]
    return line_plot(
        series,
        x=Axis.doubling("rows decoded together (batch size)", batches),
        y=Axis.over("speed-up over the plain loop (ratio)", [1.0, *heights]),
        reference=(1.0, "plain loop = 1"),
        cross=cross,
    )


def cost_plot(one: LedgerSetting, *, key: str) -> Plot | None:
    """T_target(n) of every batch size with its fit."""
    if not one.target:
        return None
    series = []
    for style, cost in enumerate(one.target):
        points = tuple(Point(x=p.n, y=p.ms, low=p.low, high=p.high) for p in cost.points)
        fit = tuple(Point(x=p.x, y=cost.alpha_ms + cost.ms_per_node * p.x) for p in (points[0], points[-1]))
        series.append(Series(name=f"{cost.rows}, fit", style=style, points=fit, markers=False))
        series.append(Series(name=cost.rows, style=style, points=points, line=False))
    heights = [y for each in series for p in each.points for y in (p.y, p.low, p.high) if y is not None]
    cost = one.target[0]
    line, first, last = f"{cost.alpha_ms:.1f} + {cost.ms_per_node:.2f} n", cost.points[0], cost.points[-1]
    return Plot(
        key=key,
        title=f"What verifying n nodes costs, {one.setting}",
        definition="One target forward over draft trees of n nodes in all rows together, with the LM head on the likely ones: "
        "median and 10% to 90% quantiles, timed on the decoder's own code. Fit: alpha + slope n, least squares of the relative "
        f"error; for {cost.rows} {line} ms.",
        drawing=line_plot(
            series,
            x=Axis.over("n: nodes verified together", [p.n for cost in one.target for p in cost.points], zero=True),
            y=Axis.over("milliseconds", heights, zero=True),
        ),
        alt=f"Time of a target forward by nodes, {len(one.target)} batch sizes; fit of the first: {line} milliseconds. "
        f"From {first.ms:.1f} ms at {first.n} to {last.ms:.1f} ms at {last.n} nodes.",
        caption=f"T_target(n), {one.setting}",
        headings=("batch", "nodes a row", "n", "median ms", "10% to 90%", "beta(n) ms"),
        rows=tuple(
            (
                *(cost.rows, str(p.nodes), str(p.n), number(p.ms, 1)),
                *(f"{p.low:.1f} to {p.high:.1f}", number(p.beta_ms, 3)),
            )
            for cost in one.target
            for p in cost.points
        ),
    )
