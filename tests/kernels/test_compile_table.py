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
    command += ["--cache", str(tmp_path / "cache.jsonl")]
    told = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    summary = json.loads(told.stdout.splitlines()[-1])
    assert summary["problems"] == []
    assert told.returncode == 0, told.stderr
    table = output.read_text()
    for kernel in folders():
        assert f"| {kernel} |" in table, f"{kernel} has no representative version"
    assert all(f"sm_{arch} registers" in table for arch in (80, 90, 100))
    assert summary["compiled"] >= summary["versions"] > 0


@pytest.mark.slow
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


class Pretended:
    """Instead of the compiler: counts what it is asked for; the second and later versions spill."""

    def __init__(self, *, stop_after: int | None = None):
        self.asked: list[tuple[str, str, int]] = []
        self.stop_after = stop_after

    def __call__(self, wanted: Sequence[tuple[str, str, int]], *, jobs: int) -> Iterator[Compiled]:
        for i, (kernel, name, arch) in enumerate(wanted):
            if i == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((kernel, name, arch))
            problem = "spills 8 bytes" if i else ""
            yield Compiled(kernel=kernel, name=name, arch=arch, registers=99, spilled=8 * (i > 0), problem=problem)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    chosen = ["--kernel", "commit", "--match", "d64 16-bit", "--arch", "80", "--arch", "90"]
    return [*chosen, "--jobs", "1", "--cache", str(tmp_path / "cache.jsonl"), "--output", str(tmp_path / "table.md")]


def test_spills_are_rows_of_the_table_and_an_exit_code(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle.kernels.compile_table.compiled", Pretended())
    assert main(arguments) == 1
    out = capsys.readouterr().out.splitlines()
    assert "| commit | d64 16-bit path | 0 | 99 / 0 / 0 | 99 / 8 / 0 |" in out
    assert "| commit | sm_90 | 2 | 99 | 2 (8) | 0 | 2 |" in out
    assert json.loads(out[-1])["problems"][0]["problem"] == "spills 8 bytes"
    written = Path(arguments[-1]).read_text()
    assert "4 compilations, 3 problems" in written
    assert "- sm_90 commit d64 16-bit path: spills 8 bytes" in written


def test_a_kill_loses_nothing_and_a_rerun_compiles_what_is_missing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = Pretended(stop_after=2), Pretended(), Pretended()
    monkeypatch.setattr("eagle.kernels.compile_table.compiled", first)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    cache = tmp_path / "cache.jsonl"
    cache.write_text(cache.read_text() + '{"key": "torn')
    monkeypatch.setattr("eagle.kernels.compile_table.compiled", second)
    assert main(arguments) == 1
    assert len(first.asked) == len(second.asked) == 2
    assert not set(first.asked) & set(second.asked)
    monkeypatch.setattr("eagle.kernels.compile_table.compiled", third)
    assert main(arguments) == 1, "a promise broken in an earlier run is broken still"
    assert third.asked == []


@pytest.mark.slow
def test_what_is_compiled_decides_what_is_found_again() -> None:
    """Code, callees, constants, types, options, architecture; not comments, nor the place in the file."""
    code = r"""
from dataclasses import replace
import eagle.kernels.noise.device as device
import eagle.kernels.draft_loss.triton as module
from eagle.kernels.compile_cache import fingerprint
from eagle.kernels.sample.triton import variants
base = next(module.variants())
same = fingerprint(base, 80)
assert same == fingerprint(base, 80)
for change in ({"types": {**base.types, "Losses": "*fp16"}}, {"constants": {"BLOCK": 64}}, {"num_warps": 2},
               {"num_stages": 7}, {"options": {"maxnreg": 64}}, {"divisible": frozenset()}):
    assert fingerprint(replace(base, **change), 80) != same, change
assert fingerprint(base, 90) != same
source = base.function.src
base.function._unsafe_update_src(source.replace("row = ", "# where\n    row  =  ", 1))
assert fingerprint(base, 80) == same
base.function._unsafe_update_src(source.replace("tl.log(", "tl.log2(", 1))
assert fingerprint(base, 80) != same
race = next(v for v in variants() if v.name.startswith("race"))
before = fingerprint(race, 80)
called = device.uniform  # by gumbel_of, by token_gumbel
called._unsafe_update_src(called.src.replace("+", "-", 1))
assert fingerprint(race, 80) != before, "a function that it calls has changed"
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)


def test_a_version_that_does_not_compile_says_why() -> None:
    row = Compiled(kernel="k", name="v", arch=90, problem="does not compile: no such dtype")
    assert "| k | v | 0 | does not compile: no such dtype |" in markdown([row])


def test_unknown_kernels_are_named_with_the_known_ones() -> None:
    with pytest.raises(EagleError, match=r"no kernel named nothing; expected some of commit, .*tree_attention"):
        main(["--kernel", "nothing"])
