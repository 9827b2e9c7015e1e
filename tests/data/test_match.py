"""A store of another target, tokenizer or data than the recipe's is refused before anything is trained on it."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from eagle.config import DataConfig, FeaturesConfig, Recipe, TargetConfig
from eagle.data.features import extract
from eagle.data.match import require_match
from eagle.data.online import open_documents
from eagle.data.prepare import prepare
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from tests.tiny import save_tiny_target, write_conversations


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("match")
    recipe = Recipe(
        output_dir=str(folder / "run"),
        target=TargetConfig(model=str(save_tiny_target(folder / "target")), device="cpu"),
        data=DataConfig(sources=(str(write_conversations(folder / "chat.jsonl", 20)),), max_len=128),
        features=FeaturesConfig(batch_tokens=256),
    )
    prepare(recipe)
    extract(recipe)
    return recipe


@pytest.fixture
def recipe(finished: Recipe, tmp_path: Path) -> Recipe:
    """A copy whose folder may be changed."""
    shutil.copytree(finished.output_dir, tmp_path / "run")
    return dataclasses.replace(finished, output_dir=str(tmp_path / "run"))


def _with_data(recipe: Recipe, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **changes))


def test_the_recipes_own_store_is_opened_with_or_without_its_prepared_data(recipe: Recipe) -> None:
    assert len(open_documents(recipe, Accelerator(cpu=True))) == 20
    shutil.rmtree(recipe.data_dir)
    assert len(open_documents(recipe, Accelerator(cpu=True))) == 20


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"num_hidden_layers": 4}, "target.num_layers is 3, expected 4"),
        ({"family": "qwen2"}, "target.architecture is 'LlamaForCausalLM', expected 'Qwen2ForCausalLM'"),
        ({"vocab_size": 400}, "target.vocab_size is 384, expected 400"),
        ({"hidden_size": 64}, "target.hidden_size is 32, expected 64"),
    ],
)
def test_another_target_is_refused(recipe: Recipe, shape: dict[str, Any], named: str, tmp_path: Path) -> None:
    other = TargetConfig(model=str(save_tiny_target(tmp_path / "other", **shape)), device="cpu")
    with pytest.raises(EagleError, match=named) as caught:
        open_documents(dataclasses.replace(recipe, target=other), Accelerator(cpu=True))
    assert "eagle features RECIPE" in str(caught.value)


def test_another_chat_template_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(EagleError, match=r"tokenizer\.chat_template_sha256 is"):
        open_documents(_with_data(recipe, chat_template=str(tmp_path / "other.jinja")), Accelerator(cpu=True))


def test_data_that_changed_since_the_extraction_is_refused(recipe: Recipe) -> None:
    other = _with_data(recipe, max_samples=10)
    with pytest.raises(EagleError, match=r"the prepared data .* max_samples is None, expected 10"):
        open_documents(other, Accelerator(cpu=True))
    prepare(other)
    with pytest.raises(EagleError, match=r"was extracted from other prepared data .*eagle features RECIPE"):
        open_documents(other, Accelerator(cpu=True))


def test_what_an_older_manifest_does_not_record_is_not_asked_for(recipe: Recipe) -> None:
    store = FeatureStore.open(recipe.store_dir)
    store.manifest.update(target={"model": "x"})
    for key in ("tokenizer", "data"):
        del store.manifest[key]
    require_match(store, _with_data(recipe, max_len=7))
