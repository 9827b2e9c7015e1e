"""Training a head with a reduced draft vocabulary, on a tiny store."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from eagle.config import HeadConfig, Recipe, as_dict
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.train.loop import train
from tests.programs import run_program
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_loop import metrics_of


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_tiny_store(tmp_path, documents=12)
    return dataclasses.replace(
        tiny_recipe(tmp_path, max_steps=6), head=HeadConfig(draft_vocab_size=40, fc_init="random")
    )


def test_the_trained_head_drafts_the_stores_most_frequent_supervised_tokens(recipe: Recipe) -> None:
    head = load_head(train(recipe))
    store = FeatureStore.open(recipe.store_dir)
    counts: Counter[int] = Counter()
    for number in store.split("train"):
        document = store[number]
        counts.update(document.input_ids_T[document.loss_mask_T].tolist())
    eos = 2  # never seen here, and yet drafted: it ends every answer
    assert counts[eos] == 0
    best = sorted({*counts, eos}, key=lambda token: (token != eos, -counts[token], token))[:40]
    assert head.vocabulary is not None
    assert head.vocabulary.target_ids_D.tolist() == sorted(best)
    assert head.vocabulary.coverage == pytest.approx(sum(counts[token] for token in best) / counts.total())
    lines = metrics_of(recipe)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    assert all(0 <= line["val_top1_agreement"] <= 1 for line in lines if "val_top1_agreement" in line)


def test_an_interrupted_run_resumes_with_the_same_vocabulary_and_ends_the_same(recipe: Recipe, tmp_path: Path) -> None:
    whole = load_head(train(recipe)).state_dict()
    other = dataclasses.replace(recipe, output_dir=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "features").symlink_to(recipe.store_dir)
    train(with_train(other, max_steps=3))
    resumed = load_head(train(other)).state_dict()
    assert {"d2t", "t2d"} <= whole.keys()
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), key
    with pytest.raises(EagleError, match=r"head\.draft_vocab_size was 40, is 30"):
        train(dataclasses.replace(other, head=HeadConfig(draft_vocab_size=30)))


@pytest.mark.parametrize("size", [384, None])
def test_the_whole_vocabulary_needs_no_map(size: int | None, recipe: Recipe) -> None:
    head = load_head(train(dataclasses.replace(recipe, head=HeadConfig(draft_vocab_size=size))))
    assert head.vocabulary is None
    assert head.config.draft_vocab_size is None


def test_a_size_beyond_the_targets_vocabulary_is_refused(recipe: Recipe) -> None:
    with pytest.raises(EagleError, match=r"head\.draft_vocab_size is 385, expected 1 to 384"):
        train(dataclasses.replace(recipe, head=HeadConfig(draft_vocab_size=385)))


@pytest.mark.slow
def test_a_run_goes_on_with_the_vocabulary_that_it_began_with(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever would be chosen today."""
    other = dataclasses.replace(recipe, output_dir=str(tmp_path / "other"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "features").symlink_to(recipe.store_dir)
    with monkeypatch.context() as earlier:
        earlier.setattr("eagle.train.run.eos_token_ids", lambda config: ())
        whole = load_head(train(recipe)).state_dict()
        train(with_train(other, max_steps=3))
    resumed = load_head(train(other)).state_dict()
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    assert not bool(whole["t2d"][2])


@pytest.mark.slow
def test_two_processes_train_the_head_of_one(recipe: Recipe, tmp_path: Path) -> None:
    whole = load_head(train(recipe)).state_dict()
    two = dataclasses.replace(with_train(recipe, batch_size=1), output_dir=str(tmp_path / "two"))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "features").symlink_to(recipe.store_dir)
    path = tmp_path / "two.yaml"
    path.write_text(json.dumps(as_dict(two)))
    finished = run_program("eagle.train.__main__", ["--config", path], processes=2)
    assert finished.returncode == 0, finished.stderr
    for key, value in load_head(two.head_dir).state_dict().items():
        torch.testing.assert_close(value, whole[key], rtol=1e-3, atol=1e-5, msg=key)
