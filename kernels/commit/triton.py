"""Commit in Triton: the accepted rows of all layers' keys and values in one launch.

B rows, K nodes to move, k key/value heads, D words of a head's row, DP the power of two above it.

Grid (buffers, B, k). The buffers' addresses lie in a table on the device. A program reads a chunk of a head's rows, waits
for all its threads, and writes them. Chunks come in ascending order: with ascending sources that lie at or behind their
targets - as accepted paths do - no chunk reads what an earlier one wrote. Bytes are moved as the widest integers that fit.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from eagle.kernels.dispatch import keep
from eagle.kernels.variants import Variant

CHUNK = 16
"""Rows read before any of them is written."""
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["count", "stride_b", "stride_h", "stride_s"])
def _move(
    Table, Source, Target, Counts, Lengths, count, stride_b, stride_h, stride_s,
    PATH: tl.constexpr, WORD: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """PATH: Source holds tree nodes, which move from behind the row's prefix to its end; Target is not read.
    Otherwise Source and Target hold slots; Counts and Lengths are not read. Strides in words."""
    b, head = tl.program_id(1), tl.program_id(2)
    buffer = tl.load(Table + tl.program_id(0)).to(tl.pointer_type(WORD))
    buffer += b.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    dim = tl.arange(0, DP)
    if PATH:
        length = tl.load(Lengths + b)
        last = tl.minimum(tl.load(Counts + b), count).to(tl.int32)
    else:
        last = count
    for at in tl.range(0, last, CHUNK):
        step = at + tl.arange(0, CHUNK)
        live = step < last
        source = tl.load(Source + b * count + step, mask=live, other=0)
        if PATH:
            source += length
            target = length + step
        else:
            target = tl.load(Target + b * count + step, mask=live, other=0)
        mask = (live & (source != target))[:, None] & (dim < D)[None, :]
        row = tl.load(buffer + source[:, None] * stride_s + dim[None, :], mask=mask, other=0)
        tl.debug_barrier()  # one thread's target may be another's source
        tl.store(buffer + target[:, None] * stride_s + dim[None, :], row, mask=mask)
        tl.debug_barrier()


def launch(
    buffers_BkSd: Sequence[torch.Tensor],
    *,
    source_BK: torch.Tensor,
    target_BK: torch.Tensor | None,
    counts_B: torch.Tensor | None,
    lengths_B: torch.Tensor | None,
) -> None:
    """Moves in place. The buffers agree in shape, strides, dtype and device; see op.py."""
    first = buffers_BkSd[0]
    rows, heads, _, head_dim = first.shape
    addresses = tuple(buffer.data_ptr() for buffer in buffers_BkSd)
    size = first.element_size()
    movable = [head_dim * size, *(stride * size for stride in first.stride()[:3]), *addresses]
    word = next(width for width in (8, 4, 2, 1) if all(n % width == 0 for n in movable))
    strides = [stride * size // word for stride in first.stride()[:3]]
    words = head_dim * size // word
    unread = source_BK  # stands in for what the kernel does not look at
    table = _table(addresses, first.device)
    keep(table)  # a recording reads it at every replay, when the cache may have dropped it
    _move[(len(buffers_BkSd), rows, heads)](
        table,
        source_BK,
        unread if target_BK is None else target_BK,
        unread if counts_B is None else counts_B,
        unread if lengths_B is None else lengths_B,
        source_BK.shape[1],
        *strides,
        PATH=target_BK is None,
        WORD=WORDS[word],
        D=words,
        DP=triton.next_power_of_2(words),
        CHUNK=CHUNK,
        num_warps=_warps(words),
    )


@lru_cache(maxsize=256)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The addresses on the device: copied there once, so that a CUDA graph finds them there."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _warps(words: int) -> int:
    """4 words per thread."""
    return min(8, max(1, triton.next_power_of_2(words) * CHUNK // 128))


def variants() -> Iterator[Variant]:
    """Head dims 64, 80, 96, 128, 256 of half types (even addresses: words of 8 bytes) and of float32."""
    for head_dim in (64, 80, 96, 128, 256):
        for size in (2, 4):
            for path in (True, False):
                words = head_dim * size // 8
                yield Variant(
                    kernel="commit",
                    name=f"d{head_dim} {8 * size}-bit {'path' if path else 'slots'}",
                    function=_move,
                    types={
                        **dict.fromkeys(("Table", "Source", "Target", "Counts", "Lengths"), "*i64"),
                        **dict.fromkeys(("count", "stride_b", "stride_h", "stride_s"), "i32"),
                    },
                    constants={
                        "PATH": path, "WORD": WORDS[8], "D": words,
                        "DP": triton.next_power_of_2(words), "CHUNK": CHUNK,
                    },
                    divisible=frozenset(("Table", "Source", "Target", "Counts", "Lengths")),
                    num_warps=_warps(words),
                    num_stages=1,
                    no_spills=True,
                    representative=(head_dim, size) == (128, 2),
                )  # fmt: skip
