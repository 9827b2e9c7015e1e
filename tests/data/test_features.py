"""Extraction: right features, flat memory; a kill, a full disk or a second process changes nothing in the files."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle.config import DataConfig, FeaturesConfig, Recipe, TargetConfig, as_dict
from eagle.data.features import extract, main
from eagle.data.online import TargetDocuments
from eagle.data.prepare import load_prepared, prepare
from eagle.data.shards import ShardBuffer, plan_batches, plan_shards
from eagle.data.store import FeatureStore, shard_path
from eagle.errors import EagleError
from eagle.files import write_json
from eagle.target.target import Target
from tests.exact import same
from tests.programs import Program
from tests.tiny import save_tiny_target, write_conversations


def make_recipe(folder: Path, *, documents: int = 40, **features: Any) -> Recipe:
    """A recipe on a tiny target, its data prepared."""
    settings = {"dtype": "float32", "batch_tokens": 256, "shard_tokens": 300} | features
    recipe = Recipe(
        output_dir=str(folder / "out"),
        target=TargetConfig(model=str(save_tiny_target(folder / "target")), device="cpu"),
        data=DataConfig(
            sources=(str(write_conversations(folder / "chat.jsonl", documents)),), max_len=256, validation_fraction=0.2
        ),
        features=FeaturesConfig(**settings),
    )
    prepare(recipe)
    return recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path)


def store_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def with_features(recipe: Recipe, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, **changes))


def launch(recipe: Recipe, *, processes: int = 1, extra: tuple[str, ...] = ()) -> Program:
    """The extraction as its own program, on one thread (a GEMM's bits may depend on their number)."""
    path = Path(recipe.output_dir) / "recipe.json"  # JSON is YAML
    write_json(path, as_dict(recipe))
    return Program("eagle.data.features", ["--config", path, *extra], processes=processes)


def run(recipe: Recipe, **options: Any) -> str:
    finished = launch(recipe, **options).wait()
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


def test_shards_cut_each_split_in_order() -> None:
    lengths = np.array([5, 4, 3, 9, 50, 2, 2])
    splits = ["train", "validation", "train", "train", "train", "train", "validation"]
    shards = plan_shards(lengths, splits, shard_tokens=10)
    assert [(s.split, s.documents_D.tolist(), s.tokens) for s in shards] == [
        ("train", [0, 2], 8),
        ("train", [3], 9),
        ("train", [4], 50),
        ("train", [5], 2),
        ("validation", [1, 6], 6),
    ]
    assert [shard.number for shard in shards] == [0, 1, 2, 3, 4]


def test_batches_hold_the_padded_budget_and_every_document_once() -> None:
    lengths_D = np.random.default_rng(0).integers(1, 90, size=200)
    batches = list(plan_batches(lengths_D, 256))
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(batch_B) * lengths_D[batch_B].max() <= 256 for batch_B in batches)
    padded = sum(len(batch_B) * lengths_D[batch_B].max() for batch_B in batches)
    assert padded < 1.1 * lengths_D.sum()
    assert [batch_B.tolist() for batch_B in plan_batches(np.array([7, 300]), 256)] == [[1], [0]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_document_has_the_features_it_would_have_alone(recipe: Recipe, dtype: str) -> None:
    recipe = with_features(recipe, dtype=dtype, aux_layers=(1, 2))
    manifest = extract(recipe)
    store = FeatureStore.open(recipe.store_dir)
    data, _ = load_prepared(recipe.data_dir)
    target = Target.from_config(recipe.target)
    assert len(store) == len(data) == manifest["counts"]["documents"]
    assert len(manifest["shards"]) > 3
    for number, row in enumerate(data):
        document = store[number]
        ids_BT = torch.tensor([row["input_ids"]])
        features_BTH, aux_BTA = target.features(ids_BT, (1, 2))
        assert document.id == row["id"]
        assert torch.equal(document.input_ids_T, ids_BT[0])
        assert document.loss_mask_T.tolist() == row["loss_mask"]
        assert same(document.features_TH, features_BTH[0])
        assert aux_BTA is not None
        assert document.aux_TA is not None
        assert same(document.aux_TA, aux_BTA[0])
    for split in ("train", "validation"):
        assert store.split(split) == [number for number, row in enumerate(data) if row["split"] == split] != []


def test_the_manifest_says_what_the_store_is_and_opens_against_its_target(recipe: Recipe) -> None:
    extract(recipe)
    target = Target.from_config(recipe.target)
    _, data_manifest = load_prepared(recipe.data_dir)
    expect = {
        "target": target.identity(),
        "tokenizer": data_manifest["tokenizer"],
        "layers": (),
    }
    store = FeatureStore.open(recipe.store_dir, expect)
    store.verify()
    assert store.manifest["data"] == data_manifest["fingerprint"]
    assert store.manifest["counts"]["tokens"] == store.lengths.sum()
    assert "torch" in store.manifest["versions"]
    assert torch.equal(store.token_layers().lm_head_VH, target.tokens.lm_head_VH)


def test_another_targets_store_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    extract(recipe)
    other = Target.from_config(TargetConfig(model=str(save_tiny_target(tmp_path / "other", seed=1)), device="cpu"))
    with pytest.raises(EagleError, match=r"target\.weights_sha256"):
        FeatureStore.open(recipe.store_dir, {"target": other.identity()})


def test_a_target_that_was_moved_is_still_the_same(recipe: Recipe, tmp_path: Path) -> None:
    manifest = extract(recipe)
    shutil.move(tmp_path / "target", tmp_path / "elsewhere")
    moved = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, model=str(tmp_path / "elsewhere")))
    assert extract(moved) == manifest


