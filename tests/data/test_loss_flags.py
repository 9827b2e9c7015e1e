"""Per-turn loss flags: what other trainers' files leave out of the loss is not supervised here either."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle.config import DataConfig, Recipe, TargetConfig
from eagle.data.conversations import Conversation, read_conversation
from eagle.data.loss_flags import NOT_FOLLOWED
from eagle.data.prepare import load_prepared, prepare
from eagle.data.render import Rendered, Renderer
from eagle.data.sources import Rejected, SourceRow
from eagle.target.loading import load_tokenizer
from tests.data.test_render import QWEN3, runs, tokenizer_of
from tests.tiny import CHATML, tiny_tokenizer

TURNS = [("user", "one?"), ("assistant", "first"), ("user", "two?"), ("assistant", "second")]


def row(flags: dict[int, dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": text} for role, text in TURNS]
    for turn, flag in (flags or {}).items():
        messages[turn].update(flag)
    return {"messages": messages, **fields}


def supervised(value: dict[str, Any], template: str = CHATML) -> list[str]:
    tokenizer = tokenizer_of(template)
    conversation = read_conversation(SourceRow("file:1", value))
    assert isinstance(conversation, Conversation), conversation
    rendered = Renderer(tokenizer, max_len=99).render(conversation)
    assert isinstance(rendered, Rendered), rendered
    return [text for sample in rendered.samples for text in runs(tokenizer, sample)]


def reason(value: dict[str, Any]) -> str:
    result = read_conversation(SourceRow("file:1", value))
    if isinstance(result, Conversation):
        result = Renderer(tokenizer_of(CHATML), max_len=99).render(result)  # type: ignore[assignment]
    assert isinstance(result, Rejected), result
    return result.reason


@pytest.mark.parametrize(
    "value",
    [
        row(loss_mask=[0, 0, 0, 1]),
        row(loss_mask=[False, False, False, True]),
        row({1: {"weight": 0}}),
        row({1: {"weight": 0.0}, 3: {"weight": 1}}),
        row({1: {"train": False}}),
        row({1: {"training": False}}),
        row({1: {"loss": False}, 3: {"loss": True}}),
        row({1: {"loss_mask": 0}}),
        row({1: {"weight": 0, "train": False}}, loss_mask=[0, 0, 0, 1]),
    ],
)
def test_a_turn_flagged_out_of_the_loss_is_context_only(value: dict[str, Any]) -> None:
    assert supervised(value) == ["second<|im_end|>"]
    assert supervised(row()) == ["first<|im_end|>", "second<|im_end|>"]


def test_a_flag_on_the_last_answer_and_on_a_rewriting_template_counts_too() -> None:
    assert supervised(row(loss_mask=[0, 1, 0, 0])) == ["first<|im_end|>"]
    assert len(supervised(row(), QWEN3)) == 2
    (text,) = supervised(row({1: {"loss": False}}), QWEN3)
    assert "second" in text


def test_flags_keep_their_turns_when_turns_are_moved_or_dropped() -> None:
    """A top-level system text, a greeting before the first question, turns in a row."""
    assert supervised(row(system="be kind", loss_mask=[0, 0, 0, 1])) == ["second<|im_end|>"]
    greeting = {"role": "assistant", "content": "welcome", "weight": 1}
    value = row({1: {"weight": 0}})
    assert supervised({"messages": [greeting, *value["messages"]]}) == ["second<|im_end|>"]
    twice = row({1: {"weight": 0}})
    twice["messages"].insert(2, {"role": "assistant", "content": "more", "weight": 0})
    assert supervised(twice) == ["second<|im_end|>"]
    twice["messages"][2]["weight"] = 1
    assert reason(twice) == "assistant turns in a row with different loss flags"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (row(loss_mask=[0, 1]), "loss_mask does not fit the turns"),
        (row(loss_mask=[0, 1, 0, 1, 1]), "loss_mask does not fit the turns"),
        (row(loss_mask="0001"), "loss_mask is not a list"),
        (row(loss_mask=1), "loss_mask is not a list"),
        (row(loss_mask=[0, 0, 0, 0.5]), "a loss flag that is neither 0 nor 1"),
        (row(loss_mask=[0, 0, 0, None]), "a loss flag that is neither 0 nor 1"),
        (row({3: {"weight": 0.5}}), "a loss flag that is neither 0 nor 1"),
        (row({3: {"train": "false"}}), "a loss flag that is neither 0 nor 1"),
        (row({1: {"train": float("nan")}}), "a loss flag that is neither 0 nor 1"),
        (row({1: {"train": False, "loss": True}}), "loss flags that disagree"),
        (row({1: {"weight": 1}}, loss_mask=[0, 0, 0, 1]), "loss flags that disagree"),
        (row({1: {"loss_mask": 1}}, loss_mask=[0, 0, 0, 1]), "loss flags that disagree"),
        (
            row({1: {"train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}}),
            "train_detail flags parts of a turn",
        ),
        (row(loss_mask=[0, 0, 0, 0]), "no assistant turn to learn from"),
    ],
)
def test_flags_that_cannot_be_followed_reject_the_row_by_name(value: dict[str, Any], expected: str) -> None:
    assert reason(value) == expected


def test_a_flag_for_the_users_turn_is_said_not_to_be_followed() -> None:
    conversation = read_conversation(SourceRow("file:1", row(loss_mask=[1, 1, 1, 1])))
    assert isinstance(conversation, Conversation)
    assert conversation.notes == (NOT_FOLLOWED,)
    assert conversation.not_learnt == frozenset()


def test_turns_left_out_are_counted_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    lines = [row({1: {"weight": 0}}, id=str(n)) for n in range(3)] + [row(id="plain")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe(
        output_dir=str(tmp_path / "out"),
        target=TargetConfig(model=str(tmp_path / "target")),
        data=DataConfig(sources=(str(tmp_path / "rows.jsonl"),), validation_fraction=0.0),
    )
    counts = prepare(recipe)["counts"]
    assert (counts["turns"], counts["turns_not_learnt"]) == (5, 3)
    assert "turns left out by loss flags │         3" in capsys.readouterr().err
    data, _ = load_prepared(recipe.data_dir)
    tokenizer = load_tokenizer(recipe.target)
    ids = [i for i, learnt in zip(data[0]["input_ids"], data[0]["loss_mask"], strict=True) if learnt]
    assert tokenizer.decode(ids) == "second<|im_end|>"
