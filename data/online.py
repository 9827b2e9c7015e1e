"""The target in memory as a source of documents: features are computed when they are read, and kept nowhere.

B documents of a forward, T tokens of the longest, H hidden.
"""

import copy
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from eagle.config import Recipe
from eagle.data.devices import own_device
from eagle.data.documents import Document, Documents, require_in_vocabulary
from eagle.data.features import require_fitting, require_layers
from eagle.data.identity import without_name
from eagle.data.joined import JoinedStores
from eagle.data.match import require_match
from eagle.data.prepare import load_prepared
from eagle.data.shards import plan_batches
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.files import sha256_text
from eagle.launch import whole_models
from eagle.progress import console
from eagle.target.target import Target
from eagle.target.token_layers import TokenLayers


def open_documents(recipe: Recipe, accelerator: Accelerator) -> Documents:
    """What training reads, as train.features says: the recipe's stores, or its target over the prepared data.

    Every process of a launch calls this; each loads its own target, whole, on its own device.
    Raises EagleError when there is no finished store, or it is of another target or other data than the recipe; online: no
    prepared data, or data that does not fit the target.
    """
    if recipe.train.features == "store":
        store = FeatureStore.open(recipe.store_dir)
        with whole_models(accelerator):
            require_match(store, recipe)
        more = [FeatureStore.open(folder) for folder in recipe.features.more_stores]
        if not more:
            return store
        joined = JoinedStores([store, *more])
        if joined.repeated and accelerator.is_main_process:
            console.print(
                f"features: {joined.repeated:,} documents of features.more_stores are in an earlier store too and read once",
                markup=False,
            )
        if joined.crossing and accelerator.is_main_process:
            console.print(
                f"features: {joined.crossing:,} documents of features.more_stores are left out: an earlier store has their "
                "prompts on the other side of the split",
                markup=False,
            )
        return joined
    if recipe.features.more_stores:
        raise EagleError(
            "features.more_stores is set, but train.features is online, which reads no store; name the conversations in "
            "data.sources, or set train.features to store"
        )
    with whole_models(accelerator):
        target = Target.from_config(own_device(recipe.target, accelerator), recipe.data.chat_template)
    return TargetDocuments(recipe, target)


class TargetDocuments:
    """The recipe's prepared data with features that `target` computes, in the order and numbering of its store."""

    def __init__(self, recipe: Recipe, target: Target):
        """Raises EagleError when the prepared data is missing, or of another tokenizer or longer than the target takes."""
        self.target = target
        self.aux_layers: tuple[int, ...] = ()
        data, self.manifest = load_prepared(recipe.data_dir)
        self.lengths = np.asarray(data.with_format("numpy")["length"][:], dtype=np.int64)
        require_fitting(recipe, target, self.manifest, self.lengths)
        self._splits = np.asarray(data["split"][:])
        self._rows = data.select_columns(["id", "input_ids", "loss_mask"]).with_format("numpy")
        self._directory, self._batch_tokens = recipe.data_dir, recipe.features.batch_tokens

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def name(self) -> str:
        return f"the prepared data {self._directory}"

    @property
    def remedy(self) -> str:
        return "run the target in a dtype with more range (target.dtype bfloat16 or float32), or look at that document"

    @functools.cached_property
    def target_identity(self) -> dict[str, Any]:
        return self.target.identity()

    def for_layers(self, aux_layers: Sequence[int]) -> "TargetDocuments":
        """The same documents with these layers' states. Raises EagleError when the target has not got them."""
        require_layers(aux_layers, self.target, where="the head's aux_layers")
        view = copy.copy(self)
        view.aux_layers = tuple(aux_layers)
        return view

    def fingerprint(self) -> str:
        """Of the target's identity and dtype and of what the prepared data was made from."""
        target = without_name(self.target_identity)
        parts = [target, str(self.target.dtype), self.manifest["fingerprint"]]
        return sha256_text(json.dumps(parts, sort_keys=True))

    def split(self, name: str) -> list[int]:
        numbers: list[int] = np.flatnonzero(self._splits == name).tolist()
        return numbers

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Document:
        return self.read([number])[0]

    def ids_and_mask(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._rows[number]
        ids_T = torch.from_numpy(np.asarray(row["input_ids"], dtype=np.int64))
        return ids_T, torch.from_numpy(np.asarray(row["loss_mask"], dtype=np.bool_))

    def read(self, numbers: Sequence[int]) -> list[Document]:
        """The documents in the order of `numbers`, computed by forwards of at most features.batch_tokens padded tokens.

        Features are in the target's dtype and on its device.
        """
        documents: dict[int, Document] = {}
        for batch_B in plan_batches(self.lengths[list(numbers)], self._batch_tokens):
            chosen = [numbers[place] for place in batch_B]
            texts = [self.ids_and_mask(number) for number in chosen]
            for number, (ids_T, _) in zip(chosen, texts):
                require_in_vocabulary(ids_T, self.target.vocab_size, document=str(self._rows[number]["id"]))
            ids_BT = torch.zeros(len(chosen), max(len(ids_T) for ids_T, _ in texts), dtype=torch.int64)
            for b, (ids_T, _) in enumerate(texts):
                ids_BT[b, : len(ids_T)] = ids_T
            features_BTH, aux_BTA = self.target.features(ids_BT, self.aux_layers)
            for b, (number, (ids_T, mask_T)) in enumerate(zip(chosen, texts, strict=True)):
                # Copies: ordinary tensors (the target ran in inference mode) that do not hold on to the batch.
                documents[number] = Document(
                    id=str(self._rows[number]["id"]),
                    input_ids_T=ids_T,
                    loss_mask_T=mask_T,
                    features_TH=features_BTH[b, : len(ids_T)].clone(),
                    aux_TA=None if aux_BTA is None else aux_BTA[b, : len(ids_T)].clone(),
                )
        return [documents[number] for number in numbers]

    def token_layers(self) -> TokenLayers:
        """The target's weights, not copied, in a module of their own: who converts it leaves the target as it is."""
        return TokenLayers.of_model(self.target.model, self.target.config)
