"""results.json is what its schema says, and the figures in it are those of a real run."""

import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from eagle.config import read_recipe
from eagle.eval.figures import DEFINITIONS, Figures
from eagle.eval.harness import evaluate
from eagle.eval.report.summary import footnotes, headline
from eagle.eval.results import Results, parse, schema
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target
from tests.eval.test_harness import random_head
from tests.recipes import write_recipe

METHODS = ["hf", "hf-lookup", "plain", "eagle2", "chain", "ngram"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation of everything that the schema knows: two settings, batches, all kinds of methods."""
    folder = tmp_path_factory.mktemp("evaluated")
    section = {"methods": METHODS, "sampling": ["T=0", "T=0.8"], "batches": [1, 2], "max_new_tokens": 10}
    recipe = read_recipe(write_recipe(folder, eval=section))
    save_head(random_head(Target.from_config(recipe.target)), recipe.head_dir)
    evaluate(recipe)
    return recipe.eval_dir


@pytest.fixture
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_the_shipped_schema_is_derived_from_the_dataclasses() -> None:
    file = files("eagle") / "eval" / "results.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == schema(), "write it anew from eagle.eval.results.schema"


@pytest.mark.slow
def test_a_real_output_holds_nothing_that_is_not_described(result: dict[str, Any]) -> None:
    """Of what the evaluation itself makes; the ledger's and the tuner's further figures are for other readers."""
    read = parse(Results, result)
    assert result.keys() == {field.name for field in dataclasses.fields(Results)} - {"asked"}
    described = dataclasses.asdict(read)
    for name in ("settings", "record", "throughput", "suites", "processes", "skipped", "definitions"):
        assert described[name] == result[name]


def test_every_figure_has_one_definition(result: dict[str, Any]) -> None:
    told = {"requests", "new_tokens", "verify_steps"}  # counts
    missing = set(Figures.__dataclass_fields__) - told - set(DEFINITIONS)
    assert missing == {"first_token_ms_p95", "speedup_hf", "speedup_plain"}, "defined with first_token_ms and speedup"
    assert result["definitions"] == DEFINITIONS


def test_latencies_and_use_are_measured_for_every_method(result: dict[str, Any]) -> None:
    for setting, rows in result["record"].items():
        assert list(rows) == METHODS
        for name, row in rows.items():
            figures = result["settings"][setting]["methods"][name]["overall"]
            assert 0 < figures["inter_token_ms"]["p50"] <= figures["inter_token_ms"]["p95"]
            assert figures["commit_gap_ms"]["p95"] >= figures["inter_token_ms"]["p50"]
            assert row["baseline_inter_token_ms"].keys() == {"hf", "plain"}
            assert row["device_use"] > 0.05
            assert (row["peak_memory"]["rss_bytes"] or 2**27) > 2**26
            assert row["peak_memory"]["cuda_bytes"] is None
    peak = result["peak_memory"]["rss_bytes"]
    assert all(
        (row["peak_memory"]["rss_bytes"] or 0) <= peak for rows in result["record"].values() for row in rows.values()
    )


def test_every_commit_but_the_first_token_has_a_time(folder: Path) -> None:
    for line in (folder / "answers.jsonl").read_text().splitlines()[1:]:
        for name, answer in json.loads(line)["answers"].items():
            assert len(answer["commit_tokens"]) == len(answer["commit_seconds"])
            if not name.startswith("hf-"):
                assert sum(answer["commit_tokens"]) == len(answer["tokens"]) - 1
            assert answer["first_token_seconds"] + sum(answer["commit_seconds"]) <= answer["seconds"] + 1e-4
            if name in ("plain", "hf"):
                assert set(answer["commit_tokens"]) <= {1}
            if answer["accepted"]:
                assert len(answer["commit_tokens"]) == len(answer["accepted"])


def test_the_batch_list_gives_a_curve_per_setting(result: dict[str, Any], folder: Path) -> None:
    assert [curve["setting"] for curve in result["throughput"]] == ["T=0", "T=0.8"]
    for curve in result["throughput"]:
        assert (curve["drafter"], curve["prompts"]) == ("eagle2", 2)
        assert [point["batch"] for point in curve["points"]] == [1, 2]
        assert all(point["different"] == 0 and point["speedup"]["samples"] > 0 for point in curve["points"])
        assert "gain" in curve["verdict"]
    assert json.loads((folder / "throughput.json").read_text())["curves"].keys() == {"T=0", "T=0.8"}


def test_the_prompts_and_processes_are_told(result: dict[str, Any]) -> None:
    (suite,) = result["suites"]
    assert (suite["title"], suite["tasks"], suite["is_spec_bench"]) == ("prompts.jsonl", {"prompts": 2}, False)
    assert headline(parse(Results, result), "T=0").startswith(
        "T=0: 4 requests (2 prompts of prompts.jsonl), at most 10 tokens"
    )
    assert result["processes"] == {"processes": 1, "requests_by_sharing": {"1": 8}, "note": None}


def test_spec_bench_answer_files_of_every_method_lie_beside_it(folder: Path) -> None:
    for setting in ("T=0", "T=0.8"):
        for name in METHODS:
            lines = [
                json.loads(line)
                for line in (folder / "spec_bench" / setting / f"{name}.jsonl").read_text().splitlines()
            ]
            assert [(line["question_id"], line["category"]) for line in lines] == [(0, "a"), (1, "b")]
            for line in lines:
                (choice,) = line["choices"]
                assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == 2
                assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])


def test_the_summary_has_the_record_table_and_says_what_must_be_said(result: dict[str, Any], folder: Path) -> None:
    summary = (folder / "summary.md").read_text()
    row = result["record"]["T=0"]["eagle2"]
    cells = next(line for line in summary.splitlines() if line.startswith("| EAGLE-2 tree, T=0 |")).split(" | ")
    assert cells[1:4] == [
        *(f"{row['baseline_inter_token_ms'][name]:,.1f}" for name in ("hf", "plain")),
        f"{row['inter_token_ms']:,.1f}",
    ]
    assert cells[4] == f"{100 * row['device_use']:.0f}%"
    assert f"T=0, rows together: {result['throughput'][0]['verdict']}" in summary
    (suite,) = result["suites"]
    told = {**result, "suites": [{**suite, "title": "spec-bench-open", "note": "This is not Spec-Bench."}]}
    told["processes"] = {**result["processes"], "processes": 2, "note": "times are of one process among several"}
    lines = footnotes(parse(Results, told))
    assert "spec-bench-open: This is not Spec-Bench." in lines
    assert "2 processes: times are of one process among several" in lines
