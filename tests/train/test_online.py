"""The target in the loop: the batches and losses that its float32 store would give."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eagle.cli.run import run as run_all
from eagle.config import DataConfig, FeaturesConfig, HeadConfig, Recipe, TargetConfig, TrainConfig
from eagle.data.features import extract
from eagle.data.online import TargetDocuments, open_documents
from eagle.data.prepare import prepare
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.target.target import Target
from eagle.train import run
from eagle.train.loop import train
from tests.exact import same
from tests.tiny import save_tiny_target, write_conversations
from tests.train.stores import SMALL, with_train
from tests.train.test_step import metrics_of, weights_of

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe with prepared data and a float32 store with all aux layers."""
    folder = tmp_path_factory.mktemp("online")
    recipe = Recipe(
        output_dir=str(folder / "run"),
        target=TargetConfig(model=str(save_tiny_target(folder / "target")), device="cpu"),
        data=DataConfig(
            sources=(str(write_conversations(folder / "chat.jsonl", 20)),), max_len=128, validation_fraction=0.2
        ),
        features=FeaturesConfig(dtype="float32", aux_layers=LAYERS, batch_tokens=200, shard_tokens=300),
        train=TrainConfig(**{**SMALL, "epochs": 1, "batch_size": 3}),
    )
    prepare(recipe)
    extract(recipe)
    return recipe


def online(recipe: Recipe, folder: Path) -> Recipe:
    """The same recipe without a store, in a folder of its own."""
    (folder / "run").mkdir()
    (folder / "run" / "data").symlink_to(recipe.data_dir)
    return with_train(dataclasses.replace(recipe, output_dir=str(folder / "run")), features="online")


def offline(recipe: Recipe, folder: Path) -> Recipe:
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "features").symlink_to(recipe.store_dir)
    return dataclasses.replace(recipe, output_dir=str(folder / "run"))


def opened(recipe: Recipe) -> Any:
    return open_documents(recipe, Accelerator(cpu=True))


def test_the_target_gives_the_documents_of_its_store(stored: Recipe, tmp_path: Path) -> None:
    store = FeatureStore.open(stored.store_dir).for_layers((2, 0))
    source = opened(online(stored, tmp_path)).for_layers((2, 0))
    assert isinstance(source, TargetDocuments)
    assert source.lengths.tolist() == store.lengths.tolist()
    assert source.target_identity == store.target_identity
    for split in ("train", "validation"):
        assert source.split(split) == store.split(split) != []
    numbers = [7, 3, 11, 0, 19]
    for number, ours in zip(numbers, source.read(numbers), strict=True):
        theirs = store[number]
        assert ours.id == theirs.id
        assert torch.equal(ours.input_ids_T, theirs.input_ids_T)
        assert torch.equal(ours.loss_mask_T, theirs.loss_mask_T)
        assert same(ours.features_TH, theirs.features_TH)
        assert same(ours.aux_TA, theirs.aux_TA)
        assert torch.equal(ours.states, ours.aux_TA)
        for a, b in zip(source.ids_and_mask(number), store.ids_and_mask(number), strict=True):
            assert torch.equal(a, b)


HEADS = {"eagle1": HeadConfig(draft_vocab_size=40), "eagle3": HeadConfig(version="eagle3", aux_layers=LAYERS)}


