"""The store's format: what is written is what is read, by slice; stale, missing and damaged stores are refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle.data.store import FeatureStore, finished_shard, shard_path, write_manifest, write_shard
from eagle.errors import EagleError
from tests.tiny import tiny_model

H = 32
IDENTITY: dict[str, Any] = {
    "format": 1,
    "target": {"model": "tiny", "weights_sha256": "aa"},
    "tokenizer": {"chat_template_sha256": "bb"},
    "layers": [1],
    "dtype": "bfloat16",
}


def shard_tensors(lengths: list[int], documents: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return {
        "input_ids": torch.randint(0, 384, (tokens,), generator=generator, dtype=torch.int32),
        "loss_mask": torch.rand(tokens, generator=generator) < 0.5,
        "features": torch.randn(tokens, H, generator=generator).to(torch.bfloat16),
        "aux": torch.randn(tokens, H, generator=generator).to(torch.bfloat16),
        "documents": torch.tensor(documents),
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of five documents: 0, 2, 4 for training in two shards, 1, 3 for validation in one."""
    parts = [([0, 2], [3, 1], "train"), ([4], [7], "train"), ([1, 3], [2, 5], "validation")]
    shards = []
    for number, (documents, lengths, split) in enumerate(parts):
        tensors = shard_tensors(lengths, documents, seed=number)
        ids = [f"row-{document}-é" for document in documents]
        shards.append(write_shard(shard_path(tmp_path, number), tensors=tensors, lengths=lengths, ids=ids, split=split))
    write_manifest(tmp_path, identity=IDENTITY, shards=shards)
    return tmp_path


def test_documents_come_back_as_they_were_written(directory: Path) -> None:
    store = FeatureStore.open(directory)
    assert len(store) == 5
    assert store.lengths.tolist() == [3, 2, 1, 5, 7]
    assert (store.split("train"), store.split("validation")) == ([0, 2, 4], [1, 3])
    tensors = shard_tensors([2, 5], [1, 3], seed=2)
    document = store[3]
    assert document.id == "row-3-é"
    assert torch.equal(document.input_ids_T, tensors["input_ids"][2:].long())
    assert torch.equal(document.loss_mask_T, tensors["loss_mask"][2:])
    assert document.loss_mask_T.dtype == torch.bool
    assert torch.equal(document.features_TH, tensors["features"][2:])
    assert document.aux_TA is not None
    assert torch.equal(document.aux_TA, tensors["aux"][2:])


def test_shards_are_plain_safetensors_and_the_same_bytes_each_time(directory: Path, tmp_path: Path) -> None:
    tensors = shard_tensors([7], [4], seed=1)
    read = load_file(shard_path(directory, 1))
    assert set(read) == {*tensors, "offsets"}
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    again = write_shard(tmp_path / "again.safetensors", tensors=tensors, lengths=[7], ids=["row-4-é"], split="train")
    assert again["sha256"] == FeatureStore.open(directory).manifest["shards"][1]["sha256"]
    assert (tmp_path / "again.safetensors").read_bytes() == shard_path(directory, 1).read_bytes()


def test_documents_are_copies_that_outlive_the_file(directory: Path) -> None:
    store = FeatureStore.open(directory)
    store[0].features_TH.zero_()
    assert store[0].features_TH.abs().sum() > 0


def test_few_files_stay_open_and_pickling_drops_them(directory: Path) -> None:
    store = FeatureStore.open(directory)
    small = FeatureStore(directory, store.manifest, open_shards=1)
    assert [small[number].id for number in (0, 1, 4, 0)] == ["row-0-é", "row-1-é", "row-4-é", "row-0-é"]
    assert len(small._handles) == 1
    sent = pickle.loads(pickle.dumps(store))
    assert len(sent._handles) == 0
    assert torch.equal(sent[4].features_TH, store[4].features_TH)


def test_workers_read_what_the_main_process_reads(directory: Path) -> None:
    store = FeatureStore.open(directory)
    loader = torch.utils.data.DataLoader(store, batch_size=None, num_workers=2, shuffle=False)  # type: ignore[arg-type]
    for number, document in enumerate(loader):
        assert torch.equal(document.features_TH, store[number].features_TH)