def test_a_second_run_does_nothing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    extract(recipe)
    before = {path: path.stat().st_mtime_ns for path in recipe.store_dir.iterdir()}

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is left to compute")

    monkeypatch.setattr(ShardBuffer, "fill", never)
    extract(recipe)
    assert {path: path.stat().st_mtime_ns for path in recipe.store_dir.iterdir()} == before


def test_resuming_rewrites_only_what_is_missing_and_gives_the_same_files(recipe: Recipe) -> None:
    extract(recipe)
    directory = recipe.store_dir
    before, kept = store_bytes(directory), shard_path(directory, 0).stat().st_mtime_ns
    (directory / "manifest.json").unlink()
    shard_path(directory, 1).unlink()  # lost
    shard_path(directory, 2).write_bytes(b"torn")
    shard_path(directory, 3).with_suffix(".json").unlink()  # killed between shard and sidecar
    (directory / ".shard-00009.safetensors.123.tmp").write_bytes(b"left by a kill")
    extract(recipe)
    assert store_bytes(directory) == before
    assert shard_path(directory, 0).stat().st_mtime_ns == kept


def test_a_damaged_shard_of_a_finished_store_is_made_again(recipe: Recipe) -> None:
    extract(recipe)
    before = store_bytes(recipe.store_dir)
    shard_path(recipe.store_dir, 1).unlink()
    extract(recipe)
    assert store_bytes(recipe.store_dir) == before


def test_token_layers_of_a_finished_store_are_made_again(recipe: Recipe) -> None:
    extract(recipe)
    before = store_bytes(recipe.store_dir)
    (recipe.store_dir / "token_layers.safetensors").unlink()
    with pytest.raises(
        EagleError, match=r"file token_layers\.safetensors .* is missing; delete it and run `eagle features"
    ):
        FeatureStore.open(recipe.store_dir).verify()
    extract(recipe)
    assert store_bytes(recipe.store_dir) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"aux_layers": (1,)}, r"layers is \[\], expected \[1\]"),
        ({"dtype": "bfloat16"}, "dtype is 'float32', expected 'bfloat16'"),
        ({"shard_tokens": 200}, r"arguments\.shard_tokens is 300, expected 200"),
    ],
)
def test_another_extractions_folder_is_not_mixed_with(recipe: Recipe, change: dict[str, Any], named: str) -> None:
    extract(recipe)
    before = store_bytes(recipe.store_dir)
    with pytest.raises(EagleError, match=named) as caught:
        extract(with_features(recipe, **change))
    assert "delete the folder" in str(caught.value)
    assert store_bytes(recipe.store_dir) == before


def test_data_of_another_chat_template_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages[0]['content'] }}")
    data = dataclasses.replace(recipe.data, chat_template=str(tmp_path / "other.jinja"))
    with pytest.raises(EagleError, match=r"chat_template_sha256.*eagle data prepare"):
        extract(dataclasses.replace(recipe, data=data))


def test_layers_the_target_lacks_are_refused_before_anything_is_written(recipe: Recipe) -> None:
    with pytest.raises(EagleError, match=r"\[3\]; .* hidden states 0 \.\. 2"):
        extract(with_features(recipe, aux_layers=(1, 3)))
    assert not recipe.store_dir.exists()


