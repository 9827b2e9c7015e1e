"""Counter-based Gumbel noise: G(row_seed, position, token), a pure function of its arguments.

Philox 4x32-10 (Salmon et al. 2011). Key: the row's 64-bit seed. Counter: (token // 4, position, stream, 0); the four
words of one call belong to tokens 4c .. 4c+3. This is Triton's `tl.philox(seed, c0, c1, c2, c3)`, and for stream 0 its
`tl.rand4x(seed, position << 32 | token // 4)`, so that a kernel can draw the same bits.
Streams keep coupling noise, acceptance coins and draft sampling apart.
"""

import math
from collections.abc import Sequence

import torch

COUPLING, COINS, DRAFTS = 0, 1, 2
"""Streams."""

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(
    seed: int, c0: torch.Tensor, c1: int | torch.Tensor, c2: int | torch.Tensor, c3: int | torch.Tensor = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words per counter, as int64 tensors of c0's shape. `seed`: 64 bits. Counters: 32 bits each."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    word0, word1, word2, word3 = c0, *(torch.as_tensor(c, device=c0.device) for c in (c1, c2, c3))
    for _ in range(10):
        # 64-bit products of 32-bit words wrap in int64 to the right bits; the mask undoes the sign of the shift.
        product_a, product_b = word0 * _ROUND_A, word2 * _ROUND_B
        word0 = ((product_b >> 32) & _MASK) ^ word1 ^ key0
        word2 = ((product_a >> 32) & _MASK) ^ word3 ^ key1
        word1, word3 = product_b & _MASK, product_a & _MASK
        key0, key1 = (key0 + _KEY_A) & _MASK, (key1 + _KEY_B) & _MASK
    return word0, word1, word2, word3


def random_bits(seed: int, position: int, tokens: int, *, stream: int = COUPLING) -> torch.Tensor:
    """32 random bits for each of the tokens 0 .. tokens-1 of one position. int64 [tokens]."""
    counters = torch.arange(-(-tokens // 4))
    return torch.stack(philox(seed, counters, position, stream), dim=-1).flatten()[:tokens]


def gumbel(seed: int, position: int, tokens: int) -> torch.Tensor:
    """Gumbel(0, 1) noise of every token at one position. float32 [tokens].

    u = (bits + 1/2) / 2^32, E = -log1p(-u), G = -log(E): never -inf, and finest where it decides (large G, small u).
    """
    u = (random_bits(seed, position, tokens).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u)).float()


def coin(seed: int, position: int, index: int) -> float:
    """A uniform number in (0, 1) for acceptance decision `index` at a position."""
    bits = philox(seed, torch.tensor([index]), position, COINS)[0]
    return (int(bits) + 0.5) * 2.0**-32


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """One 64-bit seed per row.

    An int s gives row r the first two words of Philox with key s and counter (r, 0, 0, 1); a sequence is taken as it is;
    None draws from torch's global generator, so that `torch.manual_seed` decides.
    """
    if seed is None:
        return [int(x) for x in torch.randint(0, 2**62, (rows,))]
    if isinstance(seed, int):
        low, high, _, _ = philox(seed, torch.arange(rows), 0, 0, 1)
        return [int(a) | int(b) << 32 for a, b in zip(low, high)]
    if len(seed) != rows:
        raise ValueError(f"{len(seed)} seeds for {rows} rows; give an int or one seed per row")
    return [int(s) & (2**64 - 1) for s in seed]


def expected_gumbel_max(count: int) -> float:
    """Mean of the largest of `count` Gumbel variables: log(count) + Euler's gamma (for tests and documentation)."""
    return math.log(count) + 0.5772156649015329
