"""Several feature stores as one source of documents."""

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle.config import Recipe
from eagle.data.documents import prompt_digest
from eagle.data.joined import JoinedStores
from eagle.data.store import FeatureStore, write_shard
from eagle.errors import EagleError
from eagle.train import run
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_step import metrics_of


def _stores(directory: Path) -> tuple[Recipe, FeatureStore, FeatureStore]:
    """A recipe that reads the store of `directory`/a and, besides, that of `directory`/b."""
    write_tiny_store(directory / "a", documents=7)
    write_tiny_store(directory / "b", documents=5, tokens=lambda number: 12 + number)
    recipe, other = tiny_recipe(directory / "a", epochs=1, batch_size=2), directory / "b" / "run" / "features"
    both = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, more_stores=(str(other),)))
    return both, FeatureStore.open(recipe.store_dir), FeatureStore.open(other)


def test_the_documents_follow_each_other_and_keep_their_split(tmp_path: Path) -> None:
    _, first, second = _stores(tmp_path)
    joined = pickle.loads(pickle.dumps(JoinedStores([first, second]).for_layers(())))
    assert len(joined) == 12
    assert np.array_equal(joined.lengths, np.concatenate([first.lengths, second.lengths]))
    assert joined.split("validation") == [5, 6, 10, 11]
    assert joined.split("train") == [0, 1, 2, 3, 4, 7, 8, 9]
    for number, (store, inside) in {0: (first, 0), 6: (first, 6), 7: (second, 0), 11: (second, 4)}.items():
        document, (ids_T, mask_T) = store[inside], joined.ids_and_mask(number)
        assert torch.equal(joined[number].features_TH, document.features_TH)
        assert torch.equal(ids_T, document.input_ids_T)
        assert torch.equal(mask_T, document.loss_mask_T)
    with pytest.raises(IndexError):
        joined[12]


def test_training_reads_them_all_and_remembers_which(tmp_path: Path) -> None:
    both, _, _ = _stores(tmp_path)
    train(both)
    assert metrics_of(both)[-1]["step"] == 4  # 8 documents, two a step
    alone = dataclasses.replace(both, features=dataclasses.replace(both.features, more_stores=()))
    with pytest.raises(EagleError, match=r"features \(their target and data\) was"):
        train(with_train(alone, epochs=2))


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    both, first, second = _stores(tmp_path)
    with pytest.raises(EagleError, match=r"is named twice"):
        JoinedStores([first, second, FeatureStore.open(first.directory)])
    with pytest.raises(EagleError, match=r"more_stores is set, but train.features is online"):
        train(with_train(both, features="online"))
    path = second.directory / "manifest.json"
    before = json.loads(path.read_text())
    for change, message in (
        ({"target": {"model": "another", "hidden_size": 32}}, r"is of the target another, .* of tiny"),
        ({"tokenizer": {"tokenizer_sha256": "0"}}, r"another tokenizer or chat template"),
    ):
        path.write_text(json.dumps(before | change))
        with pytest.raises(EagleError, match=message):
            train(both)
    path.unlink()
    with pytest.raises(EagleError, match=r"there is no feature store here"):
        train(both)


def test_stores_of_one_target_under_two_names_belong_together(tmp_path: Path) -> None:
    """A hub id, say, and the folder of its snapshot."""
    _, *stores = _stores(tmp_path)
    identity = {"weights_sha256": "a" * 64, "hidden_size": 32}
    first, second = (
        FeatureStore(store.directory, store.manifest | {"target": identity | {"model": name}})
        for store, name in zip(stores, ("owner/name", "/models/name"), strict=True)
    )
    assert len(JoinedStores([first, second])) == 12
    second.manifest["target"]["weights_sha256"] = "b" * 64
    with pytest.raises(
        EagleError, match=r"is of the target /models/name \(weights bbb.*, .* of owner/name \(weights aaa"
    ):
        JoinedStores([first, second])


