"""TreeCache: preallocated keys and values of ragged rows, with room for a draft tree behind each row's prefix.

Row b holds L_b committed tokens in slots 0 .. L_b-1; a tree's nodes are written at slots L_b, L_b+1, ... and stay
uncommitted until `commit` moves the accepted ones down. It is a Hugging Face `Cache`, so any model can write to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _TreeLayer(CacheLayerMixin):
    """One layer's buffers [B, k, capacity, d]; allocated at the first write, when heads, dtype and device are known."""

    is_sliding = False

    def __init__(self, rows: int, capacity: int):
        super().__init__()
        self.rows, self.capacity = rows, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def buffer(states: torch.Tensor) -> torch.Tensor:
            # Zeros, not garbage: a masked slot's value is multiplied by 0, and 0 * NaN would be NaN.
            return states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])

        self.keys, self.values = buffer(key_states), buffer(value_states)
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            extra = capacity - self.capacity
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))
        self.capacity = capacity

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def take_rows(self, index: torch.Tensor, *, used: int) -> None:
        """The first `used` slots of the rows in `index`; in place where the number of rows stays."""
        if self.is_initialized:
            in_place = len(index) == self.rows
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old if in_place else old.new_zeros(len(index), *old.shape[1:])
                new[:, :, :used] = old[:, :, :used].index_select(0, index.to(old.device))
                setattr(self, name, new)
        self.rows = len(index)

    # What Hugging Face's abstract base asks for; our own code never calls these.
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("TreeCache.update writes for its layers")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.capacity

    def get_max_cache_shape(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """Keys and values of `rows` sequences for `layers` layers.

    lengths_B: int64 [B] on the CPU, the committed tokens of each row.
    capacity: slots per row; `reserve` grows it by doubling. Nothing is reallocated otherwise.
    """

    def __init__(self, *, layers: int, rows: int, capacity: int):
        super().__init__(layers=[_TreeLayer(rows, capacity) for _ in range(layers)])
        self.rows, self.capacity = rows, capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.int64)
        self._offset = 0

    @property
    def longest(self) -> int:
        """Committed tokens of the longest row."""
        return int(self.lengths_B.max())

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` more in every row."""
        needed = self.longest + tokens
        if needed > self.capacity:
            self.capacity = max(needed, 2 * self.capacity)
            for layer in self.layers:
                layer.grow(self.capacity)

    @contextmanager
    def writing(self, *, offset: int) -> Iterator[None]:
        """Within the block, writes go to slots L_b + offset ... (offset: tree columns already written)."""
        self._offset = offset
        try:
            yield
        finally:
            self._offset = 0

    def update(  # Hugging Face's name: the model calls it once per layer
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes N uncommitted tokens [B, k, N, d]; returns the views [B, k, S, d] up to the last slot in use."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        end = self.longest + self._offset + count
        assert end <= self.capacity, f"{end} slots needed, {self.capacity} reserved: call reserve() first"
        if bool((self.lengths_B == self.lengths_B[0]).all()):
            layer.keys[:, :, end - count : end] = key_states
            layer.values[:, :, end - count : end] = value_states
        else:
            device = layer.keys.device
            row_B1 = torch.arange(self.rows, device=device)[:, None]
            slot_BN = (self.lengths_B[:, None] + self._offset + torch.arange(count)).to(device)
            layer.keys[row_B1, :, slot_BN] = key_states.transpose(1, 2)
            layer.values[row_B1, :, slot_BN] = value_states.transpose(1, 2)
        return layer.keys[:, :, :end], layer.values[:, :, :end]

    @torch.inference_mode()
    def commit(self, path_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        """Keeps the tree nodes path_BK[b, :counts_B[b]] of each row: they become its next committed tokens.

        path_BK: int64 [B, K] node indices, ascending in their valid part (parents come before children), so that no
        row is read after it was overwritten. counts_B: int64 [B]. Keys were rotated at their depth: moving is enough.
        """
        steps_K = torch.arange(path_BK.shape[1])
        valid_BK = steps_K < counts_B[:, None]
        if not bool((path_BK[valid_BK] == steps_K.expand_as(path_BK)[valid_BK]).all()):
            target_BK = self.lengths_B[:, None] + steps_K
            source_BK = torch.where(valid_BK, self.lengths_B[:, None] + path_BK, target_BK)
            for layer in self.layers:
                device = layer.keys.device
                row_B1 = torch.arange(self.rows, device=device)[:, None]
                source, target = source_BK.to(device), target_BK.to(device)
                layer.keys[row_B1, :, target] = layer.keys[row_B1, :, source]
                layer.values[row_B1, :, target] = layer.values[row_B1, :, source]
        self.lengths_B = self.lengths_B + counts_B

    @property
    def row_bytes(self) -> int:
        """Memory reserved for one row's keys and values over all layers."""
        return sum(t.nbytes // self.rows for layer in self.layers if layer.is_initialized for t in layer.tensors)

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Drops the rows that are not in `kept` (ascending)."""
        self.reorder(kept)

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] holds as committed; rows may come several times or not at all."""
        if list(rows) == list(range(self.rows)):
            return
        index, used = torch.tensor(list(rows)), self.longest
        for layer in self.layers:
            layer.take_rows(index, used=used)
        self.lengths_B, self.rows = self.lengths_B[index], len(index)

    @torch.inference_mode()
    def copy_row(self, row: int, source: "TreeCache", source_row: int) -> None:
        """Puts another cache's row here: its committed keys, values and length."""
        length = int(source.lengths_B[source_row])
        assert length <= self.capacity, f"{length} slots needed, {self.capacity} reserved: call reserve() first"
        for mine, other in zip(self.layers, source.layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(other.keys, other.values)
            mine.keys[row, :, :length] = other.keys[source_row, :, :length]
            mine.values[row, :, :length] = other.values[source_row, :, :length]
        self.lengths_B[row] = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Hugging Face's notion of the past; positions are always passed explicitly, so only its being > 0 matters."""
        return self.longest
