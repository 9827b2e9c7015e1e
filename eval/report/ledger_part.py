"""The ledger's part of the report: what a cycle's parts cost, what was predicted and measured, and the diagnosis.

Input: results.json `ledger` (eagle/eval/ledger/ledger.py), one entry per sampling setting.
"""

from collections.abc import Mapping
from typing import Any

from eagle.eval.ledger.crossing import against_one
from eagle.eval.report.parts import Plot, Table, number
from eagle.eval.results import label_of, ratio_text
from eagle.plots.svg_plot import Axis, Point, Series, line_plot

Entry = Mapping[str, Any]


def ledgers(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per setting: name, tables, diagnoses and plots; nothing where there is no ledger."""
    found = (result.get("ledger") or {}).get("settings") or []
    return [
        {
            "setting": one["setting"],
            "cycle": cycle_table(one),
            "prediction": prediction_table(one),
            "rejected": rejected_table(one),
            "diagnoses": [(label_of(entry["method"]), entry["diagnosis"]) for entry in one["methods"]],
            "plots": [
                plot for plot in (cost_plot(one, f"cost-{i}"), curve_plot(one, f"curve-{i}")) if plot is not None
            ],
        }
        for i, one in enumerate(found)
    ]


def cycle_table(one: Entry) -> Table:
    """The parts of every method's cycle."""
    return Table(
        caption=f"A cycle's parts in milliseconds, {one['setting']}",
        headings=("method", "nodes", "draft", "target(n)", "host", "cycle", "plain step", "tau", "pays from tau"),
        rows=tuple(
            (
                label_of(entry["method"]),
                number(entry["nodes"], 1),
                *(number(entry[key], 1) for key in ("draft_ms", "target_ms", "host_ms", "cycle_ms", "plain_ms")),
                number(entry["tau"]),
                number(entry["gain"]["breakeven_tau"]),
            )
            for entry in one["methods"]
        ),
    )


def prediction_table(one: Entry) -> Table:
    """Predicted from one half of the prompts, measured on the other."""
    where = "the other half of the prompts" if one["held_out"] else "the same prompts"
    return Table(
        caption=f"Speed-up over the plain loop behind the prefill: predicted, and measured on {where}, {one['setting']}",
        headings=("method", "predicted", "measured (pooled)", "error", "measured median [95% interval]", "gain"),
        rows=tuple(
            (
                label_of(entry["method"]),
                f"{entry['predicted']:.2f}x",
                f"{entry['measured']['pooled']:.2f}x",
                f"{100 * entry['error']:+.1f}%",
                ratio_text(entry["measured"]),
                "yes" if entry["gain"]["holds"] else "no",
            )
            for entry in one["methods"]
        ),
    )


def rejected_table(one: Entry) -> Table:
    """Nodes that were verified for nothing, and their operations."""
    return Table(
        caption=f"Verified nodes and the operations of rejected ones, {one['setting']}",
        headings=("method", "verified", "accepted", "rejected", "share rejected", "GFLOP rejected"),
        rows=tuple(
            (
                label_of(entry["method"]),
                *(f"{entry['rejected'][f'nodes_{kind}']:,}" for kind in ("verified", "accepted", "rejected")),
                f"{100 * entry['rejected']['share']:.0f}%",
                number(entry["rejected"]["flops_rejected"] / 1e9, 0),
            )
            for entry in one["methods"]
        ),
    )


def cost_plot(one: Entry, key: str) -> Plot | None:
    """T_target(n) of every batch size with its fit."""
    if not one["target"]:
        return None
    series, rows = [], []
    for style, cost in enumerate(one["target"]):
        rows_of = f"{cost['batch']} row{'s' if cost['batch'] > 1 else ''}"
        points = tuple(Point(x=p["n"], y=p["ms"], low=p["low"], high=p["high"]) for p in cost["points"])
        ends = (points[0].x, points[-1].x)
        fit = tuple(Point(x=n, y=cost["alpha_ms"] + cost["ms_per_node"] * n) for n in ends)
        series.append(Series(name=f"{rows_of}, fit", style=style, points=fit, markers=False))
        series.append(Series(name=rows_of, style=style, points=points, line=False))
        for p in cost["points"]:
            rows.append(
                (
                    rows_of,
                    str(p["nodes"]),
                    str(p["n"]),
                    number(p["ms"], 1),
                    f"{p['low']:.1f} to {p['high']:.1f}",
                    number(p["beta_ms"], 3),
                )
            )
    times = [time for cost in one["target"] for p in cost["points"] for time in (p["ms"], p["low"], p["high"])]
    times += [point.y for one_series in series for point in one_series.points]  # the fits too
    counts = [p["n"] for cost in one["target"] for p in cost["points"]]
    first = one["target"][0]
    line = f"{first['alpha_ms']:.1f} + {first['ms_per_node']:.2f} n"
    return Plot(
        key=key,
        title=f"What verifying n nodes costs, {one['setting']}",
        definition="One target forward over draft trees of n nodes in all rows together, with the LM head on "
        "the likely ones: median "
        "and 10% to 90% quantiles, timed on the decoder's own code. Fit: alpha + slope n, least squares of the "
        "relative error; for "
        f"{first['batch']} row{'s' if first['batch'] > 1 else ''} {line} ms.",
        drawing=line_plot(
            series,
            x=Axis.over("n: nodes verified together", counts, zero=True),
            y=Axis.over("milliseconds", times, zero=True),
        ),
        alt=f"Time of a target forward by nodes, {len(one['target'])} batch sizes; fit of the first: {line} milliseconds. "
        f"From {first['points'][0]['ms']:.1f} ms at {first['points'][0]['n']} to {first['points'][-1]['ms']:.1f} ms at "
        f"{first['points'][-1]['n']} nodes.",
        table=Table(
            caption=f"T_target(n), {one['setting']}",
            headings=("batch", "nodes a row", "n", "median ms", "10% to 90%", "beta(n) ms"),
            rows=tuple(rows),
        ),
    )


def curve_plot(one: Entry, key: str) -> Plot | None:
    """Speed-up against batch size as the ledger predicts it, and as it was measured."""
    points = one["curve"]
    if not points:
        return None
    predicted = tuple(Point(x=p["batch"], y=p["predicted"]) for p in points)
    measured = tuple(Point(x=p["batch"], y=p["measured"]) for p in points if p["measured"] is not None)
    series = [Series(name="predicted", style=0, points=predicted)]
    series += [Series(name="measured (pooled)", style=1, points=measured)] if measured else []
    crossing = one["crossing"]
    said = {name: against_one([(p["batch"], p[name]) for p in points]) for name in ("predicted", "measured")}
    where = " ".join(f"The {name} one {words}." for name, words in said.items() if words)
    return Plot(
        key=key,
        title=f"Speed-up against batch size, predicted, {one['setting']}",
        definition=f"{label_of(one['main'])} over the plain loop behind the prefill, from the parts of a cycle "
        f"at each batch size, beside "
        f"what throughput measured. {where}",
        drawing=line_plot(
            series,
            x=Axis.doubling("rows decoded together (batch size)", [p["batch"] for p in points]),
            y=Axis.over("speed-up over the plain loop (ratio)", [1.0, *(p.y for p in predicted + measured)]),
            reference=(1.0, "plain loop = 1"),
            cross=crossing["measured"] if crossing["measured"] is not None else crossing["predicted"],
        ),
        alt="Predicted speed-up by batch size: "
        + ", ".join(f"{p['batch']}: {p['predicted']:.2f}" for p in points)
        + f". {where}",
        table=Table(
            caption=f"Speed-up by batch size, {one['setting']}",
            headings=("batch", "predicted", "measured", "diagnosis"),
            rows=tuple(
                (
                    str(p["batch"]),
                    f"{p['predicted']:.2f}x",
                    "-" if p["measured"] is None else f"{p['measured']:.2f}x",
                    p["diagnosis"]["name"],
                )
                for p in points
            ),
        ),
    )
