"""The README against the code: its table of families and the commands it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import FAMILIES

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"`eagle ((?:data )?[a-z]+)[ `]", README)))


def test_the_table_of_families_is_the_list_that_is_tested() -> None:
    table = README.split("<!-- families -->")[1].split("<!-- /families -->")[0]
    named = set(re.findall(r"`([a-z0-9_-]+)`", table))
    assert named == set(FAMILIES)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_named_exists(command: str) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "eagle.cli", *command.split(), "--help"], capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip()


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z_]+@", README)
    for path in re.findall(r"`((?:data|eval|tests|configs)/[\w./-]+\.(?:md|py|yaml))`", README):
        assert (Path(__file__).parent.parent / path).is_file(), path
