"""Tree attention in Triton: a committed prefix seen by all nodes, then a draft tree seen through ancestor bits.

B rows, N query nodes, h query heads, k key/value heads, G = h // k, M = N * G packed query rows (m = node * G + member),
S slots, C tree columns, W = ceil(C / 64) words, D head dim, DP the power of two above it, P splits.

Grid (blocks of M, B * k, P): one program holds BM packed query rows of one key/value head, so that keys and values are
read once for all heads of a group, and takes the tiles of one split of the prefix. Prefix tiles need no mask but the
tail's; the last split goes on to the tree, tests bit j of a node's word for column j, and stops at the last column that
its nodes can see. With more than one split, partial results go through scratch memory and `_merge` joins them by their
log-sum-exp. Lengths are read on the device and the grid depends on shapes alone: a CUDA graph can replay the launch.

After FlashAttention-2 (Dao 2023, arXiv 2307.08691) and Flash-Decoding's split over keys; the mask is ours.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from eagle.kernels.dot import dot, precision
from eagle.kernels.tree_attention.tiling import ROW_BLOCKS, Tiling, padded_dim, splits_for, tiling
from eagle.kernels.variants import TYPES, Variant

HEAD_DIMS = (64, 80, 96, 128, 256)
"""What the compile table covers; any head dim up to the last is taken."""
LOG2_E = 1.4426950408889634
_NOT_SPECIALISED = ["nodes", "kv_heads", "members", "columns", "words", "offset", "splits", "window"]
"""Integers that change from launch to launch: no version of its own where one happens to be 1 or a multiple of 16."""
_STRIDES = ["query_b", "query_h", "query_n", "key_b", "key_h", "key_s", "value_b", "value_h", "value_s"]


@triton.jit
def _scores(
    q, k, seen, scale_log2, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in base 2, -inf where not seen. q [BM, DP], k [DP, tile], seen bool [BM, tile]."""
    scores = dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32), PRECISION)
    if SOFTCAP:  # softcap * tanh(x): tanh(x) = 1 - 2 / (exp(2x) + 1), in base 2. scale_log2 = scale * log2(e)
        grown = tl.exp2(scores * (2.0 * scale_log2 / softcap))
        scores = (softcap * 1.4426950408889634) * (1.0 - 2.0 / (grown + 1.0))
    else:
        scores = scores * scale_log2
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _fold(scores, v, acc, peak, total, PRECISION: tl.constexpr):
    """One step of the online softmax. acc [BM, DP], peak and total [BM], all float32; v [tile, DP]."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far: -inf - -inf would be NaN
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return acc, higher, total


@triton.jit
def _tile(pointers, used, dims, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads keys or values. used: which of the tile's slots, read when MASKED; dims: which lanes, read when PADDED."""
    if MASKED and PADDED:
        tile = tl.load(pointers, mask=used & dims, other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=used, other=0.0)
    elif PADDED:
        tile = tl.load(pointers, mask=dims, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=_NOT_SPECIALISED)
