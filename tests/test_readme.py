"""The README and docs/ against the code: the table of families, and the commands, modules and files that are named."""

import importlib.util
import re
from pathlib import Path

import pytest

from eagle.cli.main import main
from eagle.config import read_recipe
from tests.tiny import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
EVERYTHING = "\n".join(PAGES.values())
COMMANDS = sorted(set(re.findall(r"`eagle ((?:data )?[a-z]+)[ `]", EVERYTHING)))
MODULES = sorted(set(re.findall(r"-m (eagle(?:\.\w+)+)", EVERYTHING)))


def test_the_table_of_families_is_the_list_that_is_tested() -> None:
    table = README.split("<!-- families -->")[1].split("<!-- /families -->")[0]
    named = set(re.findall(r"`([a-z0-9_-]+)`", table))
    assert named == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_named_exists_with_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*command.split(), "--help"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, error = capsys.readouterr()
    assert code == 0, error
    calls = re.findall(rf"eagle {command}\b((?:[^`\n\\]|\\\n)*)", EVERYTHING)
    missing = {flag for call in calls for flag in re.findall(r" (--[a-z][\w.-]*)", call) if flag not in out}
    assert not missing


def test_the_recipe_shown_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert recipe.head.version == "eagle3"


def test_every_module_named_exists() -> None:
    assert len(MODULES) >= 8
    for module in MODULES:
        assert importlib.util.find_spec(module) is not None, module


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in_and_every_file_named_is_there(page: str) -> None:
    text = PAGES[page]
    assert not re.findall(r"@[A-Z_]+@", text)
    for path in re.findall(r"`((?:data|eval|tests|configs|kernels)/[\w./-]+\.(?:md|py|yaml))`", text):
        assert (ROOT / path).is_file(), path
    for path in re.findall(r"\]\(((?!http|#)[^)#]+)", text):
        assert (ROOT / "docs" / path if page != "README.md" else ROOT / path).is_file(), path
