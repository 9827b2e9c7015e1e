"""What a command prints of an error, and its exit code; of several processes each says which one it is."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle.config import Recipe
from eagle.errors import EagleError
from eagle.exits import exit_code
from eagle.train.__main__ import main


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


def test_a_gpu_without_memory_left_is_one_message_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(recipe: Recipe) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB. Of the allocated memory "
            "7 GiB is allocated by PyTorch, and 1 GiB is reserved. See documentation for PYTORCH_ALLOC_CONF"
        )

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("eagle.train.__main__.train", train)
    (tmp_path / "recipe.yaml").write_text("output_dir: x\ntarget: {model: y}\n")
    assert main(["--config", str(tmp_path / "recipe.yaml")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        "eagle: error: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB.\n"
    )
    for key in (
        *("half of train.batch_size with twice train.gradient_accumulation", "features.batch_tokens", "eval.batches"),
        *("data.regenerate.batch_size", "decode.drafter.budget"),
    ):
        assert key in printed
    assert "Traceback" not in printed


def test_other_runtime_errors_are_defects_and_torch_is_not_imported_to_tell() -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        exit_code(lambda: _raising(RuntimeError("a defect")))
    program = (
        "import sys\nfrom eagle.exits import exit_code\ndef command():\n    raise RuntimeError\n"
        "try:\n    exit_code(command)\nexcept RuntimeError:\n    print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)
    assert exit_code(lambda: 7) == 7
