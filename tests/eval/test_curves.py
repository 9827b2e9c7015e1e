"""eval.batches: what it needs is said before anything is measured, and a killed curve is not measured again."""

import dataclasses
from pathlib import Path

import pytest

from eagle.config import Recipe, read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Tree
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuned import TunedDrafter
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, dtype_name, machine_name, write_tuned
from eagle.errors import EagleError
from eagle.eval import throughput
from eagle.eval.settings import parse_settings
from eagle.eval.suites.prompt_set import recipe_prompts
from eagle.eval.throughput import Curves
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target
from tests.eval.test_harness import random_head
from tests.recipes import write_recipe


@pytest.fixture
def target(tmp_path: Path) -> Target:
    recipe = read_recipe(write_recipe(tmp_path, eval={"max_new_tokens": 4}))
    target = Target.from_config(recipe.target)
    save_head(random_head(target), recipe.head_dir)
    return target


def of(folder: Path, target: Target, *overrides: str) -> tuple[Curves, Recipe]:
    recipe = read_recipe(folder / "recipe.yaml", overrides)
    return Curves(recipe, target, recipe.head_dir, recipe_prompts(recipe.eval)), recipe


def test_one_request_at_a_time_measures_no_curve(tmp_path: Path, target: Target) -> None:
    asked, recipe = of(tmp_path, target)
    assert asked.measure(parse_settings(("T=0",)), {}) == []
    assert not (recipe.eval_dir / "throughput.json").exists()


def test_a_tree_left_open_is_the_published_one_that_the_ledger_predicts(tmp_path: Path, target: Target) -> None:
    tree = TreeSettings(budget=2, top_k=1, depth=1)
    entry = TunedTrees(
        hardware=machine_name(target.device),
        engine=target.engine,
        dtype=dtype_name(target.dtype),
        choices=(TunedChoice(batch=1, temperature=0.0, tree=tree),),
    )
    recipe = of(tmp_path, target)[1]
    write_tuned(recipe.head_dir, entry)
    left_open = dataclasses.replace(recipe.decode, drafter=Tree())
    decoder = SpeculativeDecoder.from_pretrained(target, recipe.head_dir, decode=left_open)
    assert isinstance(decoder.drafter, TunedDrafter)
    asked, _ = of(
        tmp_path,
        target,
        "--eval.batches=[1,2]",
        *(f"--decode.drafter.{key}=null" for key in ("budget", "top_k", "depth")),
    )
    assert isinstance(asked.decoder.drafter, HeadDrafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        (("--eval.batches=[0,2]",), "expected sizes from 1 on"),
        (("--eval.batches=[]",), "expected sizes from 1 on"),
        (("--eval.batches=[1,3]",), "need a multiple of 3 prompts, there are 2"),
        (("--eval.batches=[1,2]", "--decode.rule=rejection"), "does not promise plain decoding's tokens"),
        (("--eval.batches=[1,2]", "--decode.drafter=none"), "name a drafter"),
    ],
)
def test_what_cannot_be_measured_is_refused_beforehand(
    override: tuple[str, ...], said: str, tmp_path: Path, target: Target
) -> None:
    with pytest.raises(EagleError, match=said):
        of(tmp_path, target, *override)


@pytest.mark.slow
def test_a_setting_that_is_done_is_not_measured_again(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    original = throughput.measure

    def noted(*args: object, **kwargs: object) -> object:
        measured.append(kwargs["setting"].label)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(throughput, "measure", noted)
    asked, _ = of(tmp_path, target, "--eval.batches=[2]")
    settings = parse_settings(("T=0", "T=0.9"))
    with pytest.raises(KeyboardInterrupt):
        asked.measure(settings, {"head": "a"})
    found = asked.measure(settings, {"head": "a"})
    assert measured == ["T=0", "T=0.9", "T=0.9"]
    assert [curve["setting"] for curve in found] == ["T=0", "T=0.9"]
    asked.measure(settings, {"head": "another"})
    assert len(measured) == 5
