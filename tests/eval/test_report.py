"""report.html: well-formed, complete, escaped, readable without seeing it, and every number of it is results.json's."""

import copy
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle.cli.main import main
from eagle.errors import EagleError
from eagle.eval.report.compare import comparison, differences
from eagle.eval.report.facts import tiles
from eagle.eval.report.page import REPORT, _letters, render, rerender, write_results
from eagle.eval.report.plots import bins
from eagle.eval.report.verdict import verdict
from eagle.eval.results import load_results, read_results
from tests.eval.page import Element, read_page, rows_of
from tests.eval.report_case import EVIL, full_result


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return full_result()


@pytest.fixture(scope="module")
def page(result: dict[str, Any]) -> Element:
    return read_page(render(result))


def table_of(page: Element, caption: str) -> list[list[str]]:
    (table,) = [table for table in page.all("table") if table.all("caption")[0].text == caption]
    return rows_of(table)


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


def test_nothing_is_fetched_from_anywhere(page: Element, result: dict[str, Any]) -> None:
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


def test_tables_have_captions_and_headed_rows_and_columns(page: Element) -> None:
    for table in page.all("table"):
        assert table.all("caption")[0].text
        headings = [cell for cell in table.all("th") if cell.attributes["scope"] == "col"]
        assert headings
        for row in table.all("tbody")[0].all("tr"):
            cells = [cell for cell in row.children if isinstance(cell, Element)]
            assert [cell.tag for cell in cells] == ["th"] + ["td"] * (len(headings) - 1)
            assert cells[0].attributes["scope"] == "row"
    for region in page.all():
        if "scroll" in region.attributes.get("class", "").split():
            assert region.attributes["tabindex"] == "0", "what scrolls must be reachable by keyboard"
            assert region.attributes["role"] == "region"


@pytest.mark.parametrize(
    ("field", "section"),
    [("record", "record"), ("throughput", "throughput"), ("ledger", "ledger"), ("trees", "trees"), ("tune", "tune")],
)
def test_a_section_is_there_when_its_data_is(page: Element, result: dict[str, Any], field: str, section: str) -> None:
    assert page.by_id(section) is not None
    without = read_page(render({key: value for key, value in result.items() if key != field}))
    assert without.by_id(section) is None
    assert f"#{section}" not in [one.attributes["href"] for one in without.all("a")]
    empty = [] if isinstance(result[field], list) else None
    assert read_page(render({**result, field: empty})).by_id(section) is None


def test_the_heads_section_shows_what_there_is_of_training_and_calibration(
    page: Element, result: dict[str, Any]
) -> None:
    assert page.by_id("training-tau") is not None
    assert page.by_id("calibration") is not None
    bare = {key: value for key, value in result.items() if key not in ("trees", "tune")} | {"training": None}
    assert read_page(render(bare)).by_id("head") is None
    assert read_page(render({**bare, "training": result["training"]})).by_id("calibration") is None