@pytest.mark.slow
@pytest.mark.parametrize("version", HEADS)
def test_online_training_has_the_losses_and_weights_of_offline_training(
    version: str, stored: Recipe, tmp_path: Path
) -> None:
    """Also with a draft vocabulary counted without a store, and with aux layers."""
    recipe = dataclasses.replace(stored, head=HEADS[version])
    ours, theirs = online(recipe, tmp_path), offline(recipe, tmp_path / "offline")
    train(ours)
    train(theirs)
    assert not ours.store_dir.exists()
    lines = list(zip(metrics_of(ours), metrics_of(theirs), strict=True))
    assert len([line for line, _ in lines if "loss" in line]) >= 4
    for mine, other in lines:
        for key in ("loss", "val_loss", "grad_norm", "supervised_tokens"):
            assert mine.get(key, 0) == pytest.approx(other.get(key, 0), rel=1e-5, abs=1e-5), (mine["step"], key)
    for name, weight in weights_of(ours).items():
        torch.testing.assert_close(weight, weights_of(theirs)[name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_coarser_store_trains_nearly_the_same(dtype: Any, stored: Recipe, tmp_path: Path) -> None:
    (tmp_path / "coarse").mkdir()
    coarse = with_train(online(stored, tmp_path / "coarse"), features="store")
    coarse = dataclasses.replace(coarse, features=dataclasses.replace(stored.features, dtype=dtype))
    extract(coarse)
    exact = online(stored, tmp_path)
    for recipe in (coarse, exact):
        train(recipe)
    pairs = [
        (mine["loss"], other["loss"])
        for mine, other in zip(metrics_of(coarse), metrics_of(exact), strict=True)
        if "loss" in mine
    ]
    assert pairs[0][0] != pairs[0][1]
    for mine, other in pairs:
        assert mine == pytest.approx(other, rel=2e-2 if dtype == "float8" else 5e-3)


def test_training_leaves_the_target_as_it_was(stored: Recipe, tmp_path: Path) -> None:
    """Its embedding and LM head are converted for training, but not the target's own."""
    source = opened(online(stored, tmp_path))
    before = source[0].features_TH
    source.token_layers().to(torch.bfloat16)
    assert source.target.dtype == torch.float32
    assert torch.equal(source[0].features_TH, before)


def test_the_store_needs_no_target_and_the_target_no_store(stored: Recipe, tmp_path: Path, monkeypatch: Any) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Target, "from_config", never)
    assert isinstance(opened(offline(stored, tmp_path)), FeatureStore)


@pytest.mark.slow
def test_a_whole_run_writes_no_store(stored: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = online(stored, tmp_path)
    monkeypatch.setattr("eagle.eval.harness.evaluate", lambda recipe: {"evaluated": recipe.head_dir.is_dir()})
    assert run_all(recipe) == {"evaluated": True}
    assert not recipe.store_dir.exists()


def test_mistakes_are_explained(stored: Recipe, tmp_path: Path) -> None:
    recipe = online(stored, tmp_path)
    with pytest.raises(EagleError, match=r"aux_layers has \[3\]; .* hidden states 0 \.\. 2"):
        opened(recipe).for_layers((1, 3))
    with pytest.raises(EagleError, match=r"train.workers is 2, .* set train.workers to 0"):
        run.check_settings(with_train(recipe, workers=2).train, Accelerator(cpu=True))
    with pytest.raises(EagleError, match="eagle data prepare RECIPE"):
        opened(dataclasses.replace(recipe, output_dir=str(tmp_path / "nothing")))
    short = tmp_path / "short"
    save_tiny_target(short, max_position_embeddings=8)
    with pytest.raises(EagleError, match=r"longest document .* set data.max_len to 8"):
        opened(dataclasses.replace(recipe, target=TargetConfig(model=str(short), device="cpu")))


@pytest.mark.slow
def test_another_target_or_other_data_is_another_run(stored: Recipe, tmp_path: Path) -> None:
    recipe = online(stored, tmp_path)
    fingerprint = opened(recipe).fingerprint()
    assert opened(recipe).fingerprint() == fingerprint
    shutil.copytree(recipe.target.model, tmp_path / "elsewhere")
    moved = dataclasses.replace(recipe, target=TargetConfig(model=str(tmp_path / "elsewhere"), device="cpu"))
    assert opened(moved).fingerprint() == fingerprint, "a path is not what a target is"
    other = TargetConfig(model=str(save_tiny_target(tmp_path / "other", seed=1)), device="cpu")
    assert opened(dataclasses.replace(recipe, target=other)).fingerprint() != fingerprint
    more = dataclasses.replace(recipe, output_dir=str(tmp_path / "more"))
    more = dataclasses.replace(more, data=dataclasses.replace(recipe.data, max_samples=12))
    prepare(more)
    assert opened(more).fingerprint() != fingerprint


@pytest.mark.slow
def test_decoding_while_training_online_takes_the_target_that_is_there(
    stored: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Target] = []
    real = Target.from_config

    def count(*arguments: Any, **options: Any) -> Target:
        loaded.append(real(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(Target, "from_config", count)
    recipe = with_train(online(stored, tmp_path), decode_every=2, decode_tokens=4, max_steps=2)
    train(recipe)
    assert [line["step"] for line in metrics_of(recipe) if "decoded_tau" in line] == [2]
    assert len(loaded) == 1