def test_a_document_of_an_earlier_store_counts_once_so_that_nothing_held_out_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_store(tmp_path / "a", documents=7)  # the last two are held out
    write_tiny_store(tmp_path / "b", documents=9, validation=1)  # the same seven, and two more
    recipe, other = tiny_recipe(tmp_path / "a", epochs=1, batch_size=2), tmp_path / "b" / "run" / "features"
    first, second = FeatureStore.open(recipe.store_dir), FeatureStore.open(other)
    assert torch.equal(first[5].input_ids_T, second[5].input_ids_T)
    joined = JoinedStores([first, second])
    assert (len(joined), joined.repeated) == (9, 7)
    assert joined.split("validation") == [5, 6, 8]
    assert joined.split("train") == [0, 1, 2, 3, 4, 7]
    for number in (7, 8):
        assert torch.equal(joined[number].input_ids_T, second[number].input_ids_T)
    assert joined.lengths[7:].tolist() == second.lengths[7:].tolist()
    both = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, more_stores=(str(other),)))
    train(both)
    assert "7 documents of features.more_stores are in an earlier store too" in capsys.readouterr().err
    assert json.loads((both.head_dir / "training.json").read_text())["learnt_from"]["documents"] == 6


def test_a_prompt_that_an_earlier_store_holds_out_is_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another answer to it: other tokens, and the other side of the split."""
    write_tiny_store(tmp_path / "a", documents=7)  # the last two are held out
    write_tiny_store(
        tmp_path / "b", documents=9, validation=1, tokens=lambda number: 9 + 5 * number % 11 + 2 * (number > 4)
    )
    recipe, other = tiny_recipe(tmp_path / "a", epochs=1, batch_size=2), tmp_path / "b" / "run" / "features"
    first, second = FeatureStore.open(recipe.store_dir), FeatureStore.open(other)
    ids, longer = (store.ids_and_mask(5)[0] for store in (first, second))
    assert torch.equal(ids[:4], longer[:4])
    assert len(longer) == len(ids) + 2
    joined = JoinedStores([first, second])
    assert (joined.repeated, joined.crossing) == (5, 1)
    held_out = {prompt_digest(*joined.ids_and_mask(number)) for number in joined.split("validation")}
    assert not held_out & {prompt_digest(*joined.ids_and_mask(number)) for number in joined.split("train")}
    both = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, more_stores=(str(other),)))
    train(both)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 documents of features.more_stores are left out: an earlier store has their prompts" in said


@pytest.mark.parametrize("fraction", [1.0, 0.1])
def test_a_store_split_by_an_earlier_rule_keeps_its_sides_and_the_leak_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fraction: float
) -> None:
    """Of the documents that are trained on: a smaller train.data_fraction leaks less."""
    write_tiny_store(tmp_path, documents=10, validation=2)
    recipe = tiny_recipe(tmp_path, epochs=1, data_fraction=fraction)
    store = FeatureStore.open(recipe.store_dir)
    manifest = json.loads((recipe.store_dir / "manifest.json").read_text())
    last = next(shard for shard in manifest["shards"] if shard["split"] == "validation")
    trained = store[run.training_documents(store, recipe.train)[0]]
    tensors = load_file(recipe.store_dir / last["file"])
    first_length = int(tensors["offsets"][1])
    tensors["input_ids"][:4] = trained.input_ids_T[:4]
    assert first_length > 4
    tensors.pop("offsets")
    changed = write_shard(
        recipe.store_dir / last["file"],
        tensors=tensors,
        lengths=[int(store.lengths[number]) for number in store.split("validation")],
        ids=["doc-8", "doc-9"],
        split="validation",
    )
    last.update(changed)
    (recipe.store_dir / "manifest.json").write_text(json.dumps(manifest))
    train(recipe)
    said = " ".join(capsys.readouterr().err.split())
    assert "1 of 2 validation documents have the prompt of a training document" in said
    assert FeatureStore.open(recipe.store_dir).split("validation") == [8, 9]
