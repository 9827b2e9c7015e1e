"""The unit of extraction: what goes into a shard, in which batches, and the buffer it is computed into.

D documents of a shard, B rows of a batch, T tokens, H hidden, A aux width, S tokens of a shard.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eagle.config import Recipe
from eagle.data import float8
from eagle.data.documents import require_in_vocabulary
from eagle.data.layers import layers_to_store
from eagle.data.prepare import load_prepared
from eagle.data.store import DTYPES, write_shard
from eagle.errors import EagleError
from eagle.target.target import Target


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What goes into one shard."""

    number: int
    split: str
    documents_D: np.ndarray
    """int64 [D]: rows of the prepared data set, ascending"""
    lengths_D: np.ndarray
    """int64 [D]: their tokens"""

    @property
    def tokens(self) -> int:
        return int(self.lengths_D.sum())


def plan_shards(lengths: np.ndarray, splits: Sequence[str], shard_tokens: int) -> list[ShardPlan]:
    """Cuts each split's documents, in order, into shards of at most `shard_tokens` tokens (or one longer document)."""
    shards: list[ShardPlan] = []
    for split in ("train", "validation"):
        documents = np.flatnonzero(np.asarray(splits) == split)
        start, held = 0, 0
        for end, document in enumerate([*documents, None]):
            full = document is None or held + lengths[document] > shard_tokens
            if full and end > start:
                part = documents[start:end]
                shards.append(ShardPlan(number=len(shards), split=split, documents_D=part, lengths_D=lengths[part]))
                start, held = end, 0
            held += 0 if document is None else int(lengths[document])
    return shards


def plan_batches(lengths_D: np.ndarray, batch_tokens: int) -> Iterator[np.ndarray]:
    """Groups a shard's documents for the target: longest first, rows * longest <= batch_tokens (or one document)."""
    order = np.argsort(-lengths_D, kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, batch_tokens // int(lengths_D[order[start]]))
        yield order[start : start + rows]
        start += rows


class ShardBuffer:
    """One shard in host memory, allocated once and filled again and again: memory is flat whatever the data's size."""

    def __init__(self, recipe: Recipe, target: Target, capacity: int):
        self._data_dir, self._layers = recipe.data_dir, layers_to_store(recipe, target.num_layers)
        self._device, dtype = target.device, DTYPES[recipe.features.dtype]
        width = target.hidden_size

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, pin_memory=self._device.type == "cuda")

        self._input_ids = room(capacity, dtype=torch.int32)
        self._loss_mask = room(capacity, dtype=torch.bool)
        blocks = {"features": 1} | ({"aux": len(self._layers)} if self._layers else {})
        self._states = {name: room(capacity, count * width, dtype=dtype) for name, count in blocks.items()}
        scaled = blocks if recipe.features.dtype == "float8" else {}
        self._scales = {name: room(capacity, count, dtype=torch.float32) for name, count in scaled.items()}
        self._ids: list[str] = []
        self._copied: torch.cuda.Event | None = None

    def fill(self, target: Target, shard: ShardPlan, *, batch_tokens: int) -> Iterator[int]:
        """Computes the shard's features, batch by batch; yields the tokens of each.

        On a GPU the copies to host memory are queued behind the forwards, and only `write` waits for them.
        """
        data, _ = load_prepared(self._data_dir)  # mapped anew for each shard, so that pages read do not pile up
        rows = data.select(shard.documents_D)
        self._ids = list(rows["id"])
        offsets = np.concatenate([[0], np.cumsum(shard.lengths_D)])
        rows = rows.select_columns(["input_ids", "loss_mask"]).with_format("numpy")
        for number, (start, end) in enumerate(itertools.pairwise(offsets)):
            row = rows[number]
            self._input_ids[start:end] = torch.as_tensor(np.asarray(row["input_ids"], dtype=np.int32))
            require_in_vocabulary(self._input_ids[start:end], target.vocab_size, document=self._ids[number])
            self._loss_mask[start:end] = torch.as_tensor(np.asarray(row["loss_mask"], dtype=np.bool_))
        for batch_B in plan_batches(shard.lengths_D, batch_tokens):
            longest = int(shard.lengths_D[batch_B].max())
            ids_BT = torch.zeros(len(batch_B), longest, dtype=torch.int64)
            for row_number, document in enumerate(batch_B):
                start, end = offsets[document], offsets[document + 1]
                ids_BT[row_number, : end - start] = self._input_ids[start:end]
            features_BTH, aux_BTA = target.features(ids_BT.to(self._device), self._layers)
            for row_number, document in enumerate(batch_B):
                start, end = offsets[document], offsets[document + 1]
                self._keep("features", features_BTH[row_number, : end - start], start)
                if aux_BTA is not None:
                    self._keep("aux", aux_BTA[row_number, : end - start], start)
            yield int(shard.lengths_D[batch_B].sum())
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def _keep(self, name: str, states_TA: torch.Tensor, start: int) -> None:
        """Converts on the target's device, then copies into the buffer at token `start`."""
        span, buffer = slice(start, start + len(states_TA)), self._states[name]
        if name in self._scales:
            states_TA, scale_TN = float8.quantise(states_TA, blocks=self._scales[name].shape[1])
            self._scales[name][span].copy_(scale_TN, non_blocking=True)
        buffer[span].copy_(states_TA.to(buffer.dtype), non_blocking=True)

    def write(self, path: Path, shard: ShardPlan) -> None:
        """Writes the filled shard (in the background thread). Raises EagleError for features that are not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens = shard.tokens
        self._require_finite(shard)
        tensors = {
            "input_ids": self._input_ids[:tokens],
            "loss_mask": self._loss_mask[:tokens],
            "documents": torch.as_tensor(shard.documents_D),
            **{name: states[:tokens] for name, states in self._states.items()},
            **{f"{name}_scale": scales[:tokens] for name, scales in self._scales.items()},
        }
        write_shard(path, tensors=tensors, lengths=shard.lengths_D.tolist(), ids=self._ids, split=shard.split)

    def _require_finite(self, shard: ShardPlan) -> None:
        """Of a float8 store the scales are judged: a value that is not finite makes its token's scale so, too."""
        layers = {"features": ["features"], "aux": [f"states after layer {layer}" for layer in self._layers]}
        for name, states in (self._scales or self._states).items():
            for start in range(0, shard.tokens, 1024):
                blocks_TLH = states[start : min(start + 1024, shard.tokens)].unflatten(-1, (len(layers[name]), -1))
                wrong_TL = (~blocks_TLH.isfinite().all(dim=-1)).nonzero()
                if len(wrong_TL):
                    token, layer = wrong_TL[0].tolist()
                    place = int(np.searchsorted(np.cumsum(shard.lengths_D), start + token, side="right"))
                    raise EagleError(
                        f"the target's {layers[name][layer]} of document {self._ids[place]!r} are not finite; run the target in "
                        "a dtype with more range (target.dtype bfloat16 or float32), or look at that document"
                    )
