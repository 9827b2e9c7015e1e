"""The answers' log: resumable after a kill at any byte, never mixed with another evaluation's."""

import dataclasses
from pathlib import Path

import pytest

from eagle.eval.answers import Answer, AnswerLog, Request

IDENTITY = {"head": "abc", "threads": 2}


def request(turn: int) -> Request:
    answers = {"plain": Answer(tokens=[1, 2], seconds=0.5, first_token_seconds=0.1, accepted=[0])}
    return Request(
        prompt="p/1",
        turn=turn,
        category="c",
        setting="T=0",
        seed=5,
        prompt_tokens=3,
        order=["plain"],
        answers=answers,
    )


def write(path: Path, count: int) -> None:
    with AnswerLog(path, IDENTITY) as log:
        for turn in range(count):
            log.append(request(turn))


def test_answers_survive_and_equal_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, 2)
    with AnswerLog(path, IDENTITY) as log:
        assert log.requests == {("p/1", 0, "T=0"): request(0), ("p/1", 1, "T=0"): request(1)}


def test_a_line_cut_by_a_kill_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, 2)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole), 17):
        path.write_bytes(whole[:cut])
        with AnswerLog(path, IDENTITY) as log:
            assert list(log.requests) == [("p/1", 0, "T=0")]
            log.append(request(1))
        assert path.read_bytes() == whole


def test_another_evaluations_answers_are_not_mixed_in_and_not_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, 2)
    before = path.read_bytes()
    with AnswerLog(path, {**IDENTITY, "head": "def"}) as log:
        assert log.requests == {}
        log.append(request(7))
    (aside,) = tmp_path.glob("answers.before-*.jsonl")
    assert aside.read_bytes() == before
    said = " ".join(capsys.readouterr().err.split())
    assert "head was 'abc', is 'def'" in said
    assert f"starting afresh, the old answers are in {aside.name}" in said


def test_what_was_set_aside_is_taken_back_however_many_evaluations_lay_between(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    write(path, 2)
    for turn, head in ((5, "def"), (6, "ghi")):
        with AnswerLog(path, {**IDENTITY, "head": head}) as log:
            log.append(request(turn))
    capsys.readouterr()
    with AnswerLog(path, IDENTITY) as log:
        assert log.requests == {("p/1", turn, "T=0"): request(turn) for turn in (0, 1)}
        log.append(request(2))
    assert "going on with those in answers.before-" in " ".join(capsys.readouterr().err.split())
    assert len(list(tmp_path.glob("answers.before-*.jsonl"))) == 2, "those of the two others"
    with AnswerLog(path, {**IDENTITY, "head": "def"}) as log:
        assert list(log.requests) == [("p/1", 5, "T=0")]
    with AnswerLog(path, IDENTITY) as log:
        assert len(log.requests) == 3


def test_an_answer_is_plain_data() -> None:
    assert dataclasses.asdict(request(0))["answers"]["plain"]["tokens"] == [1, 2]
