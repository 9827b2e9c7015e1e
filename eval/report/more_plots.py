"""The plots that hold for a whole evaluation: throughput by batch, calibration, tau over training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle.eval.ledger.crossing import against_one
from eagle.eval.report.parts import Plot, Table, number
from eagle.eval.results import label_of, ratio_text
from eagle.eval.statistics import FEWEST
from eagle.plots.svg_plot import Axis, Point, Series, line_plot
from eagle.plots.tau import drawing as tau_drawing

Result = Mapping[str, Any]


def batch_plots(result: Result) -> list[Plot]:
    """Speed-up against batch size, one plot per entry of `throughput` (a sampling setting)."""
    return [_batch_plot(entry, key=f"batch-{number}") for number, entry in enumerate(result.get("throughput") or [])]


def _batch_plot(entry: Mapping[str, Any], *, key: str) -> Plot:
    points, crossing = entry["points"], entry["crossing"]
    known = [point for point in points if point["speedup"] is not None]
    batches = [float(point["batch"]) for point in points]
    medians = tuple(_median_point(point["batch"], point["speedup"]) for point in known)
    heights = [p["speedup"]["pooled"] for p in known]
    heights += [y for point in medians for y in (point.y, point.low, point.high) if y is not None]
    series = [
        Series(name=f"median, 95% interval of {FEWEST} groups or more", style=0, points=medians, line=False),
        Series(
            name="pooled",
            style=1,
            points=tuple(Point(x=p["batch"], y=p["speedup"]["pooled"]) for p in known),
        ),
    ]
    said = against_one([(p["batch"], None if p["speedup"] is None else p["speedup"]["pooled"]) for p in points])
    where = f" The pooled speed-up {said}." if said else ""
    return Plot(
        key=key,
        title=f"Speed-up against batch size, {entry['setting']}",
        definition="Plain decoding's time per token / the drafted one's, behind the prefill, of the same "
        "prompts in ragged batches, "
        f"both methods alternately. At batch sizes where an answer was not exact there is no ratio.{where}",
        drawing=line_plot(
            series,
            x=Axis.doubling("rows decoded together (batch size)", batches),
            y=Axis.over("speed-up over the plain loop (ratio)", [1.0, *heights]),
            reference=(1.0, "plain loop = 1"),
            cross=crossing,
        ),
        alt="Pooled speed-up by batch size: "
        + ", ".join(f"{point['batch']}: {point['speedup']['pooled']:.2f}" for point in known)
        + f".{where}",
        table=Table(
            caption=f"Throughput by batch size, {entry['setting']}",
            headings=("batch", "plain tokens/s", "drafted tokens/s", "tau", "median [95% interval]", "pooled", "exact"),
            rows=tuple(
                (
                    str(point["batch"]),
                    f"{point['plain_tokens_per_second']:.1f}",
                    f"{point['tokens_per_second']:.1f}",
                    number(point["tau"]),
                    ratio_text(point["speedup"]),
                    "-" if point["speedup"] is None else f"{point['speedup']['pooled']:.2f}x",
                    "yes" if not point["different"] else f"{point['different']} DIFFERENT",
                )
                for point in points
            ),
        ),
    )


def _median_point(batch: float, speedup: Mapping[str, Any]) -> Point:
    """With its interval, where there are groups enough for one."""
    if speedup["units"] < FEWEST:
        return Point(x=batch, y=speedup["median"])
    return Point(x=batch, y=speedup["median"], low=speedup["low"], high=speedup["high"])


def calibration_plot(bins: Sequence[Mapping[str, Any]], *, key: str, source: str) -> Plot | None:
    """bins: confidence (mean), nodes, accepted (share), and calibrated where there is a fit. source: whose nodes they are."""
    if not bins:
        return None
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    fitted = all("calibrated" in one for one in bins)
    series = [
        Series(name="perfectly calibrated", style=5, points=(Point(x=0, y=0), Point(x=1, y=1)), markers=False),
        Series(
            name="measured",
            style=0,
            points=tuple(_share_point(one) for one in bins),
            line=not fitted,
            notes=tuple(
                f"confidence {one['confidence']:.2f}: {one['accepted']:.2f} of {one['nodes']} nodes accepted"
                for one in bins
            ),
        ),
    ]
    if fitted:
        fit = tuple(Point(x=one["confidence"], y=one["calibrated"]) for one in bins)
        series.append(Series(name="calibrated", style=1, points=fit, markers=False))
    nodes = sum(one["nodes"] for one in bins)
    mean = sum(one["nodes"] * one["confidence"] for one in bins) / nodes
    share = sum(one["nodes"] * one["accepted"] for one in bins) / nodes
    lean = "surer than it is right" if mean > share else "less sure than it is right"
    return Plot(
        key=key,
        title="Is the draft's confidence right?",
        definition="Drafted nodes by path confidence (the product of the draft's probabilities along the path): the share of "
        "them that verification accepted. Lines: Wilson 95% intervals, as if nodes were independent (those of one tree are not). "
        "Below the diagonal the head is too sure of itself. "
        f"{source}",
        drawing=line_plot(
            series,
            x=Axis(label="path confidence of the draft", low=0, high=1, ticks=ticks, digits=2),
            y=Axis(label="share of nodes accepted", low=0, high=1, ticks=ticks, digits=2),
        ),
        alt=f"{nodes:,} drafted nodes, mean confidence {mean:.2f}, {share:.2f} of them accepted: the head is {lean}.",
        table=Table(
            caption="Acceptance by confidence",
            headings=("mean confidence", "nodes", "share accepted", *(("calibrated",) if fitted else ())),
            rows=tuple(
                (
                    f"{one['confidence']:.3f}",
                    f"{one['nodes']:,}",
                    f"{one['accepted']:.3f}",
                    *((f"{one['calibrated']:.3f}",) if fitted else ()),
                )
                for one in bins
            ),
        ),
    )


def _share_point(one: Mapping[str, Any]) -> Point:
    low, high = wilson(one["accepted"], one["nodes"])
    return Point(x=one["confidence"], y=one["accepted"], low=low, high=high)


def wilson(share: float, count: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval of a share of `count` trials."""
    middle, half = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / (1 + z * z / count)), min(1.0, (middle + half) / (1 + z * z / count))


