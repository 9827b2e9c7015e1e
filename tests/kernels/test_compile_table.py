"""Kernels compile to GPU code without a GPU: the representative versions of every kernel, and what the table tells."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from eagle.errors import EagleError
from eagle.kernels.compile_table import Compiled, folders, main, markdown

ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "0"}


@pytest.mark.slow
def test_representative_versions_compile_without_spills(tmp_path: Path) -> None:
    """In a process of its own: kernels that were imported for the interpreter cannot be compiled."""
    output = tmp_path / "table.md"
    command = [sys.executable, "-m", "eagle.kernels.compile_table", "--representative", "--output", str(output)]
    told = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    summary = json.loads(told.stdout.splitlines()[-1])
    assert summary["problems"] == []
    assert told.returncode == 0, told.stderr
    table = output.read_text()
    for kernel in folders():
        assert f"| {kernel} |" in table, f"{kernel} has no representative version"
    assert all(f"sm_{arch} registers" in table for arch in (80, 90, 100))
    assert summary["compiled"] >= summary["versions"] > 0


def test_every_version_is_named_once_and_describes_its_arguments() -> None:
    code = """
from eagle.kernels.compile_table import folders, offered
for kernel in folders():
    versions = list(offered([kernel], representative=False))
    names = [v.name for v in versions]
    assert versions and len(names) == len(set(names)), kernel
    for v in versions:
        assert v.kernel == kernel
        assert set(v.function.arg_names) == set(v.types) | set(v.constants) and not set(v.types) & set(v.constants), v
        assert v.divisible <= set(v.types) and set(v.architectures) <= {80, 90, 100}, v
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_failures_are_rows_of_the_table_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretended(wanted: Sequence[tuple[str, str, int]], *, jobs: int) -> Iterator[Compiled]:
        for i, (kernel, name, arch) in enumerate(wanted):
            yield Compiled(
                kernel=kernel, name=name, arch=arch, registers=99, spilled=8, problem="spills 8 bytes" if i else ""
            )

    monkeypatch.setattr("eagle.kernels.compile_table.compiled", pretended)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert (
        main(["--kernel", "commit", "--match", "d64 16-bit path", "--arch", "80", "--arch", "90", "--jobs", "1"]) == 1
    )
    out = capsys.readouterr().out.splitlines()
    assert "| commit | d64 16-bit path | 0 | 99 / 8 / 0 | 99 / 8 / 0 |" in out
    assert json.loads(out[-1])["problems"][0]["problem"] == "spills 8 bytes"


def test_a_version_that_does_not_compile_says_why() -> None:
    row = Compiled(kernel="k", name="v", arch=90, problem="does not compile: no such dtype")
    assert "| k | v | 0 | does not compile: no such dtype |" in markdown([row])


def test_unknown_kernels_are_named_with_the_known_ones() -> None:
    with pytest.raises(EagleError, match=r"no kernel named nothing; expected some of commit, .*tree_attention"):
        main(["--kernel", "nothing"])