def test_sequence_protocol_ends(directory: Path) -> None:
    store = FeatureStore.open(directory)
    with pytest.raises(IndexError):
        store[5]
    assert [document.id for document in store] == [f"row-{i}-é" for i in range(5)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("expect", "named"),
    [
        ({"target": {"weights_sha256": "cc"}}, "target.weights_sha256 is 'aa', expected 'cc'"),
        ({"tokenizer": {"chat_template_sha256": "dd"}}, "tokenizer.chat_template_sha256"),
        ({"layers": [1, 2]}, r"layers is \[1\], expected \[1, 2\]"),
        ({"data": "ee"}, "data is None, expected 'ee'"),
    ],
)
def test_a_store_of_something_else_is_refused_by_field(directory: Path, expect: dict[str, Any], named: str) -> None:
    with pytest.raises(EagleError, match=named) as caught:
        FeatureStore.open(directory, expect)
    assert "eagle features RECIPE" in str(caught.value)


def test_matching_expectations_open(directory: Path) -> None:
    assert len(FeatureStore.open(directory, {"target": {"model": "tiny"}, "layers": (1,)})) == 5


def test_missing_and_unfinished_stores_say_which(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="there is no feature store here"):
        FeatureStore.open(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(EagleError, match=r"did not end.*it resumes"):
        FeatureStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1,')
    with pytest.raises(EagleError, match="not valid JSON"):
        FeatureStore.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(EagleError, match="format 99"):
        FeatureStore.open(tmp_path)


def test_a_shard_of_another_size_is_refused_on_open(directory: Path) -> None:
    path = shard_path(directory, 1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(EagleError, match=r"shard-00001\.safetensors.*bytes, the manifest says"):
        FeatureStore.open(directory)
    assert finished_shard(path) is None
    path.unlink()
    with pytest.raises(EagleError, match=r"shard-00001\.safetensors.*No such file"):
        FeatureStore.open(directory)


def test_a_torn_header_gives_a_clear_error(directory: Path) -> None:
    path = shard_path(directory, 0)
    data = bytearray(path.read_bytes())
    data[:8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    with pytest.raises(EagleError, match=r"shard-00000\.safetensors .*is damaged"):
        FeatureStore.open(directory)


def test_flipped_bytes_are_found_by_verify(directory: Path) -> None:
    store = FeatureStore.open(directory)
    store.verify()
    path = shard_path(directory, 2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(EagleError, match=r"shard-00002\.safetensors.*SHA-256"):
        FeatureStore.open(directory).verify()


def test_token_layers_come_from_the_folder(directory: Path) -> None:
    from eagle.target.target import Target

    target = Target(tiny_model())
    target.tokens.save(directory)
    features_TH = torch.randn(3, H)
    assert torch.equal(FeatureStore.open(directory).token_layers().logits(features_TH), target.logits(features_TH))


def test_a_head_gets_the_layers_it_reads_in_its_own_order(tmp_path: Path) -> None:
    tensors = shard_tensors([4], [0])
    blocks = {layer: torch.full((4, H), float(layer)).to(torch.bfloat16) for layer in (2, 5, 9)}
    tensors["aux"] = torch.cat(list(blocks.values()), dim=-1)
    shard = write_shard(shard_path(tmp_path, 0), tensors=tensors, lengths=[4], ids=["a"], split="train")
    write_manifest(tmp_path, identity={**IDENTITY, "layers": [2, 5, 9]}, shards=[shard])
    store = FeatureStore.open(tmp_path)
    assert torch.equal(store.for_layers((9, 2))[0].states, torch.cat([blocks[9], blocks[2]], dim=-1))
    assert torch.equal(store.for_layers((2, 5, 9))[0].states, tensors["aux"])
    plain = store.for_layers(())[0]
    assert plain.aux_TA is None
    assert torch.equal(plain.states, tensors["features"])
    assert store.aux_layers == (2, 5, 9), "a view changes nothing for others"


def test_a_store_without_the_heads_layers_is_refused_with_the_remedy(directory: Path) -> None:
    store = FeatureStore.open(directory)
    message = (
        r"has features of 1 aux layer \(1\), the head wants 3 aux layers \(2, 16, 29\); .*`eagle features RECIPE` "
        r"--features.aux_layers \[2, 16, 29\]"
    )
    with pytest.raises(EagleError, match=message):
        store.for_layers((2, 16, 29))
