"""Reading conversations: every shape, every odd row of the fixtures, and files that are broken as a whole."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from eagle.data.conversations import Conversation, read_conversation, read_conversations
from eagle.data.sources import Rejected, SourceRow, count_rows, read_rows, resolve, shipped_files
from eagle.errors import EagleError

FIXTURES = Path(__file__).parent / "fixtures"
EDGE_CASES = {
    case["case"]: case["raw"]
    for case in map(json.loads, (FIXTURES / "edge_cases.jsonl").read_text("utf-8").splitlines())
}
HI, HELLO = ("user", "Hi"), ("assistant", "Hello!")

ACCEPTED: dict[str, list[tuple[str, str]]] = {
    "ok_sharegpt": [HI, HELLO],
    "ok_messages_key": [HI, HELLO],
    "ok_role_content_under_conversations": [HI, HELLO],
    "prompt_only": [("user", "Write a haiku.")],
    "system_first": [("system", "You are kind."), HI, HELLO],
    "system_as_top_level_field": [("system", "You are kind."), HI, HELLO],
    "consecutive_user": [
        ("user", "What is the capital of Ontario?\nAnd tell me its history."),
        ("assistant", "Toronto..."),
    ],
    "consecutive_assistant": [HI, ("assistant", "Hello!\nAnything else?")],
    "ends_with_user": [("user", "a"), ("assistant", "b"), ("user", "c")],
    "empty_assistant_value": [("user", "How could I implement minesweeper?")],
    "non_string_value_int": [("user", "42"), ("assistant", "Forty-two.")],
    "content_list_of_parts": [HI, HELLO],
    "role_aliases": [HI, ("assistant", "Hello!\nAnd me")],
    "tool_roles": [("user", "Time?"), ("assistant", ""), ("tool", '{"time":"10:00"}'), ("assistant", "It is ten.")],
    "reasoning_fields": [("user", "2+2?"), ("assistant", "4")],
    "very_long_assistant_turn": [("user", "Count."), ("assistant", "0 1 2")],
    "many_turns_44": [("user", "q0"), ("assistant", "a0")],
    "assistant_text_repeats_header": [("user", 'Say "assistant".'), ("assistant", "assistant\nassistant")],
    "surrogate_pair_escape": [("user", "\N{COCKTAIL GLASS}"), ("assistant", "cheers")],
    "cjk_rtl_emoji_zwj": [("user", "你好 مرحبا \U0001f469\u200d\U0001f4bb e\u0301"), ("assistant", "こんにちは")],
    "html_entities_and_tags": [
        ("user", "<p>Hi &amp; bye</p>"),
        ("assistant", '<div class="markdown prose">Hello</div>'),
    ],
    "blank_lines": [HI, HELLO],
    "alpaca_row": [("user", "Name a colour."), ("assistant", "Blue.")],
    "dolly_row": [("user", "When?\n\nIn 2000."), ("assistant", "2000.")],
}
REJECTED = {
    "empty_conversations": "no turns",
    "missing_conversations": "no conversation in the row",
    "null_conversations": "no turns",
    "only_gpt": "no user turn",
    "only_system": "no user turn",
    "system_mid_conversation": "system turn inside the conversation",
    "null_value": "empty user turn",
    "missing_value_key": "empty user turn",
    "unknown_role_model_name": "unknown role 'laguna_s'",
    "truncated_json_line": "not valid JSON",
}
NOTED = {
    "consecutive_user": "user turns in a row were merged",
    "consecutive_assistant": "assistant turns in a row were merged",
    "role_aliases": "assistant turns in a row were merged",
    "empty_assistant_value": "cut before an empty assistant turn",
    "non_string_value_int": "a number was taken as text",
}


def read_all(source: Path | str) -> list[Conversation]:
    results = list(read_conversations(str(source)))
    return [result for result in results if isinstance(result, Conversation) or pytest.fail(str(result))]


def pairs(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


def row(value: Any) -> Conversation | Rejected:
    return read_conversation(SourceRow("file.jsonl:1", value))


def accepted(value: Any) -> Conversation:
    result = row(value)
    assert isinstance(result, Conversation), result
    return result


def test_every_edge_case_has_a_decided_outcome() -> None:
    assert ACCEPTED.keys() | REJECTED.keys() == EDGE_CASES.keys()
    assert not ACCEPTED.keys() & REJECTED.keys()


@pytest.mark.parametrize("case", EDGE_CASES)
def test_edge_case_is_read_or_rejected_with_its_line(case: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(EDGE_CASES[case] + "\n", encoding="utf-8")
    (result,) = read_conversations([str(path)])
    line = 3 if case == "blank_lines" else 1
    assert result.origin == f"{path}:{line}"
    if case in REJECTED:
        assert isinstance(result, Rejected)
        assert result.reason == REJECTED[case]
        return
    assert isinstance(result, Conversation)
    if case == "very_long_assistant_turn":
        assert result.messages[1]["content"].split()[-1].isdigit()
        assert len(result.messages[1]["content"]) > 10_000
    elif case == "many_turns_44":
        assert len(result.messages) == 44
        assert pairs(result)[:2] == ACCEPTED[case]
    else:
        assert pairs(result) == ACCEPTED[case]
    assert result.notes == ((NOTED[case],) if case in NOTED else ())
    assert result.is_prompt == (pairs(result)[-1][0] != "assistant")


def test_unknown_role_names_the_role_and_the_known_ones() -> None:
    result = row({"messages": [{"role": "narrator", "content": "Once"}]})
    assert isinstance(result, Rejected)
    assert "narrator" in str(result)
    assert "assistant, gpt" in str(result)
    assert "turn 1" in str(result)


def test_tool_calls_and_reasoning_reach_the_template_fields() -> None:
    call = accepted(json.loads(EDGE_CASES["tool_roles"]))
    assert call.messages[1]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": {}}
    assert call.tools == ({"name": "get_time", "parameters": {}},)
    assert accepted(json.loads(EDGE_CASES["reasoning_fields"])).messages[1]["reasoning_content"] == "add"


def test_question_file_rows_are_user_turns_only() -> None:
    question = accepted({"question_id": 81, "category": "writing", "turns": ["One?", "Two?"], "reference": ["x"]})
    assert question.user_turns == ("One?", "Two?")
    assert question.id == "81"
    assert question.source == "writing"
    assert question.is_prompt


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 2], "not an object"),
        ("text", "not an object"),
        ({}, "no conversation in the row"),
        ({"messages": "Hi"}, "messages is not a list"),
        ({"messages": ["Hi"]}, "a turn is not an object"),
        ({"messages": [{"content": "Hi"}]}, "a turn has no role"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": True}]}, "content that is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
        ({"prompt": "\ud83c alone"}, "half a surrogate pair"),
        ({"prompt": "a", "response": {"content": "b"}, "id": "\ud83c"}, "half a surrogate pair"),
        ({"prompt": "a", "source": ["b", {"\ud83c": 1}]}, "half a surrogate pair"),
        ({"prompt": "a", "tools": '["\\ud83c"]'}, "half a surrogate pair"),
        (
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": "\\ud83c"}}'}]},
            "half a surrogate pair",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": True}]},
            "tool_calls is not a list",
        ),
        ({"prompt": "  "}, "empty user turn"),
        ({"instruction": 3.5, "input": "x"}, "text is not a string"),
        ({"turns": []}, "turns is not a list of texts"),
        ({"tools": "[", "prompt": "x"}, "tools is not valid JSON"),
        (
            {"conversations": [{"from": "function_call", "value": "get"}]},
            "a tool call that is not JSON with name and arguments",
        ),
    ],
)
def test_malformed_rows_are_rejected_with_a_reason(value: Any, reason: str) -> None:
    result = row(value)
    assert isinstance(result, Rejected)
    assert result.reason == reason


def test_half_a_surrogate_pair_is_located() -> None:
    result = row(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": "hm \ud83c"}]}
    )
    assert str(result) == (
        "file.jsonl:1: half a surrogate pair (character 3 of reasoning_content of 2 of messages of the row)"
    )


def test_greeting_before_the_first_user_turn_is_dropped_and_noted() -> None:
    value = [{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hi"}]
    conversation = accepted({"messages": [*value, {"role": "assistant", "content": "Hello!"}]})
    assert pairs(conversation) == [HI, HELLO]
    assert conversation.notes == ("an assistant turn before the first user turn was dropped",)


def test_rows_without_an_id_get_one_from_their_content() -> None:
    one, same, other = accepted({"prompt": "a"}), accepted({"prompt": "a", "x": 1}), accepted({"prompt": "b"})
    assert one.id == same.id != other.id


def test_prompt_with_response_and_prompt_as_messages() -> None:
    assert pairs(accepted({"prompt": "Hi", "completion": "Hello!"})) == [HI, HELLO]
    assert pairs(accepted({"prompt": [{"role": "user", "content": "Hi"}]})) == [HI]


def test_one_bad_line_does_not_end_the_run(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "Hi"})
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"\ufeff{good}\r\n\n{good[:-3]}\n".encode() + b"\xff\xfe\n" + good.encode())
    results = list(read_conversations([str(path)]))
    assert [type(result) for result in results] == [Conversation, Rejected, Rejected, Conversation]
    assert [result.origin for result in results] == [f"{path}:{n}" for n in (1, 3, 4, 5)]
    assert [result.reason for result in results if isinstance(result, Rejected)] == ["not valid JSON", "not UTF-8"]
    assert count_rows(resolve(str(path))[0]) == 4


def test_gzip_json_array_and_parquet_hold_the_same_conversations(tmp_path: Path) -> None:
    import datasets

    rows = [{"id": f"r{i}", "messages": [{"role": "user", "content": f"q{i} ü"}]} for i in range(5)]
    lines = "".join(json.dumps(r) + "\n" for r in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (tmp_path / "d.json").write_text(lines, encoding="utf-8")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "e.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.json", "d.json", "e.parquet"):
        (source,) = resolve(str(tmp_path / name))
        assert [item.id for item in read_all(tmp_path / name)] == [r["id"] for r in rows], name
        assert count_rows(source) == len(rows), name
    assert len(read_all(tmp_path / "*.jsonl*")) == 10
    assert len(read_all(tmp_path)) == 25


def test_json_array_gives_the_line_where_an_element_begins(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[\n  {"prompt":\n   "a"},\n\n  {"nothing": 1}\n]\n', encoding="utf-8")
    first, second = read_conversations([str(path)])
    assert (first.origin, second.origin) == (f"{path}:2", f"{path}:5")
    assert isinstance(second, Rejected)


def test_json_elements_longer_than_a_chunk_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle.data.sources._CHUNK", 7)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "long " * 50}, {"prompt": "b [c]"}]), encoding="utf-8")
    assert [item.messages[0]["content"] for item in read_all(path)] == ["long " * 50, "b [c]"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("empty.jsonl", b"", "is empty"),
        ("blank.jsonl", b"\n \n", "is empty"),
        ("list.json", b"[]", "is empty"),
        ("cut.json", b'[{"prompt": "a"},\n {"prom', ":2 is not valid JSON"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-9], "cannot be read"),
        ("plain.jsonl.gz", b'{"prompt": "a"}\n', "cannot be read"),
        ("bad.parquet", b"PAR1 nothing", "bad.parquet"),
        ("rows.csv", b"a,b", "unknown ending"),
    ],
)
def test_files_broken_as_a_whole_are_errors_that_name_them(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EagleError, match=message) as raised:
        list(read_conversations([str(path)]))
    assert name in str(raised.value)


def test_missing_file_and_shipped_name_come_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(EagleError, match=r"did you mean .*train\.jsonl"):
        resolve(str(tmp_path / "tain.jsonl"))
    with pytest.raises(EagleError, match=r"did you mean shipped:smollm2_responses\?.*smollm2_responses"):
        resolve("shipped:smollm2_response")


def test_unreachable_hub_id_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no network\nmore")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    (source,) = resolve("someone/data:config", split="test")
    with pytest.raises(EagleError, match=r"someone/data:config \(split test\) cannot be loaded: no network;"):
        list(read_rows(source))


SHIPPED = {"smollm2_responses": 1113, "smollm2_regenerated": 560, "smollm2_more": 5859, "smollm2_answers": 7714}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), SHIPPED.items())
def test_shipped_conversations_are_whole_licensed_and_answered(name: str, count: int) -> None:
    path = shipped_files()[name]
    assert path.stat().st_size < 2_500_000
    assert path.read_bytes()[4:8] == bytes(4), "gzip mtime must be 0"
    assert hashlib.sha256(path.read_bytes()).hexdigest() in (path.parent / "LICENSES.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    conversations = list(read_conversations(f"shipped:{name}"))
    assert len(rows) == len(conversations) == count
    assert all(r["license"] and not r["source"].startswith("gpteacher") for r in rows)
    assert all(isinstance(item, Conversation) and not item.is_prompt and not item.notes for item in conversations)
    assert isinstance(conversations[0], Conversation)
    assert conversations[0].origin == f"shipped:{name}:1"


@pytest.mark.slow
def test_no_shipped_conversation_is_in_two_files() -> None:
    assert {name for name in shipped_files() if name.startswith("smollm2_")} == set(SHIPPED)
    ids = [
        item.id for name in SHIPPED for item in read_conversations(f"shipped:{name}") if isinstance(item, Conversation)
    ]
    assert len(set(ids)) == len(ids) == sum(SHIPPED.values())


def test_sharegpt_file_is_read_whole() -> None:
    conversations = list(read_conversations(str(FIXTURES / "sharegpt_dummy_50.jsonl")))
    assert len(conversations) == 50
    assert all(isinstance(item, Conversation) and not item.is_prompt for item in conversations)