def test_a_plot_is_there_when_its_data_is(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    for method in changed["settings"]["T=0"]["methods"].values():
        method["request_tau"] = []
        method["overall"].update(speedup_hf=None, shares=None, acceptance=[])
    page = read_page(render(changed))
    gone = {"speedup-hf-t-0", "acceptance-t-0", "time-t-0", "request-tau-t-0"}
    ids = {one.attributes["id"] for one in page.all("figure")}
    assert not gone & ids
    assert "speedup-plain-t-0" in ids
    assert gone <= {one.attributes["id"] for one in read_page(render(result)).all("figure")}


def test_texts_are_escaped_wherever_they_come_from(page: Element) -> None:
    scripts = page.all("script")
    assert len(scripts) == 1
    assert "eagle-theme" in scripts[0].text
    assert "alert" not in scripts[0].text
    for section in ("trees", "setting-t-0"):
        part = page.by_id(section)
        assert part is not None
        assert EVIL in part.text, "shown as it is, once escaped"
    answer = next(one for one in page.all("p") if one.attributes.get("class") == "answer")
    assert answer.text == f"The on\n{EVIL} mat"
    assert [one.attributes["class"] for one in answer.all("span")] == [
        "plain",
        "drafted",
        "drafted",
        "bonus",
        "correction",
    ]


def test_the_numbers_are_those_of_results_json(page: Element, result: dict[str, Any]) -> None:
    overall = result["settings"]["T=0"]["methods"]["eagle2"]["overall"]
    ratio = overall["speedup_plain"]
    shown = f"{ratio['median']:.2f}x [{ratio['low']:.2f}, {ratio['high']:.2f}]"
    methods = {row[0]: row for row in table_of(page, "Methods side by side, T=0")}
    assert methods["EAGLE-2 tree"][1:5] == [
        f"{overall['tokens_per_second']:.1f}",
        f"{overall['ms_per_token']:.1f}",
        f"{overall['first_token_ms']:.0f} ms",
        f"{overall['tau']:.2f}",
    ]
    assert methods["EAGLE-2 tree"][6] == shown
    assert ["all prompts", "EAGLE-2 tree", shown, f"{ratio['pooled']:.2f}x", "6"] in table_of(
        page, "Speed-up over plain loop, T=0"
    )
    rates = {row[0]: row[1:] for row in table_of(page, "Share accepted by depth, T=0")}
    assert rates["EAGLE-2 tree"] == [f"{rate:.2f}" for rate in overall["acceptance"]]
    split = {row[0]: row[1:] for row in table_of(page, "Time per verify step and its split, T=0")}
    parts = [f"{100 * overall['shares'][part]:.1f}%" for part in ("verify", "draft", "host")]
    assert split["EAGLE-2 tree"] == [f"{overall['step_ms']:.1f}", *parts]
    taus = result["settings"]["T=0"]["methods"]["eagle2"]["request_tau"]
    histogram = table_of(page, "Requests by tau, T=0")
    assert sum(int(count) for *_, count in histogram) == len(taus) == 6
    for low, high, count in histogram:
        assert int(count) == sum(float(low) <= tau < float(high) for tau in taus)
    batches = table_of(page, "Throughput by batch size, T=0")
    assert batches[1] == ["2", "40.0", "42.0", "1.58", "1.06x [1.00, 1.11]", "1.05x", "yes"]
    assert batches[3][4:] == ["-", "-", "3 DIFFERENT"]
    assert table_of(page, "Tau by optimiser step") == [["100", "1.210", "-"], ["200", "1.430", "1.520"]]
    record = {
        row[0]: row
        for row in table_of(page, next(c.text for c in page.all("caption") if c.text.startswith("Record table")))
    }
    noted = result["record"]["T=0"]["eagle2"]
    assert record["EAGLE-2 tree, T=0"][1:4] == [
        *(f"{noted['baseline_inter_token_ms'][name]:.1f}" for name in ("hf", "plain")),
        f"{noted['inter_token_ms']:.1f}",
    ]
    assert record["EAGLE-2 tree, T=0"][5] == "512"


def test_the_tuners_trees_and_its_calibration_are_shown(page: Element, result: dict[str, Any]) -> None:
    sizes = "Trees tried on A CPU, 2 threads, engine eager, float32"
    assert table_of(page, sizes) == [
        ["no drafting", "T=0", "1", "1.00", "30.0", "1.00x", "1.00x", ""],
        ["8 nodes", "T=0", "1", "1.58", "33.0", "-", "1.10x [1.02, 1.15]", "kept"],
    ]
    assert table_of(page, "Acceptance by confidence") == [
        ["0.050", "900", "0.040", "0.040"],
        ["0.600", "100", "0.700", "0.700"],
    ]
    untuned = read_page(render({key: value for key, value in result.items() if key != "tune"}))
    assert table_of(untuned, "Acceptance by confidence")[1] == ["0.600", "4", "0.750"], "of the recorded answer, then"


def test_the_ledger_says_what_was_predicted_measured_and_diagnosed(page: Element, result: dict[str, Any]) -> None:
    (entry,) = result["ledger"]["settings"][0]["methods"]
    caption = (
        "Speed-up over the plain loop behind the prefill: predicted, and measured on the other half of the prompts, T=0"
    )
    assert table_of(page, caption) == [["EAGLE-2 tree", "1.07x", "1.03x", "+3.9%", "1.02x [0.98, 1.06]", "yes"]]
    assert table_of(page, "Verified nodes and the operations of rejected ones, T=0") == [
        ["EAGLE-2 tree", "8,120", "1,602", "6,518", "80%", "1,370"]
    ]
    section = page.by_id("ledger")
    assert section is not None
    for said in ("name", "figure", "change"):
        assert entry["diagnosis"][said] in section.text
    points = [row for row in table_of(page, "T_target(n), T=0") if row[0] == "1 row"]
    assert points[-1][:5] == ["1 row", "8", "8", "42.0", "39.9 to 46.2"]
    fitted = result["ledger"]["settings"][0]["target"][0]
    cost = page.by_id("cost-0")
    assert cost is not None
    assert f"{fitted['alpha_ms']:.1f} + {fitted['ms_per_node']:.2f} n ms" in cost.all("figcaption")[0].text


def test_the_verdict_names_ratio_interval_and_baseline(result: dict[str, Any]) -> None:
    ratio = result["settings"]["T=0"]["methods"]["eagle2"]["overall"]["speedup_plain"]
    first, *_, last = verdict(result, "T=0")
    assert first == (
        f"EAGLE-2 tree is {ratio['median']:.2f}x as fast as the plain loop (median over 6 requests, 95% interval "
        f"{ratio['low']:.2f} to {ratio['high']:.2f})."
    )
    assert last == "All 6 of its answers equal plain decoding's, token for token."


@pytest.mark.parametrize(
    ("low", "median", "high", "said"),
    [
        (0.97, 1.03, 1.1, "no clear gain over the plain loop: 1.03x"),
        (0.7, 0.8, 0.9, "EAGLE-2 tree is slower than the plain loop: 0.80x its speed"),
        (1.0, 1.0, 1.0, "no clear gain"),
    ],
)
def test_the_verdict_claims_no_more_than_the_interval_allows(
    result: dict[str, Any], low: float, median: float, high: float, said: str
) -> None:
    changed = copy.deepcopy(result)
    changed["settings"]["T=0"]["methods"]["eagle2"]["overall"]["speedup_plain"].update(
        low=low, median=median, high=high
    )
    assert said in " ".join(verdict(changed, "T=0"))


@pytest.mark.parametrize(("samples", "words"), [(1, "the one request"), (5, "5 requests (median)")])
def test_few_prompts_have_a_ratio_but_no_verdict(result: dict[str, Any], samples: int, words: str) -> None:
    changed = copy.deepcopy(result)
    overall = changed["settings"]["T=0"]["methods"]["eagle2"]["overall"]
    overall["speedup_plain"].update(samples=samples, units=samples, low=1.3, median=1.4, high=1.5)
    overall["speedup_hf"] = None
    said = " ".join(verdict(changed, "T=0"))
    assert f"1.40x as fast as the plain loop on {words}: too few to conclude from." in said
    (tile, *_) = tiles(changed, "T=0")
    assert tile[2].endswith("too few for an interval")


def test_bins_hold_every_request_and_start_where_tau_can_be() -> None:
    for taus in ([1.15, 1.16], [1.0, 1.0], [1.2, 1.9, 3.4], [2.0]):
        edges = bins(taus)
        assert edges[0] <= min(taus)
        assert max(taus) < edges[-1]
        assert edges[0] >= 1.0
        assert len({round(high - low, 6) for low, high in itertools.pairwise(edges)}) == 1


def test_the_verdict_of_what_is_not_exact_gives_no_ratio(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    changed["settings"]["T=0"]["methods"]["eagle2"]["overall"].update(
        speedup_plain=None, speedup_hf=None, exact={"requests": 6, "equal": 4, "ties": 0, "different": 2}
    )
    changed["settings"]["T=0"]["errors"] = ["eagle2 is NOT exact: 2 of 6"]
    said = " ".join(verdict(changed, "T=0"))
    assert "NOT exact: 2 of 6 answers differ" in said
    assert "as fast" not in said
    alerts = [one.text for one in read_page(render(changed)).all() if one.attributes.get("role") == "alert"]
    assert len(alerts) == 1
    assert "2 of 6" in alerts[0]


def test_ties_other_checks_and_plain_decoding_have_a_verdict_too(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    methods = changed["settings"]["T=0"]["methods"]
    methods["eagle2"]["overall"]["exact"] = {"requests": 6, "equal": 5, "ties": 1, "different": 0}
    assert "5 of its 6 answers equal" in verdict(changed, "T=0")[-1]
    methods["eagle2"]["overall"].update(exact=None, check="lossy")
    assert "lossy" in verdict(changed, "T=0")[-1]
    for name in ("eagle2", "chain"):
        del methods[name]
    assert verdict(changed, "T=0")[0].startswith("Only decoding without drafts was measured")
    assert read_page(render(changed)).by_id("setting-t-0") is not None


def test_rendering_anew_gives_the_same_page_without_measuring(result: dict[str, Any], tmp_path: Path) -> None:
    write_results(tmp_path, result)
    first, summary = (tmp_path / REPORT).read_text(), (tmp_path / "summary.md").read_text()
    assert len(first) < 1_500_000
    (tmp_path / REPORT).unlink()
    (tmp_path / "summary.md").unlink()
    assert rerender(tmp_path) == tmp_path / REPORT
    assert (tmp_path / REPORT).read_text() == first
    assert (tmp_path / "summary.md").read_text() == summary
    assert json.loads((tmp_path / "results.json").read_text()) == result


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no results.json"),
        ("{", "is not JSON"),
        ('{"format": 1}', "has format 1, this version of eagle reads format"),
        ('{"format": 3}', "has format 3, this version of eagle reads format"),
        ('{"format": 5}', "is damaged or was changed: results.created is missing"),
    ],
)
def test_results_that_cannot_be_read_are_explained(
    tmp_path: Path, content: str | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(EagleError, match=said):
        load_results(tmp_path)
    assert read_results(tmp_path) is None
    assert main(["report", str(tmp_path)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / REPORT).exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values.update(settings={}), "results.settings is empty"),
        (
            lambda values: values["settings"]["T=0"]["methods"].pop("plain"),
            "results.settings.T=0.methods.plain is missing",
        ),
        (
            lambda values: values["settings"]["T=0"]["methods"]["eagle2"]["overall"].update(tau="high"),
            "overall.tau is str",
        ),
        (lambda values: values["ledger"]["settings"][0].pop("methods"), "ledger.settings[0].methods is missing"),
    ],
)
def test_a_damaged_file_is_named_with_the_place(
    result: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    damaged = copy.deepcopy(result)
    change(damaged)
    (tmp_path / "results.json").write_text(json.dumps(damaged))
    with pytest.raises(EagleError, match="damaged or was changed") as error:
        load_results(tmp_path)
    assert said in str(error.value)


def test_what_a_later_version_added_does_no_harm(result: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({**result, "more": 1}))
    assert load_results(tmp_path)["more"] == 1


def test_many_evaluations_have_names_of_their_own() -> None:
    assert [_letters(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_two_evaluations_stand_side_by_side_with_what_keeps_them_apart(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copy.deepcopy(result)
    other["identity"]["hardware"] = {"cpu": "B"}
    other["settings"]["T=0"]["methods"]["eagle2"]["overall"]["tau"] = 9.87
    del other["settings"]["T=0"]["methods"]["chain"]
    table = comparison(["A", "B"], [result, other])
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["EAGLE-2 tree, T=0"][3] == "9.87"
    assert rows["chain, T=0"][3:] == ("-", "-", "-")
    assert differences(["A", "B"], [result, other]) == [
        "B and A differ in hardware: tokens per second and speed-ups do not compare"
    ]
    assert differences(["A", "B"], [result, result]) == []
    for name, values in (("one", result), ("two", other)):
        (tmp_path / name).mkdir()
        write_results(tmp_path / name, values)
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "9.87" in capsys.readouterr().out


def test_the_verdict_says_what_tuned_trees_bring_where_they_were_measured(result: dict[str, Any]) -> None:
    changed = copy.deepcopy(result)
    methods = changed["settings"]["T=0"]["methods"]
    methods["tuned"] = copy.deepcopy(methods["eagle2"])
    methods["tuned"]["overall"]["speedup_plain"].update(samples=70, units=60, low=1.05, median=1.07, high=1.15)
    said = verdict(changed, "T=0")
    how = "median over 70 requests of 60 prompts, 95% interval 1.05 to 1.15"
    assert f"Tuned tree is 1.07x as fast as the plain loop ({how})." in said
    assert said[0].startswith("EAGLE-2 tree"), "the main method comes first"
    assert not any("Tuned" in sentence for sentence in verdict(result, "T=0"))
