"""Suites load under their names; Spec-Bench is told from what only looks like it; tasks and limits choose."""

import json
from collections import Counter
from pathlib import Path

import pytest

from eagle.config import EvalConfig
from eagle.errors import EagleError
from eagle.eval.suites.prompt_set import load_prompts, load_sets, recipe_prompts
from eagle.eval.suites.suites import SPEC_BENCH_TASK, SUITES

SIX = {"mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("spec-bench-open", {**dict.fromkeys(SIX, 80), "summarization": 69}),
        ("mt-bench", {"mt_bench": 80}),
        ("humaneval", {"humaneval": 164}),
        ("gsm8k", {"gsm8k": 1319}),
        ("alpacaeval-open", {"alpacaeval": 478}),
        ("mbpp", {"mbpp": 500}),
    ],
)
def test_every_suite_has_its_tasks_and_is_never_called_spec_bench(name: str, counts: dict[str, int]) -> None:
    (one,) = load_sets([f"suite:{name}"])
    assert one.available == counts == Counter(prompt.task for prompt in one.prompts)
    assert not one.is_spec_bench
    assert one.title != "Spec-Bench"
    assert one.wording
    assert len({prompt.id for prompt in one.prompts}) == len(one.prompts)


def test_all_suites_together_do_not_clash() -> None:
    assert len(load_prompts([f"suite:{name}" for name in SUITES], 2)) == 2 * (6 + 5)


def test_spec_bench_open_says_what_it_is_not_and_keeps_spec_benchs_ids_and_categories() -> None:
    (one,) = load_sets(["suite:spec-bench-open"])
    assert "not Spec-Bench" in one.note
    assert {prompt.category for prompt in one.prompts} == SIX
    assert {prompt.file_category for prompt in one.prompts} == set(SPEC_BENCH_TASK)
    assert len({prompt.question_id for prompt in one.prompts}) == len(one.prompts)
    first = one.prompts[0]
    assert (first.question_id, first.file_category, len(first.turns)) == ("81", "writing", 2)
    german = [prompt for prompt in one.prompts if prompt.task == "translation"]
    assert all(prompt.turns[0].startswith("Translate German to English: ") for prompt in german)


def test_mt_bench_is_reported_by_its_categories_and_limited_as_one_task() -> None:
    chosen = load_prompts(["suite:mt-bench"], 8)
    assert len({prompt.category for prompt in chosen}) == len(chosen) == 8
    assert all(len(prompt.turns) == 2 for prompt in chosen)


def test_code_is_asked_for_in_the_fields_words() -> None:
    for prompt in load_prompts(["suite:humaneval"]):
        assert prompt.turns[0].startswith("Complete the code I provided.\n")
    for prompt in load_prompts(["suite:mbpp"]):
        before, tests = prompt.turns[0].split(" Your code should pass these tests:\n\n")
        assert before.startswith("You are an expert Python programmer, and here is your task: ")
        assert tests.startswith("assert ")


def test_a_limit_counts_by_task_and_tasks_or_categories_choose() -> None:
    chosen = load_prompts(["suite:spec-bench-open"], 2)
    assert Counter(prompt.task for prompt in chosen) == dict.fromkeys(SIX, 2)
    assert Counter(p.task for p in load_prompts(["suite:spec-bench-open"], 2, tasks=["qa", "rag"])) == {
        "qa": 2,
        "rag": 2,
    }
    writing = load_prompts(["suite:spec-bench-open"], tasks=["writing"])
    assert [prompt.file_category for prompt in writing] == ["writing"] * 10
    config = EvalConfig(prompts=("suite:spec-bench-open",), tasks=("writing", "translation"), limit=3)
    assert [prompt.task for prompt in recipe_prompts(config)] == ["mt_bench"] * 3 + ["translation"] * 3


@pytest.mark.parametrize(
    ("sources", "tasks", "said"),
    [
        (["suite:spec_bench"], None, "did you mean suite:spec-bench-open"),
        (["suite:nonsense"], None, "suites: spec-bench-open, mt-bench"),
        (["suite:spec-bench-open"], ["translations"], "did you mean translation"),
        (["suite:mt-bench"], [], "eval.tasks is empty"),
    ],
)
def test_unknown_suites_and_tasks_are_named(sources: list[str], tasks: list[str] | None, said: str) -> None:
    with pytest.raises(EagleError, match=said):
        load_prompts(sources, tasks=tasks)


def questions() -> list[dict[str, object]]:
    """480 rows of Spec-Bench's shape: its open questions, and made-up ones where its own may not be shipped."""
    rows: list[dict[str, object]] = [
        {"question_id": int(p.question_id), "category": p.file_category, "turns": list(p.turns)}
        for p in load_prompts(["shipped:spec_bench_open"])
    ]
    for task, first, words in (
        ("translation", 1000, "Translate German to English: Satz"),
        ("summarization", 2000, "Summarize:"),
    ):
        rows += [{"question_id": first + i, "category": task, "turns": [f"{words} {i}"]} for i in range(80)]
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_users_own_spec_bench_file_is_reported_as_spec_bench_by_its_six_tasks(tmp_path: Path) -> None:
    source = write(tmp_path / "question.jsonl", questions())
    (whole,) = load_sets([source])
    assert (whole.title, whole.is_spec_bench, whole.note) == ("Spec-Bench", True, None)
    assert Counter(prompt.category for prompt in whole.prompts) == dict.fromkeys(SIX, 80)
    (part,) = load_sets([source], 10)
    assert (part.title, part.is_spec_bench) == ("Spec-Bench, 60 of its 480 questions", True)
    assert part.available == dict.fromkeys(SIX, 80)


@pytest.mark.parametrize("change", ["a question", "stand-ins", "a row less"])
def test_what_only_looks_like_spec_bench_is_not_reported_as_it(change: str, tmp_path: Path) -> None:
    rows = questions()
    if change == "a question":
        rows[100]["turns"] = ["another question"]
    elif change == "stand-ins":
        rows[320:400] = [
            {"question_id": 1000 + i, "category": "translation", "turns": list(p.turns)}
            for i, p in enumerate(load_prompts(["shipped:translation_tatoeba"], 80))
        ]
    else:
        rows = rows[1:]
    (one,) = load_sets([write(tmp_path / "question.jsonl", rows)])
    assert not one.is_spec_bench
    assert "Spec-Bench," not in one.title
    if change != "a row less":
        assert "This is not Spec-Bench" in one.note


def test_rows_as_hub_evaluation_sets_have_them_are_asked(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "What is 1 + 1?", "answer": "2"},
        {"prompt_id": 5, "category": "writing", "prompt": ["Write.", "Write it again."]},
        {"prompt": "def one():"},
    ]
    found = load_prompts([write(tmp_path / "hub.jsonl", rows)])
    assert [prompt.turns for prompt in found] == [("What is 1 + 1?",), ("Write.", "Write it again."), ("def one():",)]