def test_a_disk_that_fills_up_loses_nothing(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = recipe.store_dir
    directory.mkdir(parents=True)
    # Where the fifth shard's temporary file will be; writing to /dev/full is "no space left on device".
    (directory / f".{shard_path(directory, 4).name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr("eagle.data.features._remove_leftovers", lambda _: None)
        with pytest.raises(
            EagleError, match=r"is full .*4 of \d+ shards .* are saved, \d+ remain.* same command again"
        ):
            extract(recipe)
    assert [shard_path(directory, number).is_file() for number in range(5)] == [True] * 4 + [False]
    assert not (directory / "manifest.json").exists()
    extract(recipe)
    FeatureStore.open(directory).verify()


def test_too_small_a_disk_is_refused_at_the_start(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("eagle.data.features.shutil.disk_usage", lambda _: usage)
    with pytest.raises(EagleError, match=r"need .* free; free some space"):
        extract(recipe)
    assert not list(recipe.store_dir.glob("shard-*"))


def test_features_that_are_not_finite_name_the_document(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = load_prepared(recipe.data_dir)
    bad = data[7]["input_ids"]
    original = Target.features

    def poisoned(self: Target, ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        features_BTH, aux_BTA = original(self, ids_BT, layers)
        features_BTH = features_BTH.clone()
        for row in range(len(ids_BT)):
            if ids_BT[row, : len(bad)].tolist() == bad:
                features_BTH[row, len(bad) - 1, 3] = float("nan")
        return features_BTH, aux_BTA

    monkeypatch.setattr(Target, "features", poisoned)
    with pytest.raises(EagleError, match=repr(data[7]["id"])):
        extract(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_aux_states_that_are_not_finite_name_the_document_and_the_layer(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, dtype: Any, value: float
) -> None:
    recipe = with_features(recipe, dtype=dtype, aux_layers=(1, 2))
    data, _ = load_prepared(recipe.data_dir)
    bad = data[7]["input_ids"]
    original = Target.features

    def poisoned(self: Target, ids_BT: torch.Tensor, layers: Any = ()) -> Any:
        features_BTH, aux_BTA = original(self, ids_BT, layers)
        aux_BTA = None if aux_BTA is None else aux_BTA.clone()
        for row in range(len(ids_BT)):
            if aux_BTA is not None and ids_BT[row, : len(bad)].tolist() == bad:
                aux_BTA[row, len(bad) - 1, self.hidden_size + 3] = value
        return features_BTH, aux_BTA

    monkeypatch.setattr(Target, "features", poisoned)
    with pytest.raises(EagleError, match=f"states after layer 2 of document {data[7]['id']!r} are not finite"):
        extract(recipe)


def test_prepared_tokens_that_the_target_has_no_embedding_of_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    small = save_tiny_target(tmp_path / "small", vocab_size=200)
    recipe = dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, model=str(small)))
    for features in (
        lambda: extract(recipe),
        lambda: TargetDocuments(recipe, Target.from_config(recipe.target)).read([0]),
    ):
        with pytest.raises(EagleError, match=r"has token \d+ at place \d+, the target has embeddings of 200"):
            features()


def test_the_program_prints_one_message_and_exits_with_2(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--config" in capsys.readouterr().err
    path = Path(recipe.output_dir) / "recipe.json"
    write_json(path, as_dict(recipe))
    assert main([f"--config={path}", "--features.shard_token", "9"]) == 2
    assert "did you mean features.shard_tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, documents=700, shard_tokens=150)
    run(recipe)
    whole = store_bytes(recipe.store_dir)
    again = dataclasses.replace(recipe, output_dir=str(tmp_path / "again"))
    prepare(again)
    for number in (3, 20):
        process = launch(again)
        while not shard_path(again.store_dir, number).with_suffix(".json").exists():
            assert process.running, process.wait()
            time.sleep(0.001)
        process.kill()
        process.wait()
        assert not (again.store_dir / "manifest.json").exists(), "killed too late to prove anything"
    run(again)
    resumed = store_bytes(again.store_dir)
    del whole["recipe.yaml"], resumed["recipe.yaml"]  # they name their output_dir
    assert resumed == whole


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    run(recipe)
    one = store_bytes(recipe.store_dir)
    again = dataclasses.replace(recipe, output_dir=str(tmp_path / "again"))
    prepare(again)
    run(again, processes=2)
    two = store_bytes(again.store_dir)
    del one["recipe.yaml"], two["recipe.yaml"]
    assert two == one


PEAK = """
import json, resource, sys
from eagle.config import read_recipe
from eagle.data.features import extract
extract(read_recipe(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_is_flat_in_the_size_of_the_data(tmp_path: Path) -> None:
    """Ten times the documents peak within 10% of the same memory; all their features together are a quarter of it."""
    peaks = []
    for scale in (1, 10):
        folder = tmp_path / str(scale)
        folder.mkdir()
        recipe = make_recipe(folder, documents=40, batch_tokens=4096, shard_tokens=32768, aux_layers=(0, 1, 2))
        rows, _ = load_prepared(recipe.data_dir)
        repeated = rows.select(np.tile(np.arange(len(rows)), 12 * scale))
        repeated.save_to_disk(str(folder / "repeated"))
        shutil.rmtree(recipe.data_dir / "dataset")
        (folder / "repeated").rename(recipe.data_dir / "dataset")
        path = folder / "recipe.json"
        write_json(path, as_dict(recipe))
        output = subprocess.run(
            [sys.executable, "-c", PEAK, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(output.stdout.strip()))
        tokens = json.loads((recipe.store_dir / "manifest.json").read_text())["counts"]["tokens"]
        print(f"{tokens:,} tokens: peak {peaks[-1] / 1024:.0f} MB")
    assert peaks[1] <= 1.1 * peaks[0], peaks


def test_a_target_that_no_head_can_be_made_for_is_refused_before_its_features_are_computed(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    save_tiny_target(Path(recipe.target.model), "gpt2", n_embd=36, n_head=12)  # 3 dimensions a head: no pairs to rotate
    with pytest.raises(EagleError, match=r"no draft head can be given the shape .*head dim 3"):
        extract(recipe)
    assert not recipe.store_dir.exists()
