"""Recipes: what is read, what is refused, and that refusals name the nearest key."""

from pathlib import Path

import pytest
import yaml

from eagle import config
from eagle.config import as_dict, read_recipe, sections_help
from eagle.errors import EagleError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: runs/x\ntarget: {model: some/model}\ntrain: {lr: 1e-4, betas: [0.9, 0.99]}\n")
    return path


def test_values_overrides_and_defaults(recipe: Path) -> None:
    read = read_recipe(recipe, ["--train.batch_size", "7", "--data.sources=[a.jsonl, b.jsonl]"])
    assert (read.train.lr, read.train.betas, read.train.batch_size) == (1e-4, (0.9, 0.99), 7)
    assert read.data.sources == ("a.jsonl", "b.jsonl")
    assert read.data.max_len == 2048
    assert read.head_dir == Path("runs/x/head")


def test_a_resolved_recipe_reads_back_as_itself(recipe: Path, tmp_path: Path) -> None:
    read = read_recipe(recipe, ["--train.trackers", "[wandb]", "--data.regenerate.temperatures", "[0.0, 1.0]"])
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(as_dict(read)))
    assert read_recipe(tmp_path / "resolved.yaml") == read


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert read_recipe(path).target.model


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("train: {lrr: 1}", [], "unknown key train.lrr; did you mean train.lr?"),
        ("trian: {lr: 1}", [], "unknown key trian; did you mean train?"),
        ("", ["--train.lrr", "1"], "unknown key train.lrr; did you mean train.lr?"),
        ("", ["--nothing_like_it", "1"], "sections are output_dir, target, data"),
        ("train: {lr: fast}", [], "train.lr"),
        ("train: {epochs: 1.5}", [], "train.epochs"),
        ("data: [a]", [], "data"),
        ("train: {precision: fp8}", [], "train.precision"),
        ("target: {}", [], "target.model"),
        ("", ["--eval.seed=-1"], "eval.seed is -1, expected 0 or more"),
        ("eval: {max_new_tokens: 0}", [], "eval.max_new_tokens is 0, expected 1 or more"),
        ("eval: {warmup_prompts: -1}", [], "eval.warmup_prompts is -1"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    base = "output_dir: x\n" if text.startswith("target") else "output_dir: x\ntarget: {model: m}\n"
    (tmp_path / "recipe.yaml").write_text(base + text + "\n")
    with pytest.raises(EagleError) as caught:
        read_recipe(tmp_path / "recipe.yaml", overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("a: [", "not valid YAML"), ("- a", "holds list"), ("", "holds NoneType")],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(EagleError, match=message):
        read_recipe(tmp_path / "recipe.yaml")


def test_the_help_of_all_sections_tells_every_key() -> None:
    told = sections_help()
    assert [key for key in config._FIELDS if f"--{key}" not in told] == []
