"""Shipped prompts load, limits spread evenly, broken prompt files are explained."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from eagle.errors import EagleError
from eagle.eval.suites.prompt_set import FOLDER, Prompt, load_prompts, prompts_sha256, shipped_prompts, spread


def prompt(number: int, category: str) -> Prompt:
    return Prompt(id=f"f/{number}", category=category, turns=("hello",), reference=(), source="f")


def test_every_shipped_file_loads_and_is_the_one_its_licence_note_describes() -> None:
    note = (FOLDER / "LICENSES.md").read_text(encoding="utf-8")
    names = shipped_prompts()
    assert {"mt_bench", "humaneval", "gsm8k_test", "spec_bench_open", "mbpp_test"} <= set(names)
    for name in names:
        data = (FOLDER / f"{name}.jsonl.gz").read_bytes()
        rows = int(re.search(rf"\| `{name}\.jsonl\.gz` \| (\d+) \|", note)[1])
        assert len(load_prompts([f"shipped:{name}"])) == rows
        assert hashlib.sha256(data).hexdigest() in note
        assert hashlib.sha256(gzip.decompress(data)).hexdigest() in note
        assert data[4:8] == bytes(4), "gzip modification time is not 0"


def test_multi_turn_questions_keep_their_turns_and_category() -> None:
    first = load_prompts(["shipped:mt_bench"])[0]
    assert (first.id, first.category, len(first.turns)) == ("mt_bench/81", "writing", 2)


def test_a_limit_takes_evenly_from_categories_and_within_each_not_the_first_rows() -> None:
    prompts = [prompt(i, "ab"[i >= 12]) for i in range(16)]  # a: 0..11, b: 12..15
    assert [p.id for p in spread(prompts, 4)] == ["f/0", "f/6", "f/12", "f/14"]
    assert [p.id for p in spread(prompts, 10)].count("f/15") == 1, (
        "a small category is used up, the rest goes to the other"
    )
    assert spread(prompts, 99) == prompts
    chosen = load_prompts(["shipped:mt_bench"], 8)
    assert len({p.category for p in chosen}) == 8
    assert chosen == load_prompts(["shipped:mt_bench"], 8)


def test_fewer_prompts_than_categories_take_categories_evenly() -> None:
    prompts = [prompt(i, f"category-{i // 2}") for i in range(8)]
    assert [p.category for p in spread(prompts, 2)] == ["category-0", "category-2"]


def test_conversation_files_give_their_user_turns_and_system_message(tmp_path: Path) -> None:
    messages = [("system", "be brief"), ("user", "one"), ("assistant", "x"), ("user", "two")]
    row = {"id": "r", "messages": [{"role": role, "content": text} for role, text in messages]}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (found,) = load_prompts([str(file)])
    assert (found.id, found.turns, found.system, found.category) == ("mine/r", ("one", "two"), "be brief", "mine")


def test_the_hash_tells_prompts_apart() -> None:
    few, more = load_prompts(["shipped:mt_bench"], 2), load_prompts(["shipped:mt_bench"], 3)
    assert prompts_sha256(few) == prompts_sha256(list(few)) != prompts_sha256(more)
    assert prompts_sha256(few) != prompts_sha256(few[::-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"turns": ["a"]}\nnot json\n', r"p\.jsonl:2"),
        ('{"turns": "a"}\n', r"p\.jsonl:1.*turns"),
        ('{"question_id": 1, "turns": ["a"]}\n{"question_id": 1, "turns": ["b"]}\n', "occurs twice"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}\n', r"p\.jsonl:1.*wizard"),
    ],
)
def test_broken_prompt_files_are_explained(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(EagleError, match=message):
        load_prompts([str(file)])


@pytest.mark.parametrize("limit", [0, -1])
def test_no_prompts_at_all_is_a_mistake_that_is_told(limit: int) -> None:
    with pytest.raises(EagleError, match=f"{limit} prompts are asked for, expected 1 or more"):
        spread(load_prompts(["shipped:mt_bench"], 2), limit)


def test_missing_and_unknown_sources_are_explained(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="does not exist"):
        load_prompts([str(tmp_path / "none.jsonl")])
    with pytest.raises(EagleError, match="did you mean shipped:mt_bench"):
        load_prompts(["shipped:mt_banch"])
    with pytest.raises(EagleError, match=r"eval\.prompts is empty"):
        load_prompts([])
    with pytest.raises(EagleError, match=r"eval\.limit is 0"):
        load_prompts(["shipped:mt_bench"], 0)