def _attend(
    Query, Key, Value, Out, PartOut, PartLse, Lengths, Bits, QueryDepths, ColumnDepths,
    scale_log2, softcap, window, nodes, kv_heads, members, columns, words, offset, splits,
    query_b, query_h, query_n, key_b, key_h, key_s, value_b, value_h, value_s,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """query_b ... value_s: strides in elements. window, softcap: read when WINDOW, SOFTCAP. BN divides 64."""
    block, split = tl.program_id(0), tl.program_id(2)
    b, kv = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    length = tl.load(Lengths + b).to(tl.int32)
    row_b = b.to(tl.int64)

    m = block * BM + tl.arange(0, BM)
    node, head = m // members, kv * members + m % members
    real = m < nodes * members
    dim = tl.arange(0, DP)
    query_tile = head[:, None] * query_h + node[:, None] * query_n + dim[None, :]
    q = tl.load(Query + row_b * query_b + query_tile, mask=real[:, None] & (dim < D)[None, :], other=0.0)
    Key += row_b * key_b + kv.to(tl.int64) * key_h
    Value += row_b * value_b + kv.to(tl.int64) * value_h
    if WINDOW:  # a key is seen when its position > the query's - window
        depth = tl.load(QueryDepths + row_b * nodes + node, mask=real, other=0x3FFFFFF).to(tl.int32)
        oldest = length + depth - window
        skipped = (
            tl.maximum(tl.min(oldest, 0) + 1, 0) // BN
        )  # before the first tile in which any of these nodes sees a key
    else:
        oldest = tl.zeros([BM], tl.int32)
        skipped = 0

    acc = tl.zeros([BM, DP], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)

    # Prefix tiles and tree tiles in equal shares; the tree's all go to the last split.
    tiles = tl.maximum(tl.cdiv(length, BN) - skipped, 0)
    share = tl.cdiv(tiles + tl.cdiv(columns, BN), splits)
    start = (skipped + tl.minimum(split * share, tiles)) * BN
    end = tl.minimum((skipped + tl.minimum((split + 1) * share, tiles)) * BN, length)
    if split == splits - 1:
        end = length
    # A tile's addresses: a scalar that moves plus offsets that do not, the same in all three loops.
    n = tl.arange(0, BN)
    key_tile = n[None, :] * key_s + dim[:, None]
    value_tile = n[:, None] * value_s + dim[None, :]
    PADDED: tl.constexpr = D != DP
    key_dims, value_dims = (dim < D)[:, None], (dim < D)[None, :]
    whole = start if WINDOW else start + tl.maximum(end - start, 0) // BN * BN
    for at in tl.range(start, whole, BN):
        k = _tile(Key + tl.cast(at, tl.int64) * key_s + key_tile, True, key_dims, False, PADDED)
        v = _tile(Value + tl.cast(at, tl.int64) * value_s + value_tile, True, value_dims, False, PADDED)
        scores = _scores(q, k, True, scale_log2, softcap, False, SOFTCAP, PRECISION)
        acc, peak, total = _fold(scores, v, acc, peak, total, PRECISION)
    for at in tl.range(whole, end, BN):
        there = at + n < end
        k = _tile(Key + tl.cast(at, tl.int64) * key_s + key_tile, there[None, :], key_dims, True, PADDED)
        v = _tile(Value + tl.cast(at, tl.int64) * value_s + value_tile, there[:, None], value_dims, True, PADDED)
        seen = there[None, :]
        if WINDOW:
            seen = seen & ((at + n)[None, :] > oldest[:, None])
        scores = _scores(q, k, seen, scale_log2, softcap, True, SOFTCAP, PRECISION)
        acc, peak, total = _fold(scores, v, acc, peak, total, PRECISION)

    if split == splits - 1:
        # Ancestors come before their descendants: these nodes see no column behind their last one.
        last = tl.minimum((tl.minimum(block * BM + BM, nodes * members) - 1) // members + offset + 1, columns)
        Key += length.to(tl.int64) * key_s
        Value += length.to(tl.int64) * value_s
        for at in tl.range(0, last, BN):
            column = at + n
            word = tl.load(Bits + (row_b * nodes + node) * words + at // 64, mask=real, other=0) >> (at % 64)
            # Bits are tested in 32-bit halves: half the registers.
            half = tl.where((n < 32)[None, :], word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
            seen = ((half >> (n % 32)[None, :]) & 1) != 0
            if WINDOW:
                place = tl.load(ColumnDepths + row_b * columns + column, mask=column < columns, other=0).to(tl.int32)
                seen = seen & ((length + place)[None, :] > oldest[:, None])
            # A column that nobody sees may never have been written.
            used = ((tl.reduce(word, 0, _either) >> n.to(tl.int64)) & 1) != 0
            k = _tile(Key + tl.cast(at, tl.int64) * key_s + key_tile, used[None, :], key_dims, True, PADDED)
            v = _tile(Value + tl.cast(at, tl.int64) * value_s + value_tile, used[:, None], value_dims, True, PADDED)
            scores = _scores(q, k, seen, scale_log2, softcap, True, SOFTCAP, PRECISION)
            acc, peak, total = _fold(scores, v, acc, peak, total, PRECISION)

    some = total > 0.0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    rows = nodes * kv_heads * members  # of one row's output [N, h, D]
    row = node * (kv_heads * members) + head
    out_tile = row[:, None] * D + dim[None, :]
    if splits == 1:
        out_mask = real[:, None] & value_dims
        tl.store(Out + row_b * rows * D + out_tile, acc.to(Out.dtype.element_ty), mask=out_mask)
    else:
        first = (split.to(tl.int64) * (tl.num_programs(1) // kv_heads) + b) * rows
        lse = tl.where(some, peak + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(PartLse + first + row, lse, mask=real)
        tl.store(PartOut + first * D + out_tile, acc, mask=(real & some)[:, None] & value_dims)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge(Out, PartOut, PartLse, rows, splits, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr):
    """Joins the splits' results [P, rows, D] by their log-sum-exps [P, rows] (base 2) into Out [rows, D]."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < rows
    dim = tl.arange(0, DP)
    acc = tl.zeros([BR, DP], tl.float32)
    peak = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    for split in tl.range(0, splits):
        at = row + split * rows.to(tl.int64)
        lse = tl.load(PartLse + at, mask=real, other=float("-inf"))
        some = lse != float("-inf")  # a split that saw nothing wrote no result
        part = tl.load(PartOut + at[:, None] * D + dim[None, :], mask=some[:, None] & (dim < D)[None, :], other=0.0)
        higher = tl.maximum(peak, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(peak - base), tl.exp2(lse - base)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        peak = higher
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(
        Out + row[:, None] * D + dim[None, :], acc.to(Out.dtype.element_ty), mask=real[:, None] & (dim < D)[None, :]
    )


def launch(
    query_BhNd: torch.Tensor,
    key_BkSd: torch.Tensor,
    value_BkSd: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    ancestors_BNW: torch.Tensor,
    query_depths_BN: torch.Tensor,
    column_depths_BC: torch.Tensor,
    offset: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    splits: int | None = None,
) -> torch.Tensor:
    """[B, h, N, D]; see op.tree_attention, which has checked the arguments. splits: None chooses."""
    batch, heads, nodes, head_dim = query_BhNd.shape
    kv_heads, slots = key_BkSd.shape[1:3]
    columns = column_depths_BC.shape[1]
    packed_rows = nodes * (heads // kv_heads)
    device = query_BhNd.device
    tile = tiling(packed_rows, head_dim, query_BhNd.dtype, _capability(device))
    blocks = triton.cdiv(packed_rows, tile.rows)
    if splits is None:
        splits = splits_for(
            programs=blocks * batch * kv_heads,
            packed_rows=packed_rows,
            slots=slots,
            processors=_processors(device),
        )
    out_BNhd = query_BhNd.new_empty(batch, nodes, heads, head_dim)
    scratch = 0 if splits == 1 else splits * batch * nodes * heads
    part_out = torch.empty(scratch * head_dim, dtype=torch.float32, device=device)
    part_lse = torch.empty(scratch, dtype=torch.float32, device=device)
    padded = padded_dim(head_dim)
    _attend[(blocks, batch * kv_heads, splits)](
        query_BhNd, key_BkSd, value_BkSd, out_BNhd, part_out, part_lse,
        lengths_B, ancestors_BNW, query_depths_BN, column_depths_BC,
        scaling * LOG2_E, softcap or 0.0, window or 0,
        nodes, kv_heads, heads // kv_heads, columns, ancestors_BNW.shape[2], offset, splits,
        *query_BhNd.stride()[:3], *key_BkSd.stride()[:3], *value_BkSd.stride()[:3],
        D=head_dim, DP=padded, BM=tile.rows, BN=tile.slots,
        WINDOW=window is not None, SOFTCAP=softcap is not None, PRECISION=precision(query_BhNd.dtype),
        num_warps=tile.num_warps, num_stages=tile.num_stages, maxnreg=tile.maxnreg,
    )  # fmt: skip
    if splits > 1:
        rows = batch * nodes * heads
        _merge[(triton.cdiv(rows, MERGE_ROWS),)](
            out_BNhd, part_out, part_lse, rows, splits, D=head_dim, DP=padded, BR=MERGE_ROWS, num_warps=MERGE_ROWS
        )
    return out_BNhd.transpose(1, 2)


MERGE_ROWS = 4


def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90  # interpreted
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def variants() -> Iterator[Variant]:
    """Every version the launcher can choose for HEAD_DIMS."""
    for head_dim, dtype in product(HEAD_DIMS, TYPES):
        element = TYPES[dtype]
        padded = padded_dim(head_dim)
        shipped: dict[Tiling, list[int]] = {}
        for rows, arch in product(ROW_BLOCKS, (80, 90, 100)):
            archs = shipped.setdefault(tiling(rows, head_dim, dtype, arch), [])
            if arch not in archs:
                archs.append(arch)
        pointers = dict.fromkeys(("Query", "Key", "Value", "Out"), f"*{element}")
        pointers |= dict.fromkeys(("PartOut", "PartLse"), "*fp32")
        pointers |= dict.fromkeys(("Lengths", "Bits", "QueryDepths", "ColumnDepths"), "*i64")
        integers = dict.fromkeys([*_NOT_SPECIALISED, *_STRIDES], "i32")
        for (tile, archs), window, softcap in product(shipped.items(), (False, True), (False, True)):
            flags = (" window" if window else "") + (" softcap" if softcap else "")
            sampled = {
                (64, "bf16", 16, True),
                (128, "bf16", 64, False),
                (128, "bf16", 128, True),
                (80, "fp32", 16, True),
            }
            yield Variant(
                kernel="tree_attention",
                name=f"d{head_dim} {element} {tile.rows}x{tile.slots}{flags}" + (" maxnreg" if tile.maxnreg else ""),
                function=_attend,
                types={**pointers, **integers, "scale_log2": "fp32", "softcap": "fp32"},
                constants={
                    "D": head_dim, "DP": padded, "BM": tile.rows, "BN": tile.slots,
                    "WINDOW": window, "SOFTCAP": softcap, "PRECISION": precision(dtype),
                },
                divisible=frozenset([*pointers, *_STRIDES]),
                architectures=tuple(archs),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                options={"maxnreg": tile.maxnreg},
                no_spills=head_dim in (64, 128),
                representative=(head_dim, element, tile.rows, window) in sampled and window == softcap,
            )  # fmt: skip
        yield Variant(
            kernel="tree_attention",
            name=f"merge d{head_dim} {element}",
            function=_merge,
            types={"Out": f"*{element}", "PartOut": "*fp32", "PartLse": "*fp32", "rows": "i32", "splits": "i32"},
            constants={"D": head_dim, "DP": padded, "BR": MERGE_ROWS},
            divisible=frozenset(["Out", "PartOut", "PartLse"]),
            num_warps=MERGE_ROWS,
            no_spills=True,
            representative=(head_dim, element) == (128, "bf16"),
        )
