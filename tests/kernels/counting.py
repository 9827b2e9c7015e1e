"""Counts what a kernel loads, stores and multiplies while Triton's interpreter runs it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder


@dataclass
class Counts:
    """Bytes by the name of the tensor they lie in ("other": in none of those named), FLOP of matrix products.

    loaded, stored: as often as a program asked for them. read, written: each byte once, however often it was asked for; to
    be read when the block has ended.
    """

    loaded: Counter[str] = field(default_factory=Counter)
    stored: Counter[str] = field(default_factory=Counter)
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.loaded.total() + self.stored.total()

    @property
    def distinct_bytes(self) -> int:
        """What caches that forget nothing would leave to the memory."""
        return self.read.total() + self.written.total()


@contextmanager
def counted(tensors: Mapping[str, torch.Tensor]) -> Iterator[Counts]:
    """Within the block, fills the yielded counts. Masked-off lanes count nothing; products count as they are padded."""
    counts = Counts()
    spans = {}
    for name, tensor in tensors.items():
        first = tensor.untyped_storage().data_ptr()
        spans[name] = (first, first + tensor.untyped_storage().nbytes())

    seen: dict[tuple[str, int], list[Any]] = {}  # (how, element's size) -> addresses

    def tally(how: str, pointers: Any, mask: Any) -> None:
        into = counts.loaded if how == "read" else counts.stored
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        named = 0
        for name, (first, end) in spans.items():
            inside = int(((addresses >= first) & (addresses < end)).sum())
            into[name] += inside * size
            named += inside
        into["other"] += (addresses.size - named) * size
        seen.setdefault((how, size), []).append(np.unique(addresses))

    load, store, dot = (
        getattr(InterpreterBuilder, name) for name in ("create_masked_load", "create_masked_store", "create_dot")
    )

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        tally("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        tally("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counting_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        counts.flops += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return dot(self, a, b, *rest)

    InterpreterBuilder.create_masked_load = counting_load
    InterpreterBuilder.create_masked_store = counting_store
    InterpreterBuilder.create_dot = counting_dot
    try:
        yield counts
        for (how, size), parts in seen.items():
            addresses, into = np.unique(np.concatenate(parts)), counts.read if how == "read" else counts.written
            into["other"] += len(addresses) * size
            for name, (first, end) in spans.items():
                inside = int(((addresses >= first) & (addresses < end)).sum()) * size
                into[name] += inside
                into["other"] -= inside
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store
        InterpreterBuilder.create_dot = dot
