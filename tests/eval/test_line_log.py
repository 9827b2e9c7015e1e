"""A measurement's log: what was written is read again, whatever the texts hold; another measurement starts afresh."""

import json
from pathlib import Path

import pytest

from eagle.eval.line_log import LineLog


def test_texts_with_any_line_ends_are_read_again(tmp_path: Path) -> None:
    texts = {str(i): f"a{end}b" for i, end in enumerate(["\n", "\r\n", "\u2028", "\u2029", "\x85", "\x0b", "\x1c"])}
    for number in range(2):
        with LineLog(tmp_path / "log.jsonl", {"a": 1}) as log:
            if number:
                assert {key: record["text"] for key, record in log.records.items()} == texts
            for key in texts if not number else ():
                log.append(key, {"text": texts[key]})


@pytest.mark.parametrize("damage", ['{"key": "c", "te', "5\n", "no JSON\n", '{"without": "a key"}\n', "\xff\n"])
def test_what_is_whole_is_kept_of_a_damaged_log(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path, {"a": 1}) as log:
        log.append("a", {"text": "one"})
    with open(path, "a", encoding="latin-1") as file:
        file.write(damage)
    with LineLog(path, {"a": 1}) as log:
        assert list(log.records) == ["a"]
        log.append("b", {"text": "two"})
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b"]


def test_a_log_of_another_measurement_starts_afresh_and_names_the_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    with LineLog(path, {"eval": {"seed": 1, "limit": 2}}) as log:
        log.append("a", {})
    with LineLog(path, {"eval": {"seed": 3, "limit": 2}}) as log:
        assert log.records == {}
    captured = capsys.readouterr()
    assert "eval.seed was 1, is 3" in " ".join((captured.out + captured.err).split())
    (aside,) = tmp_path.glob("log.before-*.jsonl")
    assert len(aside.read_text().splitlines()) == 2


def test_a_log_that_was_set_aside_is_taken_back_and_no_other_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for seed in (1, 2, 3):
        with LineLog(path, {"eval": {"seed": seed}}) as log:
            assert log.records == {}
            log.append(f"of seed {seed}", {})
    for seed in (1, 3, 2):
        with LineLog(path, {"eval": {"seed": seed}}) as log:
            assert list(log.records) == [f"of seed {seed}"]
    assert len(list(tmp_path.glob("log.before-*.jsonl"))) == 2
