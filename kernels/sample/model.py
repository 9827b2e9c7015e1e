"""What sampling must move, and the bytes that its programs ask for. R rows of V logits, S splits of a row.

All rows in the same way: greedy, by noise alone, or filtered, with filters whose candidates fit into scratch memory.
"""

from typing import Literal

from eagle.kernels.roofline import Cost

Kind = Literal["greedy", "noise", "filtered"]
SPLIT, PIVOTS = 4096, 16  # of triton.py, which cannot be imported without triton
_SURVEY = PIVOTS * (4 + 4) + 8
"""Bytes that the survey leaves for a split: numbers and masses above each pivot, and the whole mass."""


def cost(*, rows: int, vocab_size: int, element: int) -> Cost:
    """The logits are read, the tokens written. What passes between the kernel's launches need not leave the L2 cache."""
    return Cost(bytes=rows * (vocab_size * element + 8))


def scratch(*, rows: int, vocab_size: int, kind: Kind, described: bool = False, candidates: int = 0) -> int:
    """Bytes written for a later launch to read. candidates: of all rows (filtered)."""
    splits = -(-vocab_size // SPLIT)
    peaks = 8
    bests = 8 if kind == "noise" else 0
    survey = _SURVEY if kind == "filtered" or (kind == "noise" and described) else 0
    return rows * splits * (peaks + bests + survey) + 8 * candidates


def passes(*, kind: Kind, described: bool = False) -> int:
    """How often the logits are asked for: for the peak, for the survey, for noise or candidates."""
    return {"greedy": 1, "noise": 2 + described, "filtered": 3}[kind]
