"""The counter-based noise of noise/reference.py inside Triton kernels: equal bits, Gumbel values to float rounding."""

import triton
import triton.language as tl


@triton.jit
def uniform(bits):
    """float32 (bits + 1/2) / 2^32 of uint32 words. Finest near 0; near 1 it rounds: take the complement's there."""
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def gumbel_of(bits):
    """-log(-log1p(-u)) with u = (bits + 1/2) / 2^32, accurate at both ends. float32 of uint32 words."""
    u = uniform(bits)
    rest = tl.where(u < 0.5, 1.0 - u, uniform(~bits))  # 1 - u
    # log1p(-u) = log(w) * u / (1 - w) with w = 1 - u as rounded: the second factor undoes the rounding (Kahan).
    mend = tl.where(u < 0.5, u / tl.where(rest < 1.0, 1.0 - rest, 1.0), 1.0)
    exponential = tl.where(rest < 1.0, -tl.log(rest) * mend, u)
    return -tl.log(exponential)


@triton.jit
def token_bits(seed, position, first, stream, BLOCK: tl.constexpr, cycle=0):
    """32 random bits of the tokens first .. first + BLOCK - 1. uint32 [BLOCK]; four values per Philox call.

    seed: int64. position, stream, cycle: int32. first: a multiple of 4; BLOCK: a power of 2, 4 or more.
    """
    call = first // 4 + tl.arange(0, BLOCK // 4)
    zero = call * 0
    a, b, c, d = tl.philox(seed, call, zero + position, zero + stream, zero + cycle)
    # [BLOCK / 4, 2, 2] in the order a, b, c, d: the words of one call belong to neighbouring tokens.
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))


@triton.jit
def token_gumbel(seed, position, first, BLOCK: tl.constexpr):
    """Coupling noise of the tokens first .. first + BLOCK - 1 at a position. float32 [BLOCK]."""
    return gumbel_of(token_bits(seed, position, first, 0, BLOCK))


@triton.jit
def scattered_gumbel(seed, position, token):
    """Coupling noise of single tokens, int32 of any shape: a Philox call each."""
    call = token // 4
    zero = call * 0
    a, b, c, d = tl.philox(seed, call, zero + position, zero, zero)
    word = token % 4
    return gumbel_of(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def coin(seed, position, index, stream):
    """A uniform number in (0, 1), both ends excluded: float64, as float32 would round some to 1. Scalars."""
    index = tl.to_tensor(index).to(tl.int32)
    zero = index * 0
    bits, _, _, _ = tl.philox(seed, index, zero + position, zero + stream, zero)
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
