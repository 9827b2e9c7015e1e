"""The table of `eagle tune`: every tree that was decoded with, fastest first."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle.eval.report.parts import number, ratio_text
from eagle.eval.statistics import Estimate


def print_tuning(body: Mapping[str, Any]) -> None:
    """body: an entry of `batches` in what was measured (eagle/eval/tuner/tune.py)."""
    out = Console(highlight=False)
    title = f"{body['setting']}, {body['batch']} row{'s' if body['batch'] > 1 else ''} at a time"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, heading in enumerate(("tree (* chosen)", "tau", "forecast", "tok/s", "over plain [95%]")):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in sorted(body["candidates"], key=lambda one: -one["tokens_per_second"]):
        ratio, expected = row["speedup"], row["forecast"]
        table.add_row(
            ("* " if row["chosen"] else "  ") + row["name"],
            number(row["tau"]),
            "-" if expected is None else f"{expected['speedup']:.2f}x",
            f"{row['tokens_per_second']:.1f}",
            ratio_text(Estimate(**ratio)),
        )
    out.print(table)
    calibration = body["calibration"]
    out.print(
        f"confidence is off from acceptance by {calibration['error']:.3f} on average, over "
        f"{sum(calibration['nodes']):,} nodes; forecast: acceptance replayed from other prompts, at the prices timed",
        markup=False,
        soft_wrap=True,
    )
