"""The shipped recipes: each reads, says what it costs and where its numbers are from, and describes a head that can be made."""

from importlib.resources import files
from pathlib import Path

import pytest

from eagle.config import read_recipe
from eagle.decode_config import DRAFTERS, Tree
from eagle.eval.settings import parse_settings
from eagle.train import selection
from eagle.train_config import TrainConfig

RECIPES = sorted(Path(str(files("eagle") / "configs")).glob("*.yaml"))
PUBLISHED = ("llama-3.1-8b", "qwen3-8b", "vicuna-7b")
SUITE = "smollm2-135m-suite"
"""Evaluates the shipped head; trains none."""
SMOLLM2 = ("smollm2-135m", "smollm2-135m-eagle3", "smollm2-135m-hass")


def test_every_promised_recipe_is_there() -> None:
    assert {path.stem for path in RECIPES} == {*PUBLISHED, *SMOLLM2, SUITE, "demo-smollm2"}


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_says_its_costs_and_sources(path: Path) -> None:
    recipe = read_recipe(path)
    selection.check_settings(recipe)
    assert recipe.output_dir == f"runs/{path.stem}" or path.stem == "demo-smollm2"
    header = path.read_text(encoding="utf-8").split("output_dir:")[0]
    if path.stem not in ("demo-smollm2", SUITE):
        for word in ("Settings", "Disk", "Time", "Tau" if path.stem != "qwen3-8b" else "tau", "arXiv"):
            assert word in header, word


def test_published_heads_are_as_published() -> None:
    vicuna = read_recipe(_path("vicuna-7b"))
    defaults = TrainConfig()
    for key in ("epochs", "batch_size", "lr", "betas", "weight_decay", "warmup_steps", "clip", "clip_threshold"):
        assert getattr(vicuna.train, key) == getattr(defaults, key), key
    assert (vicuna.head.version, vicuna.train.regression_weight, vicuna.train.classification_weight) == (
        "eagle1",
        1,
        0.1,
    )
    llama, qwen = read_recipe(_path("llama-3.1-8b")), read_recipe(_path("qwen3-8b"))
    assert {recipe.head.fc_init for recipe in (vicuna, llama, qwen)} == {"random"}
    assert (llama.head.version, llama.head.draft_vocab_size, llama.head.aux_layers) == ("eagle3", 32000, None)
    train = llama.train
    assert (train.lr, train.warmup_steps, train.epochs, train.weight_decay) == (5e-5, 12000, 40, 0)
    assert (train.unroll_steps, train.unroll_weight, train.detach_between_steps) == (7, 0.8, False)
    assert llama.decode.drafter == Tree(budget=60, top_k=10, depth=8)


def test_smollm2_recipes_differ_in_the_head_its_losses_and_its_rate_alone() -> None:
    base, *others = (read_recipe(_path(name)) for name in SMOLLM2)
    for other in others:
        assert (other.target, other.data, other.decode, other.eval) == (base.target, base.data, base.decode, base.eval)
        for key in ("epochs", "batch_size", "schedule", "seed", "max_steps", "precision"):
            assert getattr(other.train, key) == getattr(base.train, key), key
    rates = {recipe.head.version: recipe.train.lr for recipe in (base, *others)}
    assert rates == {"eagle1": 4e-4, "eagle3": 7e-4}
    assert {recipe.train.lr for recipe in (base, *others) if recipe.head.version == "eagle1"} == {4e-4}


def test_the_suite_compares_every_method_that_needs_no_draft_model() -> None:
    recipe = read_recipe(_path(SUITE))
    assert recipe.eval.prompts == ("suite:spec-bench-open",)
    drafters = [name for name, kind in DRAFTERS.items() if kind.reads_head]
    assert set(recipe.eval.methods) == {
        "hf",
        "hf-lookup",
        "plain",
        "ngram",
        "tuned",
        "default",
        *drafters,
    }
    assert [setting.sampling.temperature for setting in parse_settings(recipe.eval.sampling)] == [0, 1]


def _path(name: str) -> Path:
    return next(path for path in RECIPES if path.stem == name)
