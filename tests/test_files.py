"""Folders and files that take the place of others: whatever moment a kill comes at, the old or the new one is there."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle.files import atomic_dir, atomic_path, clear_leftovers


class KilledError(BaseException):
    pass


def _replace(folder: Path, text: str) -> None:
    with atomic_dir(folder) as temporary:
        (temporary / "a").mkdir()
        (temporary / "a" / "file").write_text(text)


def _text(folder: Path) -> str:
    return (folder / "a" / "file").read_text()


def test_a_folder_takes_the_place_of_another_and_leaves_nothing(tmp_path: Path) -> None:
    for text in ("old", "new"):
        _replace(tmp_path / "x", text)
        assert _text(tmp_path / "x") == text
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_at_a_rename_loses_neither_folder(call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    _replace(folder, "old")
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == call:
            raise KilledError
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KilledError):
            _replace(folder, "new")
    clear_leftovers(tmp_path, "x")
    assert _text(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system refuses to make files larger than 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _save_weights(path: Path) -> None:
    with atomic_path(path) as temporary:
        save_file({"a": torch.ones(100_000)}, temporary)


def _save_folder(path: Path) -> None:
    with atomic_dir(path) as temporary:
        save_file({"a": torch.ones(100_000)}, temporary / "w.safetensors")


@pytest.mark.usefixtures("small_files")
def test_weights_that_the_system_refuses_are_its_error_and_leave_the_old_ones(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("old")
    _replace(tmp_path / "x", "old")
    for save, path in ((_save_weights, tmp_path / "w"), (_save_folder, tmp_path / "x")):
        with pytest.raises(OSError, match="File too large") as caught:
            save(path)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert (tmp_path / "w").read_text() == _text(tmp_path / "x") == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "x"]


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "x"
    _replace(folder, "old")
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(source).name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="No space"):
            _replace(folder, "new")
    assert _text(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_error_inside_leaves_the_old_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    _replace(folder, "old")

    def fail() -> None:
        with atomic_dir(folder) as temporary:
            (temporary / "half").write_text("")
            raise KilledError

    with pytest.raises(KilledError):
        fail()
    assert _text(folder) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_leftovers_are_cleared_by_name_and_an_old_folder_gives_way_to_the_new_one(tmp_path: Path) -> None:
    for name in (".x.17.tmp", ".x.17.old", ".y.17.tmp", "x"):
        (tmp_path / name).mkdir()
    with atomic_path(tmp_path / "f") as temporary:
        temporary.write_text("whole")
    (tmp_path / ".f.17.tmp").write_text("half")
    clear_leftovers(tmp_path, "x")
    assert {path.name for path in tmp_path.iterdir()} == {"x", "f", ".y.17.tmp", ".f.17.tmp"}
    clear_leftovers(tmp_path, "*")
    assert {path.name for path in tmp_path.iterdir()} == {"x", "f"}
    clear_leftovers(tmp_path / "nowhere", "*")
