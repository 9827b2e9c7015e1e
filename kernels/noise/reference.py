"""Counter-based Gumbel noise: G(row_seed, position, token), a pure function of its arguments.

Philox 4x32-10 (Salmon et al. 2011). Key: the row's 64-bit seed. Counter: (token // 4, position, stream, cycle); the four
words of one call belong to tokens 4c .. 4c+3. This is Triton's `tl.philox(seed, c0, c1, c2, c3)`, and for stream 0 its
`tl.rand4x(seed, position << 32 | token // 4)`, and noise/device.py draws the same bits in kernels.
Streams keep coupling noise, acceptance coins, draft sampling and final draws apart.
"""

from typing import Any, TypeVar

import torch

COUPLING, COINS, DRAFTS, FINALS = 0, 1, 2, 3
"""Streams: the noise that drafting and the coupled walk share; acceptance decisions; draws of draft tokens; draws of the
token that ends a verification (residual or bonus)."""

Word = TypeVar("Word", int, torch.Tensor)
_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def philox(seed: int, c0: Word, c1: int | Word, c2: int | Word, c3: int | Word = 0) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words per counter: c0 an int, or an int64 tensor whose shape they take. `seed`: 64 bits. Counters: 32."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    counters: list[Any] = [c0, *(c + 0 * c0 for c in (c1, c2, c3))]
    word0, word1, word2, word3 = counters
    for _ in range(10):
        # 64-bit products of 32-bit words wrap in int64 to the right bits; the mask undoes the sign of the shift.
        product_a, product_b = word0 * _ROUND_A, word2 * _ROUND_B
        word0 = ((product_b >> 32) & _MASK) ^ word1 ^ key0
        word2 = ((product_a >> 32) & _MASK) ^ word3 ^ key1
        word1, word3 = product_b & _MASK, product_a & _MASK
        key0, key1 = (key0 + _KEY_A) & _MASK, (key1 + _KEY_B) & _MASK
    return word0, word1, word2, word3


def random_bits(seed: int, position: int, tokens: int, *, stream: int = COUPLING, cycle: int = 0) -> torch.Tensor:
    """32 random bits for each of the tokens 0 .. tokens-1 of one position (and cycle). int64 [tokens]."""
    counters = torch.arange(-(-tokens // 4))
    return torch.stack(philox(seed, counters, position, stream, cycle), dim=-1).flatten()[:tokens]


def gumbel(seed: int, position: int, tokens: int, *, stream: int = COUPLING, cycle: int = 0) -> torch.Tensor:
    """Gumbel(0, 1) noise of every token at one position. float32 [tokens].

    cycle: tells apart draws for the same position in different cycles (the position that the cycle starts from).
    u = (bits + 1/2) / 2^32, E = -log1p(-u), G = -log(E): never -inf, and finest where it decides (large G, small u).
    """
    u = (random_bits(seed, position, tokens, stream=stream, cycle=cycle).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u)).float()


def coin(seed: int, position: int, index: int, *, stream: int = COINS) -> float:
    """A uniform number in (0, 1), both ends excluded, for decision `index` at a position."""
    return (int(philox(seed, index, position, stream)[0]) + 0.5) * 2.0**-32
