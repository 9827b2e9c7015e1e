"""Several feature stores read as one: data that came later need not be extracted together with what was there.

The documents of the first store come first, then those of the second, and so on; each keeps its split. A document whose
tokens an earlier store holds is left out: it would count twice, and one that is held out there could be trained on here. So
is one whose prompt an earlier store has on the other side. All stores are of the same target; their dtypes may differ.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eagle.data.documents import Document, prompt_digest
from eagle.data.identity import without_name
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.files import sha256_text
from eagle.target.token_layers import TokenLayers


class JoinedStores:
    """Feature stores of one target, one after the other (eagle/data/documents.py says what a source of documents is)."""

    def __init__(self, stores: Sequence[FeatureStore], *, kept: Sequence[np.ndarray] | None = None):
        """kept: per store the numbers of the documents that count (int64, ascending), where they are known already.

        Raises EagleError when two are the same folder, or of different targets."""
        first = stores[0]
        folders = [store.directory.resolve() for store in stores]
        for number, store in enumerate(stores):
            if folders[number] in folders[:number]:
                raise EagleError(f"{store.name} is named twice; take it out of features.more_stores")
            same_target = without_name(store.target_identity) == without_name(first.target_identity)
            if not same_target or store.hidden_size != first.hidden_size:
                raise EagleError(
                    f"{store.name} is of the target {_target(store)}, {first.name} of {_target(first)}; features of different "
                    "targets cannot be learnt together: take it out of features.more_stores"
                )
            if store.manifest.get("tokenizer") != first.manifest.get("tokenizer"):
                raise EagleError(
                    f"{store.name} was made with another tokenizer or chat template than {first.name}; prepare and extract "
                    "its conversations anew, or take it out of features.more_stores"
                )
        self.aux_layers = first.aux_layers
        self.stores = tuple(stores)
        self.crossing = 0
        """Documents left out because an earlier store has their prompt on the other side."""
        self._kept = self._choose() if kept is None else kept
        self.lengths = np.concatenate([store.lengths[chosen] for store, chosen in zip(stores, self._kept, strict=True)])
        self._first_of = np.cumsum([0, *map(len, self._kept)])

    @property
    def hidden_size(self) -> int:
        return self.stores[0].hidden_size

    @property
    def name(self) -> str:
        return f"the feature stores {', '.join(str(store.directory) for store in self.stores)}"

    @property
    def remedy(self) -> str:
        return self.stores[0].remedy

    @property
    def target_identity(self) -> dict[str, Any] | None:
        return self.stores[0].target_identity

    def for_layers(self, aux_layers: Sequence[int]) -> "JoinedStores":
        """The same documents as a head with these aux layers reads them. Raises EagleError when a store lacks one."""
        return JoinedStores([store.for_layers(aux_layers) for store in self.stores], kept=self._kept)

    def fingerprint(self) -> str:
        """Of all stores, in their order."""
        return sha256_text(json.dumps([*(store.fingerprint() for store in self.stores), len(self)]))

    @property
    def repeated(self) -> int:
        """Documents that an earlier store holds too."""
        return sum(map(len, self.stores)) - len(self) - self.crossing

    def split(self, name: str) -> list[int]:
        """The numbers of the documents in split "train" or "validation", ascending."""
        found: list[int] = []
        for first, store, kept in zip(self._first_of, self.stores, self._kept, strict=False):
            found += (first + np.flatnonzero(np.isin(kept, store.split(name)))).tolist()
        return found

    def __len__(self) -> int:
        return int(self._first_of[-1])

    def __getitem__(self, number: int) -> Document:
        store, inside = self._place(number)
        return store[inside]

    def read(self, numbers: Sequence[int]) -> list[Document]:
        """Several documents, one read after the other."""
        return [self[number] for number in numbers]

    def ids_and_mask(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 [T] and loss_mask bool [T] of a document, without reading its features."""
        store, inside = self._place(number)
        return store.ids_and_mask(inside)

    def token_layers(self) -> TokenLayers:
        """The target's frozen embedding and LM head."""
        return self.stores[0].token_layers()

    def _choose(self) -> list[np.ndarray]:
        """Of every store, the documents that count."""
        seen: set[bytes] = set()
        sides: dict[str, set[bytes]] = {"train": set(), "validation": set()}
        found = []
        for store in self.stores:
            held_out = set(store.split("validation"))
            kept, prompts = [], []
            digests: set[bytes] = set()
            for number in range(len(store)):
                ids_T, mask_T = store.ids_and_mask(number)
                digest, prompt = hashlib.sha256(ids_T.numpy().tobytes()).digest(), prompt_digest(ids_T, mask_T)
                own, other = ("validation", "train") if number in held_out else ("train", "validation")
                digests.add(digest)
                if digest in seen:
                    continue
                if prompt in sides[other]:
                    self.crossing += 1
                    continue
                kept.append(number)
                prompts.append((own, prompt))
            for own, prompt in prompts:
                sides[own].add(prompt)
            seen |= digests
            found.append(np.array(kept, dtype=np.int64))
        return found

    def _place(self, number: int) -> tuple[FeatureStore, int]:
        """The store that holds a document, and its number there."""
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        place = int(np.searchsorted(self._first_of, number, side="right")) - 1
        return self.stores[place], int(self._kept[place][number - int(self._first_of[place])])


def _target(store: FeatureStore) -> str:
    identity = store.target_identity or {}
    digest = str(identity.get("weights_sha256", ""))[:12]
    return f"{identity.get('model')}" + (f" (weights {digest}...)" if digest else "")
