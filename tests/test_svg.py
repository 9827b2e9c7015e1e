"""Plots made here: values stand where they belong, nothing depends on colour alone, and the palette can be told apart."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from eagle.plots.svg import (
    DARK,
    LIGHT,
    Axis,
    Point,
    Ratio,
    Series,
    Stack,
    forest,
    histogram,
    line_plot,
    marker,
    stacked,
    standalone,
    variables,
)

# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
}


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    scaled = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1.0, 1.089]
    cube = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    return np.array([116 * cube[1] - 16, 500 * (cube[0] - cube[1]), 200 * (cube[1] - cube[2])])


def colour_of(name: str, *, dark: bool) -> str:
    found = re.search(rf"--{name}:(#\w+);", variables(dark=dark))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_page_and_texts_can_be_read(dark: bool) -> None:
    paper = colour_of("paper", dark=dark)
    for colour in DARK if dark else LIGHT:
        assert contrast(colour, paper) >= 4.5, "a bar's text is the page's colour on it"
    assert contrast(colour_of("ink", dark=dark), paper) >= 7
    assert contrast(colour_of("faint", dark=dark), paper) >= 4.5


@pytest.mark.parametrize("sight", list(DEFICIENCIES))
@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_the_first_colours_differ_for_the_colour_blind(palette: tuple[str, ...], sight: str) -> None:
    seen = [lab(DEFICIENCIES[sight] @ linear(colour)) for colour in palette[:4]]
    for one, other in itertools.combinations(range(4), 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 10, (palette[one], palette[other])


def test_neighbouring_styles_differ_in_shape_and_dash() -> None:
    shapes = [re.sub(r"[\d.-]+", "", marker(0, 0, style)) for style in range(8)]
    assert len(set(shapes)) == 8


def test_points_stand_where_their_values_are() -> None:
    x = Axis(label="x", low=0, high=10, ticks=(0, 5, 10), digits=0)
    y = Axis(label="y", low=0, high=1, ticks=(0, 1), digits=0)
    points = (Point(x=0, y=0), Point(x=5, y=0.5, low=0.25, high=0.75), Point(x=10, y=1))
    drawing = ElementTree.fromstring(line_plot([Series(name="a", style=0, points=points)], x=x, y=y))
    (line,) = drawing.iter("polyline")
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert places[1] == pytest.approx(((places[0][0] + places[2][0]) / 2, (places[0][1] + places[2][1]) / 2), abs=0.1)
    assert places[0][1] > places[2][1], "larger values stand higher"
    labels = {
        one.text: float(one.attrib["x"]) for one in drawing.iter("text") if one.attrib.get("text-anchor") == "middle"
    }
    assert (labels["0"], labels["10"]) == pytest.approx((places[0][0], places[2][0]), abs=0.1)
    (whisker,) = [one for one in drawing.iter("line") if one.attrib["class"] == "whisker"]
    height = places[0][1] - places[2][1]
    assert abs(float(whisker.attrib["y1"]) - float(whisker.attrib["y2"])) == pytest.approx(height / 2, abs=0.2)


@pytest.mark.parametrize(
    ("values", "zero"),
    [
        ([1.0, 1.58], False),
        ([0.0], True),
        ([3.0, 3.0], False),
        ([-2.0, 7.0], False),
        ([1e-4, 9e-4], True),
        ([1e6], True),
    ],
)
def test_an_axis_holds_its_values_between_round_ticks(values: list[float], zero: bool) -> None:
    axis = Axis.over("x", values, zero=zero)
    assert axis.low <= min(values)
    assert max(values) <= axis.high
    assert axis.low < axis.high
    assert (axis.ticks[0], axis.ticks[-1]) == (axis.low, axis.high)
    assert not zero or axis.low <= 0
    assert 2 <= len(axis.ticks) <= 9
    assert [float(f"{tick:.{axis.digits}f}") for tick in axis.ticks] == pytest.approx(axis.ticks), (
        "labels say what they mark"
    )


def test_batch_sizes_are_evenly_spaced_by_doubling() -> None:
    axis = Axis.doubling("batch", [4, 1, 2, 8])
    assert [axis.share(value) for value in (1, 2, 4, 8)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert Axis.doubling("batch", [4]).share(4) == pytest.approx(0.5)


def test_a_forest_shows_every_row_and_leaves_out_what_has_no_value() -> None:
    rows = [
        Ratio(name="a", style=0, value=1.2, interval=(1.1, 1.3), shown="1.20x"),
        Ratio(name="b", style=1, value=None, shown="-"),
        Ratio(name="c", style=2, value=1.05, shown="1.05x"),
    ]
    text = forest([("task <1>", rows)], x=Axis.over("ratio", [1.0, 1.3]), reference=(1.0, "plain = 1"))
    drawing = ElementTree.fromstring(text)
    said = [one.text for one in drawing.iter("text")]
    assert {"task <1>", "1.20x", "-", "plain = 1", "ratio"} <= set(said)
    whiskers = [one for one in drawing.iter("line") if one.attrib["class"] == "whisker"]
    assert len(whiskers) == 1
    assert "a: 1.20 [1.10, 1.30]" in text
    assert "c: 1.05<" in text, "a value without an interval"
    (reference,) = [one for one in drawing.iter("line") if one.attrib["class"] == "ref"]
    assert float(reference.attrib["x1"]) < float(whiskers[0].attrib["x1"]) < float(whiskers[0].attrib["x2"])


@pytest.mark.parametrize(("at", "anchor"), [(1.0, "end"), (0.6, "start"), (0.8, "middle")])
def test_the_references_name_stays_within_the_drawing(at: float, anchor: str) -> None:
    rows = [Ratio(name="a", style=0, value=0.7, interval=(0.65, 0.75), shown="0.70x")]
    text = forest([("all", rows)], x=Axis.over("ratio", [0.6, 1.0]), reference=(at, "plain loop = 1"))
    (label,) = [one for one in ElementTree.fromstring(text).iter("text") if one.text == "plain loop = 1"]
    assert label.attrib.get("text-anchor", "start") == anchor


def test_stacked_parts_are_as_wide_as_they_are_large() -> None:
    row = Stack(name="a", parts=(30.0, 10.0), labels=("75%", "25%"), shown="40 ms")
    x = Axis.over("ms", [40.0], zero=True)
    drawing = ElementTree.fromstring(stacked([row], kinds=("verify", "draft"), styles=(0, 1), x=x))
    boxes = [one.attrib for one in drawing.iter("rect") if one.attrib["height"] == "18.0"]
    widths = [float(box["width"]) for box in boxes]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert float(boxes[1]["x"]) == pytest.approx(float(boxes[0]["x"]) + widths[0], abs=0.2)


def test_a_histograms_bars_are_as_high_as_their_counts() -> None:
    drawing = ElementTree.fromstring(histogram([2, 0, 4], [1.0, 1.5, 2.0, 2.5], label="tau", y_label="requests"))
    heights = [float(one.attrib["height"]) for one in drawing.iter("rect")]
    assert heights == pytest.approx([heights[2] / 2, 0, heights[2]], abs=0.1)


def test_a_drawing_of_its_own_is_named_and_follows_the_viewers_theme() -> None:
    series = [Series(name="a & b", style=0, points=(Point(x=0, y=1),))]
    text = standalone(
        line_plot(series, x=Axis.over("x", [0, 1]), y=Axis.over("y", [0, 1])), title="Tau <over> training"
    )
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["role"] == "img"
    assert root[0].text == "Tau <over> training"
    assert "prefers-color-scheme:dark" in text
    assert "aria-hidden" not in text
