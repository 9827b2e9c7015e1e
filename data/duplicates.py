"""Answers that say nearly the same: MinHash over runs of tokens. T tokens, K hash functions, S runs (shingles).

Two answers' share of common runs (their Jaccard similarity) is about the share of equal minima; those that agree in one
band of minima are compared. Memory: 4 K bytes per document.
"""

import numpy as np

RUN, HASHES, BAND = 5, 32, 4
"""Tokens per run; hash functions; minima per band: at similarity 0.8, 98% of the pairs agree in one of the 8 bands."""
SIMILAR = 0.8
_RNG = np.random.default_rng(20240917)
_RUN_ODD = _RNG.integers(1, 2**63, size=RUN, dtype=np.uint64) | np.uint64(1)
_FACTOR_K = _RNG.integers(1, 2**63, size=HASHES, dtype=np.uint64) | np.uint64(1)
_SHIFT_K = _RNG.integers(0, 2**63, size=HASHES, dtype=np.uint64)


def signature(ids_T: np.ndarray) -> np.ndarray:
    """uint32 [K]: the minima of K hashes over the runs of tokens ids_T (int [T], T >= 1)."""
    padded = np.concatenate([ids_T, np.full(max(0, RUN - len(ids_T)), -1)]).astype(np.uint64)
    runs_SR = np.lib.stride_tricks.sliding_window_view(padded, RUN)
    mixed_S = (runs_SR * _RUN_ODD).sum(axis=1, dtype=np.uint64)
    mixed_S ^= mixed_S >> np.uint64(29)
    hashed_KS = (_FACTOR_K[:, None] * mixed_S + _SHIFT_K[:, None]) >> np.uint64(32)
    minima_K: np.ndarray = hashed_KS.min(axis=1).astype(np.uint32)
    return minima_K


def near_duplicates(signatures_DK: np.ndarray) -> np.ndarray:
    """bool [D]: whether an earlier document's answer is nearly the same (one of its band; similarity about 0.8 or more)."""
    documents = len(signatures_DK)
    found_D = np.zeros(documents, dtype=np.bool_)
    for start in range(0, HASHES, BAND):
        band = np.ascontiguousarray(signatures_DK[:, start : start + BAND])
        order = np.lexsort((np.arange(documents), *band.T))
        same = np.concatenate([[False], (band[order[1:]] == band[order[:-1]]).all(axis=1)]) if documents else found_D
        # Each document is compared with the first of its bucket (buckets are runs of `same` in the sorted order).
        first = order[np.maximum.accumulate(np.where(same, 0, np.arange(documents)))]
        members, leaders = order[same], first[same]
        alike = (signatures_DK[members] == signatures_DK[leaders]).mean(axis=1)
        found_D[members[alike >= SIMILAR - 0.05]] = True
    return found_D