def training_plot(result: Result) -> Plot | None:
    """Tau over the training of the head, estimated and decoded."""
    rows = (result.get("training") or {}).get("tau") or []
    if not rows:
        return None
    decoded = [row["decoded_tau"] for row in rows if row["decoded_tau"] is not None]
    said = f"decoded tau from {decoded[0]:.2f} to {decoded[-1]:.2f}" if decoded else "only estimated tau"
    return Plot(
        key="training-tau",
        title="Acceptance length (tau) over training",
        definition="Decoded tau: of the real decoder on held-out prompts. Estimated tau: of a chain on "
        "validation documents, teacher-forced, "
        "from agreement with the target's greedy choice; nothing is cut off of it.",
        drawing=tau_drawing(rows),
        alt=f"Tau at {len(rows)} steps of training, up to step {rows[-1]['step']}: {said}.",
        table=Table(
            caption="Tau by optimiser step",
            headings=("step", "decoded tau", "estimated tau"),
            rows=tuple(
                (str(row["step"]), number(row["decoded_tau"], 3), number(row["estimated_tau"], 3)) for row in rows
            ),
        ),
    )


def tree_calibration(result: Result) -> Plot | None:
    """Calibration over the recorded answers' trees."""
    trees = result.get("trees") or []
    if not trees:
        return None
    one = trees[0]
    return calibration_plot(
        one["calibration"],
        key="calibration",
        source=f"All drafted nodes of one answer ({one['verify_steps']} verify steps of "
        f"{label_of(one['method'])}, {one['setting']}): a "
        "sketch, not a calibration set.",
    )
