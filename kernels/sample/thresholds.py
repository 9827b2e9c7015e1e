"""The scores of a row and the thresholds of its filters, inside the sampling kernels.

Scores are <= 0, so the bits of a score without its sign, as an integer, are the larger the worse the score: its `key`. Both
top-k and top-p ask for the largest key with less than a given weight strictly better than it: 31 halvings find it exactly.
Masses are integers, exp(score) * 2^40, whose sums know no order: the same for every split, and from run to run.
"""

import triton
import triton.language as tl

from eagle.kernels.noise.device import scattered_gumbel, token_gumbel

FINITE = tl.constexpr(0x7F7FFFFF)
"""The key of the worst finite score."""
BEST_MASS = tl.constexpr(2.0**40)
"""The mass of the best token."""


@triton.jit
def load_scores(Row, at, vocab_size, peak, temperature):
    """Scores of the tokens `at`, -inf behind the last."""
    logits = tl.load(Row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits - peak, temperature)


@triton.jit
def key_of(scores):
    return scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mass_of(scores):
    return (tl.exp(scores) * BEST_MASS).to(tl.int64)


@triton.jit
def share_of(p, total):
    """The least integer mass that is at least p of the total."""
    return tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def search(keys, weights, goal):
    """The largest key with less than `goal` of the weights strictly better than it (the best one, if there is none)."""
    found = tl.full([], 0, tl.int32)
    for halving in range(31):
        trial = found | (1 << (30 - halving))
        better = tl.sum(tl.where(keys < trial, weights, 0), 0)
        found = tl.where(better < goal, trial, found)
    return found


@triton.jit
def row_weight(Row, vocab_size, peak, temperature, below, upto, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight (mass, or number) of a whole row's tokens with key < below and key <= upto."""
    weight = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        scores = load_scores(Row, start + tl.arange(0, BLOCK), vocab_size, peak, temperature)
        counted = (key_of(scores) < below) & (key_of(scores) <= upto)
        each = mass_of(scores) if MASS else tl.full([BLOCK], 1, tl.int64)
        weight += tl.sum(tl.where(counted, each, 0), 0)
    return weight


@triton.jit
def row_search(Row, vocab_size, peak, temperature, upto, goal, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """`search` over a whole row's tokens with key <= upto."""
    found = tl.full([], 0, tl.int32)
    for halving in range(31):
        trial = found | (1 << (30 - halving))
        better = row_weight(Row, vocab_size, peak, temperature, trial, upto, MASS, BLOCK)
        found = tl.where(better < goal, trial, found)
    return found


@triton.jit
def among_candidates(
    Scores, Tokens, count, k, p, lowest, joint, mass, seed, position, vocab_size, CANDIDATES: tl.constexpr
):
    """(token, key of the threshold, mass of the kept) from the row's `count` candidates. mass: of all tokens."""
    c = tl.arange(0, CANDIDATES)
    scores = tl.load(Scores + c, mask=c < count, other=float("-inf"))
    tokens = tl.load(Tokens + c, mask=c < count, other=0x7FFFFFFF)
    keys, masses = key_of(scores), mass_of(scores)
    threshold = lowest
    if k < vocab_size:
        kth = search(keys, (keys <= FINITE).to(tl.int32), k)
        threshold = tl.minimum(threshold, kth)
        if joint == 0:
            masses = tl.where(keys <= kth, masses, 0)
            mass = tl.sum(masses, 0)
    if p < 1.0:
        threshold = tl.minimum(threshold, search(keys, masses, share_of(p, mass)))
    kept = keys <= threshold
    noisy = tl.where(kept, scores + scattered_gumbel(seed, position, tokens), float("-inf"))
    token = tl.min(tl.where(noisy == tl.max(noisy, 0), tokens, 0x7FFFFFFF), 0)
    return token, threshold, tl.sum(tl.where(kept, masses, 0), 0)


@triton.jit
def among_all(
    Row, peak, temperature, k, p, lowest, joint, mass, seed, position, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """As `among_candidates`, from the whole row."""
    threshold = lowest
    upto = lowest * 0 + FINITE
    if k < vocab_size:
        kth = row_search(Row, vocab_size, peak, temperature, upto, k, False, BLOCK)
        threshold = tl.minimum(threshold, kth)
        if joint == 0:
            upto = tl.minimum(upto, kth)
            mass = row_weight(Row, vocab_size, peak, temperature, 0x7FFFFFFF, upto, True, BLOCK)
    if p < 1.0:
        last = row_search(Row, vocab_size, peak, temperature, upto, share_of(p, mass), True, BLOCK)
        threshold = tl.minimum(threshold, last)
    token = tl.full([], 0, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        scores = load_scores(Row, start + tl.arange(0, BLOCK), vocab_size, peak, temperature)
        noisy = scores + token_gumbel(seed, position, start, BLOCK)
        high, place = tl.max(tl.where(key_of(scores) <= threshold, noisy, float("-inf")), 0, return_indices=True)
        token = tl.where(high > best, start + place, token)
        best = tl.maximum(best, high)
    return token, threshold, row_weight(Row, vocab_size, peak, temperature, 0x7FFFFFFF, threshold, True, BLOCK)
