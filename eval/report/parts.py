"""What a report is made of: tables, which render once for all their readers; plots with their definition and text
alternative; and the words for figures that all of them share."""

import dataclasses

from rich.table import Table as TerminalTable
from rich.text import Text

from eagle.eval.results import MethodFigures
from eagle.eval.statistics import FEWEST, Estimate

LABELS = {
    "hf": "HF generate",
    "hf-lookup": "HF prompt lookup",
    "hf-assisted": "HF assisted",
    "plain": "plain loop",
    "eagle2": "EAGLE-2 tree",
    "tuned": "tuned tree",
    "default": "default tree",
    "static": "EAGLE-1 tree",
    "chain": "chain",
    "model": "draft model",
    "ngram": "prompt lookup",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as they are shown; the first column heads its row. Headings may say where the terminal breaks them."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: int | None = None
    """The row that the rest is about"""

    def for_terminal(self) -> TerminalTable:
        """Intervals go below their ratios."""
        table = TerminalTable(
            title=self.caption, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
        )
        for i, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if i else "left", no_wrap=i == 0)
        for row in self.rows:
            table.add_row(*(Text(cell.replace(" [", "\n[")) for cell in row))  # a category may be named like markup
        return table

    def markdown(self) -> list[str]:
        """Without its caption."""
        headings = (heading.replace("-\n", "").replace("\n", " ") for heading in self.headings)
        lines = ["| " + " | ".join(headings) + " |", "|---" * len(self.headings) + "|"]
        return lines + ["| " + " | ".join(row) + " |" for row in self.rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot(Table):
    """A figure of the report: a table of what is drawn, and its drawing."""

    key: str
    """Unique in the page: an HTML id"""
    title: str
    definition: str
    """What exactly is drawn"""
    drawing: str
    """SVG markup"""
    alt: str
    """What a reader who cannot see it is told"""


def number(value: float | None, digits: int = 2) -> str:
    """A figure as tables show it; "-" for one that does not exist."""
    return "-" if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    """A ratio; "-" for one that does not exist."""
    return "-" if value is None else f"{value:.2f}x"


def ratio_text(value: Estimate | None) -> str:
    """A speed-up with its interval; alone where there are too few samples for one, or none of them differs."""
    if value is None or value.units < FEWEST or value.low == value.high:
        return "-" if value is None else times(value.median)
    return f"{value.median:.2f}x [{value.low:.2f}, {value.high:.2f}]"


def pooled(value: Estimate | None) -> str:
    """A speed-up over all seconds together."""
    return "-" if value is None else times(value.pooled)


def label_of(name: str) -> str:
    """A method's name as it is shown."""
    drafter, _, rule = name.partition("@")
    return LABELS.get(drafter, drafter) + (f", {rule}" if rule else "")


def exact_text(row: MethodFigures) -> str:
    """How many answers equal those they are held against, or why nothing is."""
    counts = row.exact
    if counts is None:
        return {"distribution": "by law", "lossy": "lossy", "none": ""}.get(row.check, "not checked")
    text = f"{counts.equal}/{counts.requests}"
    routers = f" ({counts.router_ties} of routers)" if counts.router_ties else ""
    text += f" + {counts.ties} ties{routers}" if counts.ties else ""
    return text + (f", {counts.different} DIFFERENT" if counts.different else "")
