"""TreeCache: preallocated keys and values of ragged rows, with room for a draft tree behind each row's prefix.

Row b holds L_b committed tokens in slots 0 .. L_b-1; a tree's nodes are written at slots L_b, L_b+1, ... and stay
uncommitted until `commit` moves the accepted ones down. It is a Hugging Face `Cache`, so any model can write to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle.kernels.commit.op import move_slots
from eagle.kernels.placement import sent


class _TreeLayer(CacheLayerMixin):
    """One layer's buffers [B, k, capacity, d]; allocated at the first write, when heads, dtype and device are known."""

    is_sliding = False

    def __init__(self, rows: int, capacity: int):
        super().__init__()
        self.rows, self.capacity = rows, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like_BkNd: torch.Tensor) -> torch.Tensor:
        """Zeros, not garbage: a masked slot's value is multiplied by 0, and 0 * NaN would be NaN."""
        _, heads, _, head_dim = like_BkNd.shape
        return like_BkNd.new_zeros(self.rows, heads, self.capacity, head_dim)

    def grow(self, capacity: int) -> None:
        used, self.capacity = self.capacity, capacity
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                setattr(self, name, self._buffer(old))
                getattr(self, name)[:, :, :used] = old

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def take_rows(self, index: torch.Tensor, *, used: int) -> None:
        """The first `used` slots of the rows in `index`; in place where the number of rows stays."""
        in_place, self.rows = len(index) == self.rows, len(index)
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old if in_place else self._buffer(old)
                new[:, :, :used] = old[:, :, :used].index_select(0, index.to(old.device))
                setattr(self, name, new)

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


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a forward writes its N nodes. Found once per forward, used by every layer."""

    end: int
    """Slots that the nodes may see: those behind the last one in use are cut off."""
    first: int = 0
    """The first node's slot, where slot_BN is None: the others follow it, in every row."""
    slot_BN: torch.Tensor | None = None
    """int64, on the layers' device: each node's slot."""

    def write(self, buffer_BkSd: torch.Tensor, states_BkNd: torch.Tensor) -> torch.Tensor:
        """Writes one layer's keys or values; returns the view [B, k, end, d]."""
        if self.slot_BN is None:
            buffer_BkSd[:, :, self.first : self.first + states_BkNd.shape[2]] = states_BkNd
        else:
            row_B1 = torch.arange(len(buffer_BkSd), device=buffer_BkSd.device)[:, None]
            buffer_BkSd[row_B1, :, self.slot_BN.to(buffer_BkSd.device)] = states_BkNd.transpose(1, 2)
        return buffer_BkSd[:, :, : self.end]


class TreeCache(Cache):
    """Keys and values of `rows` sequences for `layers` layers.

    lengths_B: int64 [B] on the CPU, the committed tokens of each row.
    capacity: slots per row; `reserve` grows it by doubling. Nothing is reallocated otherwise.
    """

    def __init__(self, *, layers: int, rows: int, capacity: int):
        super().__init__(layers=[_TreeLayer(rows, capacity) for _ in range(layers)])
        self.rows, self.capacity = rows, capacity
        self.lengths_B = torch.zeros(rows, dtype=torch.int64)
        self._place: Place | None = None

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
    def writing(self, place: Place) -> Iterator[None]:
        """Within the block, writes go to this place."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def behind(self, *, count: int, offset: int = 0, slots: int = 0) -> Place:
        """The place of `count` nodes at slots L_b + offset ... (offset: tree columns already written). slots: that they see
        at least, in use or not."""
        end = max(self.longest + offset + count, slots)
        assert end <= self.capacity, f"{end} slots needed, {self.capacity} reserved: call reserve() first"
        if bool((self.lengths_B == self.lengths_B[0]).all()):
            return Place(end=end, first=self.longest + offset)
        slot_BN = self.lengths_B[:, None] + offset + torch.arange(count)
        initialised = [layer.keys.device for layer in self.layers if layer.is_initialized]
        return Place(end=end, slot_BN=sent(slot_BN, initialised[0]) if initialised else slot_BN)

    def update(  # Hugging Face's name: the model calls it once per layer
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes N uncommitted tokens [B, k, N, d]; returns the views [B, k, S, d] up to the last slot in use."""
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        place = self._place or self.behind(count=key_states.shape[2])
        return place.write(layer.keys, key_states), place.write(layer.values, value_states)

    @torch.inference_mode()
    def commit(self, path_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        """Keeps the tree nodes path_BK[b, :counts_B[b]] of each row: they become its next committed tokens.

        path_BK: int64 [B, K] node indices, ascending in their valid part (parents come before children), so that no
        row is read after it was overwritten. counts_B: int64 [B]. Keys were rotated at their depth: moving is enough.
        """
        steps_K = torch.arange(path_BK.shape[1])
        moves_BK = (steps_K < counts_B[:, None]) & (path_BK != steps_K)
        if bool(moves_BK.any()):
            target_BK = self.lengths_B[:, None] + steps_K
            self._move(
                source_BK=torch.where(moves_BK, self.lengths_B[:, None] + path_BK, target_BK), target_BK=target_BK
            )
        self.lengths_B = self.lengths_B + counts_B

    def _move(self, *, source_BK: torch.Tensor, target_BK: torch.Tensor) -> None:
        """Slots target_BK of every layer take what slots source_BK hold; both ascend, and no source lies before its target."""
        move_slots([t for layer in self.layers for t in layer.tensors], source_BK=source_BK, target_BK=target_BK)

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
