"""`eagle eval --check distribution`: lossless rules pass, a broken one is rejected with exit code 1, a kill loses no rule."""

import json
from pathlib import Path

import pytest
import torch

from eagle.cli.main import main
from eagle.config import Recipe, read_recipe
from eagle.errors import EagleError
from eagle.eval.checks import distribution as check
from eagle.eval.checks.chi_square import LOSSLESS
from eagle.eval.settings import parse_setting
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.mutants import MUTANTS
from tests.recipes import write_recipe
from tests.tiny import save_tiny_target

torch.set_num_threads(1)
SAMPLING = '--eval.sampling=["T=0", "T=0.7"]'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a random head, made once."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_target(folder / "target")
    torch.manual_seed(1)
    config = EagleHeadConfig.for_target(Target.from_pretrained(str(folder / "target")).config, initializer_range=0.15)
    save_head(EagleHead(config), folder / "head")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, made: Path) -> Recipe:
    (tmp_path / "target").symlink_to(made / "target")
    recipe = read_recipe(write_recipe(tmp_path), [SAMPLING])
    recipe.head_dir.parent.mkdir(parents=True)
    recipe.head_dir.symlink_to(made / "head")
    return recipe


@pytest.mark.slow
def test_every_lossless_rule_is_tested_and_none_rejected(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(tmp_path / "recipe.yaml"), "--check", "distribution", SAMPLING, "--eval.check_rows", "150"]
    assert main(command) == 0
    result = json.loads((recipe.eval_dir / "distribution.json").read_text())
    assert [(line["setting"], line["rule"]) for line in result["rules"]] == [("T=0.7", name) for name in LOSSLESS]
    assert (result["rows"], result["dtype"]) == (150, "float32")
    assert "T=0.7: drawn with top_k 5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_broken_rule_is_rejected_and_a_kill_keeps_the_finished_ones(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = '--eval.sampling=["T=0.3"]'
    rules = ["rejection, sampled tree", "rejection, sampled chain"]
    monkeypatch.setattr(check, "LOSSLESS", {name: LOSSLESS[name] for name in rules})
    drawn: list[str] = []
    honest = check.continuations

    def counted(decoder: object, *rest: object, **named: object) -> object:
        drawn.append(str(decoder))
        if len(drawn) == 2:
            raise KeyboardInterrupt
        with MUTANTS["target without temperature"].broken():
            return honest(decoder, *rest, **named)

    monkeypatch.setattr(check, "continuations", counted)
    few = read_recipe(tmp_path / "recipe.yaml", [cold, "--eval.check_rows", "80"])
    with pytest.raises(KeyboardInterrupt):
        check.check_distribution(few)
    assert not check.check_distribution(few)
    assert len(drawn) == 3, "the first rule is not drawn again"
    result = json.loads((recipe.eval_dir / "distribution.json").read_text())
    assert any(line["rejected"] for line in result["rules"])
    command = ["eval", str(tmp_path / "recipe.yaml"), "--check", "distribution", cold, "--eval.check_rows", "80"]
    assert main(command) == 1


@pytest.mark.slow
def test_a_rule_whose_tests_have_a_single_cell_is_not_tested_and_no_success(
    made: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "LOSSLESS", {"coupled": LOSSLESS["coupled"]})
    command = ["eval", str(tmp_path / "recipe.yaml"), "--check", "distribution", SAMPLING, "--eval.check_rows"]
    assert main([*command, "6"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT TESTED: T=0.7, coupled: " in printed
    assert "raise eval.check_rows (now 6), or take a hotter setting" in printed
    (line,) = json.loads((recipe.eval_dir / "distribution.json").read_text())["rules"]
    assert (line["tested"], line["rejected"]) == (False, False)
    assert line["degrees_of_freedom"] == {"tokens 2-3": 0, "tokens 2-4": 0}
    assert main([*command, "120"]) == 0
    (line,) = json.loads((recipe.eval_dir / "distribution.json").read_text())["rules"]
    assert line["tested"]
    assert line["degrees_of_freedom"]["tokens 2-3"] > 1


def test_filters_are_cut_to_what_can_be_enumerated() -> None:
    for text, kept in (("T=1", 5), ("T=1 top_k=50", 5), ("T=1 top_k=7", 7), ("T=1 top_k=2 top_p=0.9", 2)):
        sampling = check.enumerable(parse_setting(text), seed=4)
        assert (sampling.top_k, sampling.seed, sampling.temperature) == (kept, 4, 1.0)


def test_what_cannot_be_tested_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    for override, words in (
        ('--eval.sampling=["T=0"]', "at temperature 0 there is one outcome"),
        ("--eval.check_rows=0", "check_rows is 0"),
        (f"--output_dir={tmp_path / 'other'}", "there is no head at"),
    ):
        with pytest.raises(EagleError, match=words):
            check.check_distribution(read_recipe(tmp_path / "recipe.yaml", [SAMPLING, override]))
