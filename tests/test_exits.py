"""What a command prints of an error, and its exit code; of several processes each says which one it is."""

import errno
import os

import pytest

from eagle.errors import EagleError
from eagle.exits import exit_code


def _raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (EagleError("a is 1, expected 2; set it"), 2, "eagle: error: a is 1, expected 2; set it\n"),
        (
            OSError(errno.EACCES, os.strerror(errno.EACCES), "x/y"),
            2,
            "eagle: error: Permission denied: x/y; you may not read or write there; choose another path or mend its "
            "permissions\n",
        ),
        (OSError("something"), 2, "eagle: error: something\n"),
        (KeyboardInterrupt(), 130, "\neagle: interrupted; what is saved stays: run the same command again to resume\n"),
    ],
)
def test_errors_of_a_user_are_one_message(
    error: BaseException, code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert exit_code(lambda: _raising(error)) == code
    assert capsys.readouterr().err == printed


def test_other_processes_say_which_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert exit_code(lambda: _raising(EagleError("too small"))) == 2
    assert capsys.readouterr().err == "eagle: error: process 3: too small\n"
    assert exit_code(lambda: _raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "", "one of them says it for all"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)
    assert exit_code(lambda: 7) == 7
