"""A store of another target, tokenizer or data than the recipe's is refused before anything is trained on it."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from eagle.config import DataConfig, FeaturesConfig, Recipe, TargetConfig
from eagle.data import match
from eagle.data.features import extract
from eagle.data.match import require_match
from eagle.data.online import open_documents
from eagle.data.prepare import prepare
from eagle.data.store import FeatureStore
from eagle.data.target_files import weights_stamp
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


def _with_target(recipe: Recipe, model: Path, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, model=str(model), **changes))


def _opened(recipe: Recipe) -> int:
    return len(open_documents(recipe, Accelerator(cpu=True)))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that are loaded to compare their weights."""
    real, loaded = match.load_model, list[str]()

    def load_model(config: TargetConfig) -> Any:
        loaded.append(config.model)
        return real(config)

    monkeypatch.setattr(match, "load_model", load_model)
    return loaded


def test_another_target_of_the_same_shape_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    other = save_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(
        EagleError, match=r"has features of .*/target \(weights .*target.model is .*/other .* same shape"
    ):
        _opened(_with_target(recipe, other))


def test_a_target_trained_further_in_its_place_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    shutil.copytree(recipe.target.model, tmp_path / "target")
    recipe = _with_target(recipe, tmp_path / "target")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    model.model.layers[1].mlp.up_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path / "target")
    with pytest.raises(EagleError, match=r"does not match: .* of the same shape; .*eagle features RECIPE"):
        _opened(recipe)


def test_a_copy_is_the_same_target_however_it_is_cut_into_files(
    recipe: Recipe, tmp_path: Path, loads: list[str]
) -> None:
    """Also as the hub's cache keeps it. None is loaded for that."""
    snapshot = tmp_path / "hub" / "models--some--target" / "snapshots" / "abc123"
    shutil.copytree(recipe.target.model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc123")
    model = AutoModelForCausalLM.from_pretrained(recipe.target.model)
    shutil.copytree(recipe.target.model, tmp_path / "cut", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    for place in (snapshot, tmp_path / "cut"):
        assert _opened(_with_target(recipe, place)) == 20
    stamp = weights_stamp(recipe.target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        assert weights_stamp(TargetConfig(model="some/target")) == stamp is not None
    assert loads == []


def test_a_target_whose_weights_are_not_here_is_taken_under_its_name_alone(recipe: Recipe, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(recipe.target.model, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    path = recipe.store_dir / "manifest.json"
    values = json.loads(path.read_text())
    values["target"]["model"] = str(tmp_path / "a")
    path.write_text(json.dumps(values))
    assert _opened(_with_target(recipe, tmp_path / "a")) == 20
    with pytest.raises(EagleError, match=r"target.model is .*/b, not .*/a .* cannot be told: .*put its weights there"):
        _opened(_with_target(recipe, tmp_path / "b"))


def test_the_same_files_in_another_dtype_are_other_weights(recipe: Recipe, loads: list[str]) -> None:
    model = Path(recipe.target.model)
    assert _opened(_with_target(recipe, model, dtype="float32")) == 20
    with pytest.raises(EagleError, match=r"target.dtype bfloat16"):
        _opened(_with_target(recipe, model, dtype="bfloat16"))
    assert len(loads) == 2


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
