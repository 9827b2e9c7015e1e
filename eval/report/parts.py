"""What a report is made of: tables, and plots with their definition, text alternative and table."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as they are shown; the first column heads its row."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: int | None = None
    """The row that the rest is about"""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure of the report."""

    key: str
    """Unique in the page: an HTML id"""
    title: str
    definition: str
    """What exactly is drawn"""
    drawing: str
    """SVG markup"""
    alt: str
    """What a reader who cannot see it is told"""
    table: Table
    """The drawn numbers"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing of natural size, which scrolls where it is wider than the page."""

    key: str
    title: str
    drawing: str
    alt: str
    note: str
    table: Table


def number(value: float | None, digits: int = 2) -> str:
    """A figure as tables show it; "-" for one that does not exist."""
    return "-" if value is None else f"{value:,.{digits}f}"
