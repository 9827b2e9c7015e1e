"""report.html: well-formed, complete, escaped, readable without seeing it, and every number of it is results.json's."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle.cli.main import main
from eagle.errors import EagleError
from eagle.eval.report.page import REPORT, _letters, differences, render, rerender, write_results
from eagle.eval.report.plots import bins
from eagle.eval.report.summary import summary_markdown
from eagle.eval.report.tables import comparison
from eagle.eval.report.verdict import tiles, verdict
from eagle.eval.results import Results, load_results
from eagle.eval.results import read_results as read_or_none
from tests.eval.page import Element, rows_of
from tests.eval.report_case import EVIL, OVERALL, changed, full_result, page_of, read_results

METHODS = "settings/T=0/methods"


@pytest.fixture(scope="module")
def result() -> Results:
    return read_results(full_result())


@pytest.fixture(scope="module")
def page() -> Element:
    return page_of(full_result())


def table_of(page: Element, caption: str) -> list[list[str]]:
    (table,) = [table for table in page.all("table") if table.all("caption")[0].text.startswith(caption)]
    return rows_of(table)


def verdict_of(changes: dict[str, Any]) -> str:
    return " ".join(verdict(read_results(changed(changes)).settings["T=0"]))


def test_the_page_is_one_document_with_headings_in_order(page: Element) -> None:
    (html,) = page.all("html")
    assert html.attributes["lang"] == "en"
    levels = [int(one.tag[1]) for one in page.all() if re.fullmatch("h[1-6]", one.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    assert {2, 3, 4} <= set(levels)


def test_every_reference_within_the_page_leads_somewhere(page: Element) -> None:
    ids = {one.attributes["id"] for one in page.all() if "id" in one.attributes}
    links = [one.attributes["href"] for one in page.all("a")]
    assert "#main" in links
    assert all(link.removeprefix("#") in ids for link in links)
    for one in page.all():
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(one.attributes.get(name, "").split()) <= ids
    (nav,) = page.all("nav")
    (main_part,) = page.all("main")
    sections = [one.attributes["id"] for one in main_part.all("section")]
    assert [link.attributes["href"].removeprefix("#") for link in nav.all("a")] == sections


def test_nothing_is_fetched_from_anywhere(page: Element, result: Results) -> None:
    for one in page.all():
        assert not {"src", "srcset", "data", "action", "poster", "background"} & one.attributes.keys(), one.tag
        assert one.tag not in ("img", "iframe", "object", "embed", "base")
        assert one.attributes.get("href", "#").startswith(("#", "data:,"))
    text = render(result)
    assert "://" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)
    policy = next(one for one in page.all("meta") if one.attributes.get("http-equiv") == "Content-Security-Policy")
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_pictures_have_a_text_alternative_and_a_table(page: Element) -> None:
    figures = page.all("figure")
    assert len(figures) >= 14
    for figure in figures:
        (image,) = [one for one in figure.all() if one.attributes.get("role") == "img"]
        assert len(image.attributes["aria-label"]) > 30
        assert all(svg.attributes["aria-hidden"] == "true" for svg in image.all("svg"))
        assert len(image.all("svg")) == 1
        (details,) = figure.all("details")
        assert rows_of(details.all("table")[0])
    assert all(any(each in svg.attributes["class"] for each in ("plot", "tree")) for svg in page.all("svg"))


def test_tables_have_captions_and_headed_rows_and_columns_and_scroll_in_boxes_of_their_own(page: Element) -> None:
    for table in page.all("table"):
        assert table.all("caption")[0].text
        headings = [cell for cell in table.all("th") if cell.attributes["scope"] == "col"]
        assert headings
        for row in table.all("tbody")[0].all("tr"):
            cells = [cell for cell in row.children if isinstance(cell, Element)]
            assert [cell.tag for cell in cells] == ["th"] + ["td"] * (len(headings) - 1)
            assert cells[0].attributes["scope"] == "row"
    boxes = [one for one in page.all() if "scroll" in one.attributes.get("class", "").split()]
    assert sum(len(box.all("table")) for box in boxes) == len(page.all("table"))
    for box in boxes:
        assert box.attributes["tabindex"] == "0", "what scrolls must be reachable by keyboard"
        assert box.attributes["role"] == "region"


@pytest.mark.parametrize("section", ["record", "throughput", "ledger", "trees", "tune"])
def test_a_section_is_there_when_its_data_is(page: Element, section: str) -> None:
    assert page.by_id(section) is not None
    without = page_of(changed({section: ...}))
    assert without.by_id(section) is None
    assert f"#{section}" not in [one.attributes["href"] for one in without.all("a")]
    empty = [] if isinstance(full_result()[section], list) else None
    assert page_of({**full_result(), section: empty}).by_id(section) is None


def test_the_heads_section_shows_what_there_is_of_training_and_calibration(page: Element) -> None:
    assert page.by_id("training-tau") is not None
    assert page.by_id("calibration") is not None
    bare: dict[str, Any] = {"trees": ..., "tune": ...}
    assert page_of(changed(bare)).by_id("calibration") is None
    assert page_of(changed({**bare, "training": ...})).by_id("head") is None


def test_a_plot_is_there_when_its_data_is(page: Element) -> None:
    names = ("hf", "plain", "eagle2", "chain")
    bare = {f"{METHODS}/{name}/overall": {"speedup_hf": None, "shares": None, "acceptance": []} for name in names}
    bare |= {f"{METHODS}/{name}/request_tau": [] for name in names}
    gone = {"speedup-hf-t-0", "acceptance-t-0", "time-t-0", "request-tau-t-0"}
    before, after = ({one.attributes["id"] for one in each.all("figure")} for each in (page, page_of(changed(bare))))
    assert before - after == gone
    assert "speedup-plain-t-0" in after


def test_texts_are_escaped_wherever_they_come_from(page: Element) -> None:
    (script,) = page.all("script")
    assert "eagle-theme" in script.text
    assert "alert" not in script.text
    for section in ("trees", "setting-t-0"):
        part = page.by_id(section)
        assert part is not None
        assert EVIL in part.text, "shown as it is, once escaped"
    answer = next(one for one in page.all("p") if one.attributes.get("class") == "answer")
    assert answer.text == f"The on\n{EVIL} mat"
    kinds = [one.attributes["class"] for one in answer.all("span")]
    assert kinds == ["plain", "drafted", "drafted", "bonus", "correction"]


def test_the_numbers_are_those_of_results_json(page: Element, result: Results) -> None:
    body = result.settings["T=0"]
    overall, ratio = body.main_figures, body.main_figures.speedup_plain
    assert ratio is not None
    shown = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    methods = {row[0]: row for row in table_of(page, "Methods side by side, T=0")}
    assert methods["EAGLE-2 tree"][1:5] == [
        *(f"{overall.tokens_per_second:.1f}", f"{overall.ms_per_token:.1f}", f"{overall.first_token_ms:.0f} ms"),
        f"{overall.tau:.2f}",
    ]
    assert methods["EAGLE-2 tree"][6] == shown
    speedups = table_of(page, "Speed-up over plain loop, T=0")
    assert ["all prompts", "EAGLE-2 tree", shown, f"{ratio.pooled:.2f}x", "6"] in speedups
    rates = {row[0]: row[1:] for row in table_of(page, "Share accepted by depth, T=0")}
    assert rates["EAGLE-2 tree"] == [f"{rate:.2f}" for rate in overall.acceptance]
    split = {row[0]: row[1:] for row in table_of(page, "Time per verify step and its split, T=0")}
    parts = [f"{100 * share:.1f}%" for share in (overall.shares or {}).values()]
    assert split["EAGLE-2 tree"] == [f"{overall.step_ms:.1f}", *parts]
    taus, histogram = body.methods["eagle2"].request_tau, table_of(page, "Requests by tau, T=0")
    assert sum(int(count) for *_, count in histogram) == len(taus) == 6
    for low, high, count in histogram:
        assert int(count) == sum(float(low) <= tau < float(high) for tau in taus)
    record = {row[0]: row for row in table_of(page, "Record table")}["EAGLE-2 tree, T=0"]
    assert result.record is not None
    noted = result.record["T=0"]["eagle2"]
    latencies = [*noted.baseline_inter_token_ms.values(), noted.inter_token_ms]
    assert record[1:4] == [f"{latency:.1f}" for latency in latencies]
    assert record[5] == "512"


TABLES = {
    "Throughput by batch size, T=0": {
        1: ["2", "40.0", "42.0", "1.58", "1.06x [1.00, 1.11]", "1.05x", "yes"],
        3: ["8", "20.0", "24.0", "1.58", "-", "-", "3 DIFFERENT"],
    },
    "Tau by optimiser step": {0: ["100", "1.210", "-"], 1: ["200", "1.430", "1.520"]},
    "Trees tried on A CPU, 2 threads, engine eager, float32": {
        0: ["no drafting", "T=0", "1", "1.00", "30.0", "1.00x", "1.00x", ""],
        1: ["8 nodes", "T=0", "1", "1.58", "33.0", "-", "1.10x [1.02, 1.15]", "kept"],
    },
    "Acceptance by confidence": {0: ["0.050", "900", "0.040", "0.040"], 1: ["0.600", "100", "0.700", "0.700"]},
    "Speed-up over the plain loop behind the prefill: predicted, and measured on the other half of the prompts, T=0": {
        0: ["EAGLE-2 tree", "1.07x", "1.03x", "+3.9%", "1.02x [0.98, 1.06]", "yes"]
    },
    "Verified nodes and the operations of rejected ones, T=0": {
        0: ["EAGLE-2 tree", "8,120", "1,602", "6,518", "80%", "1,370"]
    },
    "T_target(n), T=0": {3: ["1 row", "8", "8", "42.0", "39.9 to 46.2", "1.500"]},
}


@pytest.mark.parametrize("caption", list(TABLES))
def test_a_table_of_the_golden_result_reads(page: Element, caption: str) -> None:
    rows = table_of(page, caption)
    assert {number: rows[number] for number in TABLES[caption]} == TABLES[caption]


def test_without_a_tuned_head_calibration_is_of_the_recorded_answer() -> None:
    assert table_of(page_of(changed({"tune": ...})), "Acceptance by confidence")[1] == ["0.600", "4", "0.750"]


def test_the_ledger_says_its_diagnosis_and_fit(page: Element, result: Results) -> None:
    section, cost = page.by_id("ledger"), page.by_id("cost-0")
    assert result.ledger is not None
    assert section is not None
    assert cost is not None
    (one,) = result.ledger.settings
    diagnosis, fitted = one.methods[0].diagnosis, one.target[0]
    assert all(said in section.text for said in (diagnosis.name, diagnosis.figure, diagnosis.change))
    assert f"{fitted.alpha_ms:.1f} + {fitted.ms_per_node:.2f} n ms" in cost.all("figcaption")[0].text


RATIO = f"{OVERALL}/speedup_plain"
GAIN = {"low": 1.3, "median": 1.4, "high": 1.5}
COUNTS = {"requests": 6, "equal": 6, "ties": 0, "different": 0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "All 6 of its answers equal plain decoding's, token for token."),
        ({RATIO: {"low": 0.97, "median": 1.03, "high": 1.1}}, "shows no clear gain over the plain loop: 1.03x"),
        ({RATIO: {"low": 0.7, "median": 0.8, "high": 0.9}}, "tree is slower than the plain loop: 0.80x its speed"),
        ({RATIO: {"low": 1.0, "median": 1.0, "high": 1.0}}, "no clear gain"),
        (
            {RATIO: {**GAIN, "samples": 1, "units": 1}},
            "1.40x as fast as the plain loop on the one request: too few to conclude from.",
        ),
        (
            {RATIO: {**GAIN, "samples": 5, "units": 5}},
            "1.40x as fast as the plain loop on 5 requests (median): too few to conclude from.",
        ),
        (
            {RATIO: {**GAIN, "samples": 70, "units": 60}},
            "EAGLE-2 tree is 1.40x as fast as the plain loop (median over 70 requests of 60 prompts, 95% interval 1.30 to 1.50).",
        ),
        ({OVERALL: {"exact": {**COUNTS, "equal": 5, "ties": 1}}}, "5 of its 6 answers equal"),
        ({OVERALL: {"exact": {**COUNTS, "equal": 4, "different": 2}}}, "NOT exact: 2 of 6 answers differ"),
        ({OVERALL: {"exact": None, "check": "lossy"}}, "lossy"),
        ({OVERALL: {"exact": None, "check": "distribution"}}, "another draw from the target's distribution"),
        ({f"{METHODS}/eagle2": ..., f"{METHODS}/chain": ...}, "Only decoding without drafts was measured"),
    ],
)
def test_the_verdict_claims_what_was_measured_and_no_more(changes: dict[str, Any], said: str) -> None:
    assert said in verdict_of(changes)


def test_few_prompts_have_no_interval_in_the_tiles_either() -> None:
    few = read_results(changed({RATIO: {**GAIN, "samples": 5, "units": 5}, f"{OVERALL}/speedup_hf": None}))
    assert tiles(few.settings["T=0"])[0][2].endswith("too few for an interval")


def test_what_is_not_exact_has_no_ratio_and_an_alert() -> None:
    none = {"speedup_plain": None, "speedup_hf": None, "exact": {**COUNTS, "equal": 4, "different": 2}}
    changes = {OVERALL: none, "settings/T=0/errors": ["eagle2 is NOT exact: 2 of 6"]}
    assert "as fast" not in verdict_of(changes)
    (alert,) = [one.text for one in page_of(changed(changes)).all() if one.attributes.get("role") == "alert"]
    assert "2 of 6" in alert


def test_the_verdict_says_what_tuned_trees_bring_behind_the_main_method() -> None:
    tuned = full_result()["settings"]["T=0"]["methods"]["eagle2"]
    tuned["overall"]["speedup_plain"] |= {"samples": 70, "units": 60, "low": 1.05, "median": 1.07, "high": 1.15}
    said = verdict_of({f"{METHODS}/tuned": tuned})
    how = "median over 70 requests of 60 prompts, 95% interval 1.05 to 1.15"
    assert f"Tuned tree is 1.07x as fast as the plain loop ({how})." in said
    assert said.startswith("EAGLE-2 tree")
    assert "Tuned" not in verdict_of({})


def test_bins_hold_every_request_and_start_where_tau_can_be() -> None:
    for taus in ([1.15, 1.16], [1.0, 1.0], [1.2, 1.9, 3.4], [2.0]):
        edges = bins(taus)
        assert edges[0] <= min(taus)
        assert max(taus) < edges[-1]
        assert edges[0] >= 1.0
        assert len({round(high - low, 6) for low, high in itertools.pairwise(edges)}) == 1


def test_what_is_said_of_a_curve_and_1_is_what_was_measured(page: Element) -> None:
    def captions(page: Element) -> dict[str, str]:
        figures = {name: page.by_id(name) for name in ("batch-0", "curve-0")}
        return {name: figure.all("figcaption")[0].text for name, figure in figures.items() if figure is not None}

    said = captions(page)
    assert "The pooled speed-up is not known at batch 8" in said["batch-0"]
    assert "The predicted one falls through 1 at batch 1.5." in said["curve-0"]
    assert "The measured one is not known at batch 2" in said["curve-0"]
    curve = full_result()["ledger"]["settings"][0]["curve"]
    rising = [{**point, "predicted": ratio, "measured": None} for point, ratio in zip(curve, (0.9, 1.1))]
    one, exact = "ledger/settings/0", full_result()["throughput"][0]["points"][:3]
    nowhere = {f"{one}/curve": rising, f"{one}/crossing": {"predicted": None}, "throughput/0/points": exact}
    said = captions(page_of(changed(nowhere)))
    assert "The pooled speed-up falls through 1 at batch 2.7." in said["batch-0"]
    assert "The predicted one rises through 1 or dips: it is below 1 at batch 1, not at batch 2." in said["curve-0"]
    assert "The measured one" not in said["curve-0"], "it was measured nowhere"


def test_fewer_than_six_requests_have_no_interval_anywhere(page: Element, result: Results) -> None:
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


def test_rendering_anew_gives_the_same_page_without_measuring(tmp_path: Path) -> None:
    write_results(tmp_path, full_result())
    first, summary = (tmp_path / REPORT).read_text(), (tmp_path / "summary.md").read_text()
    assert len(first) < 1_500_000
    (tmp_path / REPORT).unlink()
    (tmp_path / "summary.md").unlink()
    assert rerender(tmp_path) == tmp_path / REPORT
    assert (tmp_path / REPORT).read_text() == first
    assert (tmp_path / "summary.md").read_text() == summary
    assert json.loads((tmp_path / "results.json").read_text()) == full_result()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no results.json"),
        ("{", "is not valid JSON"),
        ('{"format": 1}', "has format 1, this version of eagle reads format"),
        ('{"format": 5}', "is damaged or was changed: results.prompts is missing (and "),
        ({"settings": ...}, "results.settings is missing"),
        ({f"{METHODS}/plain": ...}, "results.settings.T=0 is .*methods.plain is missing"),
        ({f"{OVERALL}/tau": "high"}, "results.settings.T=0.methods.eagle2.overall.tau is 'high': Input should be"),
        ({"ledger/settings/0/methods": ...}, "results.ledger.settings.0.methods is missing"),
        ({"recipe/eval/prompts": 3}, "results.recipe.eval.prompts is 3: Input should be"),
    ],
)
def test_results_that_cannot_be_read_are_explained_with_the_place(
    tmp_path: Path, content: str | dict[str, Any] | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(changed(content))
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(EagleError, match=said.replace("(", r"\(").replace(")", r"\)")):
        load_results(tmp_path)
    assert read_or_none(tmp_path) is None
    assert main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in "".join(capsys.readouterr().err.split())
    assert not (tmp_path / REPORT).exists()


def test_what_a_later_version_added_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({**full_result(), "more": 1}))
    assert load_results(tmp_path).prompts == 6


def test_many_evaluations_have_names_of_their_own() -> None:
    assert [_letters(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_two_evaluations_stand_side_by_side_with_what_keeps_them_apart(
    result: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"identity/hardware": {"cpu": "B"}, f"{OVERALL}/tau": 9.87, f"{METHODS}/chain": ...}
    other = read_results(changed(changes))
    rows = {row[0]: row[1:] for row in comparison(["A", "B"], [result, other]).rows}
    assert rows["EAGLE-2 tree, T=0"][3] == "9.87"
    assert rows["chain, T=0"][3:] == ("-", "-", "-")
    assert differences({"A": result, "B": other}) == [
        "B and A differ in hardware: tokens per second and speed-ups do not compare"
    ]
    assert differences({"A": result, "B": result}) == []
    for name, values in (("one", full_result()), ("two", changed(changes))):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name, values)
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "9.87" in capsys.readouterr().out
