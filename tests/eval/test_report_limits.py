"""The report claims no more than was measured: of curves against 1, and of few requests."""

import copy
import re
from typing import Any

import pytest

from eagle.eval.report.page import render
from eagle.eval.results import summary_markdown
from tests.eval.page import Element, read_page
from tests.eval.report_case import EVIL, full_result
from tests.eval.test_report import table_of


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return full_result()


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> Element:
    return read_page(render(result))


def test_what_is_said_of_a_curve_and_1_is_what_was_measured(page: Element, result: dict[str, Any]) -> None:
    def captions(page: Element) -> dict[str, str]:
        figures = {name: page.by_id(name) for name in ("batch-0", "curve-0")}
        return {name: figure.all("figcaption")[0].text for name, figure in figures.items() if figure is not None}

    said = captions(page)
    assert "The pooled speed-up is not known at batch 8" in said["batch-0"]
    assert "The predicted one falls through 1 at batch 1.5." in said["curve-0"]
    assert "The measured one is not known at batch 2" in said["curve-0"]
    changed = copy.deepcopy(result)
    changed["throughput"][0]["points"].pop()
    (one,) = changed["ledger"]["settings"]
    for point, ratio in zip(one["curve"], (0.9, 1.1)):
        point.update(predicted=ratio, measured=None)
    one["crossing"] = {"predicted": None, "measured": None}
    said = captions(read_page(render(changed)))
    assert "The pooled speed-up falls through 1 at batch 2.7." in said["batch-0"]
    assert "The predicted one rises through 1 or dips: it is below 1 at batch 1, not at batch 2." in said["curve-0"]
    assert "The measured one" not in said["curve-0"], "it was measured nowhere"


def test_fewer_than_six_requests_have_no_interval_anywhere(page: Element, result: dict[str, Any]) -> None:
    """Both categories have three requests, all prompts six."""
    rows = table_of(page, "Speed-up over plain loop, T=0")
    assert {row[0]: "[" in row[2] for row in rows} == {"all prompts": True, "writing": False, EVIL: False}
    by_task = {row[0]: row for row in table_of(page, "EAGLE-2 tree by task, T=0")}
    assert [["[" in cell for cell in row[4:6]] for row in by_task.values()] == [[False] * 2, [False] * 2, [True] * 2]
    forest, batches = (page.by_id(name) for name in ("speedup-plain-t-0", "batch-0"))
    assert forest is not None
    assert batches is not None

    def whiskers(figure: Element) -> int:
        return sum("whisker" in one.attributes.get("class", "").split() for one in figure.all("line"))

    assert whiskers(forest) == 2, "of two methods over all prompts"
    read_out = [one.text for one in forest.all("title")]
    assert len(read_out) == 6
    assert sum("[" in text for text in read_out) == 2
    # 16, 8 and 4 groups of rows.
    assert whiskers(batches) == 2
    assert [row[4].count("[") for row in table_of(page, "Throughput by batch size, T=0")] == [1, 1, 0, 0]
    assert not re.search(r"\| writing \|[^\n]*\[", summary_markdown(result))
