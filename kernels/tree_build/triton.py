"""A tree's links in Triton, from its parents, in one launch and without the host.

B rows, N nodes, W words, WP the power of two above it. Grid (B, blocks of BN nodes). Every node of a block walks up to its
root, gathering bits - as many steps as the deepest has ancestors - and, for LINKS, looks for its children and siblings in all
parents.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from eagle.kernels.variants import Variant

BLOCK = 32


@triton.jit(do_not_specialize=["nodes", "words"])
def _links(
    Parents, Lengths, Depths, Positions, Bits, FirstChild, NextSibling, nodes, words,
    WP: tl.constexpr, BLOCK: tl.constexpr, LINKS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = node < nodes
    parent = tl.load(Parents + b * nodes + node, mask=real, other=-1).to(tl.int32)

    word = tl.arange(0, WP)
    bits = tl.zeros([BLOCK, WP], tl.int64)
    depth = tl.zeros([BLOCK], tl.int32) - 1
    at = tl.where(real, node, -1)
    while tl.max(at, 0) >= 0:
        climbing = at >= 0
        own = tl.full([BLOCK], 1, tl.int64) << (at % 64).to(tl.int64)
        here = climbing[:, None] & ((at // 64)[:, None] == word[None, :])
        bits |= tl.where(here, own[:, None], 0)
        depth += climbing.to(tl.int32)
        at = tl.load(Parents + b * nodes + at, mask=climbing, other=-1).to(tl.int32)

    place = b * nodes + node
    tl.store(Depths + place, depth.to(tl.int64), mask=real)
    tl.store(Bits + place[:, None] * words + word[None, :], bits, mask=real[:, None] & (word < words)[None, :])
    if LINKS:
        child = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        sibling = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in tl.range(0, nodes, BLOCK):
            other = start + tl.arange(0, BLOCK)
            above = tl.load(Parents + b * nodes + other, mask=other < nodes, other=-1).to(tl.int32)
            is_child = above[None, :] == node[:, None]
            child = tl.minimum(child, tl.min(tl.where(is_child, other[None, :], 0x7FFFFFFF), 1))
            is_next = (above[None, :] == parent[:, None]) & (other[None, :] > node[:, None]) & (parent >= 0)[:, None]
            sibling = tl.minimum(sibling, tl.min(tl.where(is_next, other[None, :], 0x7FFFFFFF), 1))
        tl.store(Positions + place, tl.load(Lengths + b) + depth, mask=real)
        tl.store(FirstChild + place, tl.where(child == 0x7FFFFFFF, -1, child).to(tl.int64), mask=real)
        tl.store(NextSibling + place, tl.where(sibling == 0x7FFFFFFF, -1, sibling).to(tl.int64), mask=real)


def launch(parents_BN: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """depths, positions, ancestors, first child, next sibling; see op.py."""
    depths, positions, first_child, next_sibling = (torch.empty_like(parents_BN) for _ in range(4))
    bits_BNW = _launch(parents_BN, lengths_B, depths, positions, first_child, next_sibling, links=True)
    return depths, positions, bits_BNW, first_child, next_sibling


def launch_ancestry(parents_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """depths, ancestors; see op.py."""
    depths = torch.empty_like(parents_BN)
    return depths, _launch(
        parents_BN, depths, depths, depths, depths, depths, links=False
    )  # but one of them is touched


def _launch(
    parents_BN: torch.Tensor,
    lengths: torch.Tensor,
    depths: torch.Tensor,
    positions: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    *,
    links: bool,
) -> torch.Tensor:
    rows, nodes = parents_BN.shape
    words = triton.cdiv(nodes, 64)
    bits_BNW = parents_BN.new_empty(rows, nodes, words)
    _links[(rows, triton.cdiv(nodes, BLOCK))](
        parents_BN, lengths, depths, positions, bits_BNW, first_child, next_sibling, nodes, words,
        WP=triton.next_power_of_2(words), BLOCK=BLOCK, LINKS=links, num_warps=1,
    )  # fmt: skip
    return bits_BNW


def variants() -> Iterator[Variant]:
    """Trees of up to 64, 128 and 256 nodes."""
    pointers = ("Parents", "Lengths", "Depths", "Positions", "Bits", "FirstChild", "NextSibling")
    for words, links in product((1, 2, 4), (False, True)):
        yield Variant(
            kernel="tree_build",
            name=f"{64 * words} nodes{' links' * links}",
            function=_links,
            types={**dict.fromkeys(pointers, "*i64"), "nodes": "i32", "words": "i32"},
            constants={"WP": words, "BLOCK": BLOCK, "LINKS": links},
            divisible=frozenset(pointers),
            num_warps=1,
            num_stages=1,
            no_spills=True,
            representative=words in (1, 4) and links == (words == 4),
        )
