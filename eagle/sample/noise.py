"""The noise of sampling and verification, and the rows' seeds. The generator: eagle/kernels/noise/reference.py."""

from collections.abc import Sequence
from typing import SupportsInt

import torch

from eagle.errors import EagleError
from eagle.kernels.noise.reference import COINS, COUPLING, DRAFTS, FINALS, coin, gumbel, philox, random_bits

__all__ = [
    "COINS",
    "COUPLING",
    "DRAFTS",
    "FINALS",
    "coin",
    "gumbel",
    "philox",
    "random_bits",
    "row_seeds",
]


def row_seeds(seed: SupportsInt | Sequence[int] | None, rows: int) -> list[int]:
    """One 64-bit seed per row.

    An int s gives row r the first two words of Philox with key s and counter (r, 0, 0, 1); a sequence is taken as it is;
    None draws from torch's global generator, so that `torch.manual_seed` decides. Raises EagleError for a sequence of
    another length.
    """
    if seed is None:
        return [int(x) for x in torch.randint(0, 2**62, (rows,))]
    if not isinstance(seed, Sequence):
        low, high, _, _ = philox(int(seed), torch.arange(rows), 0, 0, 1)
        return [int(a) | int(b) << 32 for a, b in zip(low, high)]
    if len(seed) != rows:
        raise EagleError(f"{len(seed)} seeds for {rows} rows; give an int or one seed per row")
    return [int(s) & (2**64 - 1) for s in seed]
