"""StaticCache: a TreeCache whose buffers lie where captured graphs have found them.

B rows, k key/value heads, d head dim, K accepted nodes. A graph replays on the addresses it was recorded with, so the
graphs belong to the buffers (`Buffers`), and these outlive a cache: a pool takes them back and lends them to the next one.
Capacities are buckets (powers of two), so that texts of similar length find the same buffers. Rows that end leave the
first of the rows' places to the others: a smaller batch is a view of the same memory.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from eagle.kernels.dispatch import wanted
from eagle.target.cache import TreeCache, _TreeLayer
from eagle.target.cuda_graph import Recorder

SMALLEST = 256
"""Slots of the smallest bucket."""
STRIDE = 8
"""Nodes are padded to multiples of this (single ones are not): few graphs, and shapes that tensor cores like."""


def bucket(slots: int) -> int:
    """The capacity that `slots` are given: the next power of two."""
    return max(SMALLEST, 1 << (slots - 1).bit_length())


def fixed_count(count: int) -> int:
    """What a number of nodes is padded to."""
    return count if count == 1 else -(-count // STRIDE) * STRIDE


class Buffers:
    """Keys and values of `layers` layers, [rows, k, capacity, d] each, and what was recorded on them."""

    def __init__(self, *, layers: int, rows: int, capacity: int):
        self.rows, self.capacity = rows, capacity
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.graphs: dict[Hashable, Any] = {}

    def of_layer(self, index: int, *, like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's buffers, made like the given keys and values [B, k, N, d] if there are none yet."""
        keys, values = self.keys[index], self.values[index]
        if keys is None or values is None:
            keys, values = (one.new_zeros(self.rows, one.shape[1], self.capacity, one.shape[3]) for one in like)
            self.keys[index], self.values[index] = keys, values
        return keys, values

    def clear(self) -> None:
        """Zeros: a masked slot's value is multiplied by 0, and should an old text have held a NaN, 0 * NaN would be NaN."""
        for buffer in (*self.keys, *self.values):
            if buffer is not None:
                buffer.zero_()


class BufferPool:
    """Lends buffers and keeps those that came back: one per capacity, the one with the most rows."""

    def __init__(self, *, layers: int, recorder: Recorder):
        self.layers, self.recorder = layers, recorder
        self._free: dict[int, Buffers] = {}

    def take(self, *, rows: int, capacity: int) -> Buffers:
        """Buffers that have too few rows are dropped: larger ones of their capacity take their place, and their memory."""
        free = self._free.pop(capacity, None)
        if free is None or free.rows < rows:
            return Buffers(layers=self.layers, rows=rows, capacity=capacity)
        free.clear()
        return free

    def give_back(self, buffers: Buffers) -> None:
        other = self._free.get(buffers.capacity)
        if other is None or other.rows <= buffers.rows:
            self._free[buffers.capacity] = buffers


class _PooledLayer(_TreeLayer):
    """A layer whose keys and values are the first rows of a pool's buffers."""

    def __init__(self, index: int, buffers: Buffers, rows: int):
        super().__init__(rows, buffers.capacity)
        self.index, self.buffers = index, buffers
        self._bind()

    def _bind(self) -> None:
        keys, values = self.buffers.keys[self.index], self.buffers.values[self.index]
        if keys is not None and values is not None:
            self.keys, self.values = keys[: self.rows], values[: self.rows]
            self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.buffers.of_layer(self.index, like=(key_states, value_states))
        self._bind()

    def move_to(self, buffers: Buffers, *, used: int) -> None:
        """Other buffers; the first `used` slots come along."""
        before = self.tensors if self.is_initialized else None
        self.buffers, self.capacity = buffers, buffers.capacity
        if before is not None:
            buffers.of_layer(self.index, like=before)
            self._bind()
            for new, old in zip(self.tensors, before):
                new[:, :, :used] = old[:, :, :used]

    def take_rows(self, index: torch.Tensor, *, used: int) -> None:
        self.rows = len(index)
        if self.is_initialized:
            kept = [old[:, :, :used].index_select(0, index.to(old.device)) for old in self.tensors]
            self._bind()
            for new, old in zip(self.tensors, kept):
                new[:, :, :used] = old


class StaticCache(TreeCache):
    """As TreeCache; every operation keeps the tensors where they are, but for growing beyond the bucket.

    `commit` moves on the device, by a graph. lengths_B stays on the CPU: a step's graph gets them as an input.
    """

    @torch.inference_mode()
    def __init__(self, pool: BufferPool, *, rows: int, capacity: int):
        super().__init__(layers=pool.layers, rows=rows, capacity=bucket(capacity))
        self._pool = pool
        self._borrow(pool.take(rows=rows, capacity=self.capacity))
        self.layers = [_PooledLayer(index, self.buffers, rows) for index in range(pool.layers)]

    def _borrow(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self._return = weakref.finalize(self, self._pool.give_back, buffers)
        self._return.atexit = False

    def _move_to(self, buffers: Buffers) -> None:
        for layer in self.layers:  # all slots: behind the committed ones may lie a draft's first levels
            layer.move_to(buffers, used=self.capacity)
        self._return()
        self._borrow(buffers)
        self.capacity = buffers.capacity

    @torch.inference_mode()
    def reserve(self, tokens: int) -> None:
        needed = self.longest + tokens
        if needed > self.capacity:
            self._move_to(self._pool.take(rows=self.rows, capacity=bucket(needed)))

    @torch.inference_mode()
    def reorder(self, rows: Sequence[int]) -> None:
        if len(rows) > self.buffers.rows:
            self._move_to(self._pool.take(rows=len(rows), capacity=self.capacity))
        super().reorder(rows)

    def _move(self, *, source_BK: torch.Tensor, target_BK: torch.Tensor) -> None:
        rows, count = source_BK.shape
        key = ("move", rows, fixed_count(count), wanted())
        if key not in self.buffers.graphs:
            self.buffers.graphs[key] = _FixedMove(self._pool.recorder, rows=rows, count=fixed_count(count))
        self.buffers.graphs[key](self, source_BK=source_BK, target_BK=target_BK)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """What a model may ask for while it is recorded: a constant (positions are passed explicitly)."""
        return 1


class _FixedMove:
    """The commit of up to `count` nodes a row, in all layers."""

    def __init__(self, recorder: Recorder, *, rows: int, count: int):
        self._count = count
        # All zeros at first: slot 0 moves to itself, which is what warming up does.
        self._inputs = recorder.inputs(source_BK=(rows, count), target_BK=(rows, count))
        self._captured = recorder.captured(self._work)

    def _work(self, cache: TreeCache) -> tuple[torch.Tensor, ...]:
        TreeCache._move(cache, **self._inputs.device)
        return ()

    def __call__(self, cache: TreeCache, *, source_BK: torch.Tensor, target_BK: torch.Tensor) -> None:
        self._captured.record(cache)
        self._inputs.wait()
        host, count = self._inputs.host, source_BK.shape[1]
        host["source_BK"][:, :count], host["target_BK"][:, :count] = source_BK, target_BK
        # Nodes that are not there move to themselves, each in a slot of its own behind the others.
        behind_BK = target_BK[:, -1:] + torch.arange(1, self._count - count + 1)
        host["source_BK"][:, count:], host["target_BK"][:, count:] = behind_BK, behind_BK
        self._inputs.send()
        self._captured(cache)
