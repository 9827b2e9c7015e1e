"""A tiny feature store and recipes over it: documents of random tokens with a tiny target's real features."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from eagle.config import DataConfig, HeadConfig, Recipe, TargetConfig, TrainConfig
from eagle.data.store import shard_path, write_manifest, write_shard
from eagle.target.token_layers import TokenLayers
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

SMALL: dict[str, Any] = {
    "epochs": 4,
    "batch_size": 2,
    "lr": 3e-3,
    "warmup_steps": 2,
    "precision": "fp32",
    "eval_every": 4,
    "save_every": 3,
    "log_every": 1,
    "chain_depth": 3,
    "noise": 0.05,
}


def tiny_recipe(directory: Path, *, init_from: str | None = None, **train: Any) -> Recipe:
    """A recipe over `directory`/run whose target is `directory`/target (of which training reads the config alone)."""
    return Recipe(
        output_dir=str(directory / "run"),
        target=TargetConfig(model=str(directory / "target"), device="cpu"),
        data=DataConfig(),
        head=HeadConfig(init_from=init_from, fc_init="random"),
        train=TrainConfig(**{**SMALL, **train}),
    )


def with_train(recipe: Recipe, **changes: Any) -> Recipe:
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, **changes))


@cache
def _target() -> Any:
    return tiny_model("llama")


def write_tiny_store(
    directory: Path,
    *,
    documents: int = 10,
    validation: int = 2,
    tokens: Callable[[int], int] = lambda number: 9 + 5 * number % 11,
    supervised: bool = True,
    spoil: Callable[[int, torch.Tensor], None] = lambda number, features_TH: None,
) -> None:
    """Writes `directory`/target and the store of `tiny_recipe(directory)`; the last documents are for validation.

    spoil: may change a document's features in place.
    """
    model, store = _target(), directory / "run" / "features"
    store.mkdir(parents=True)
    model.config.save_pretrained(directory / "target")
    tiny_tokenizer().save_pretrained(directory / "target")
    TokenLayers.of_model(model, model.config).save(store)
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(documents):
        ids_T = torch.randint(3, VOCAB, (tokens(number),), generator=generator)
        with torch.no_grad():
            features_TH = model.model(ids_T[None]).last_hidden_state[0]
        spoil(number, features_TH)
        mask_T = torch.arange(len(ids_T)) >= 4
        made.append((ids_T, mask_T & (torch.arange(len(ids_T)) % 6 != 5) & supervised, features_TH))
    shards = []
    cut = documents - validation
    for split, first, last in (("train", 0, cut // 2), ("train", cut // 2, cut), ("validation", cut, documents)):
        if first == last:
            continue
        part = made[first:last]
        tensors = {
            "input_ids": torch.cat([ids for ids, _, _ in part]).to(torch.int32),
            "loss_mask": torch.cat([mask for _, mask, _ in part]),
            "features": torch.cat([features for _, _, features in part]),
            "documents": torch.arange(first, last),
        }
        lengths = [len(ids) for ids, _, _ in part]
        ids = [f"doc-{number}" for number in range(first, last)]
        path = shard_path(store, len(shards))
        shards.append(write_shard(path, tensors=tensors, lengths=lengths, ids=ids, split=split))
    identity = {"format": 1, "target": {"model": "tiny", "hidden_size": 32}, "layers": [], "hidden_size": 32}
    write_manifest(store, identity=identity, shards=shards)
