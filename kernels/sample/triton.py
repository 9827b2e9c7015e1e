"""Sampling in Triton: temperature, top-k, top-p, min-p and the Gumbel argmax, without a sort and without an [R, V] result.

R rows, V vocabulary, S splits of a row (SPLIT tokens each), C the most candidates that a row keeps in scratch memory.

One program per row would leave most of a GPU idle (60 rows of 128k tokens), so rows are split and joined by passes:
  _peaks   (R, S)  the best logit of each split, and its token (-1: the split has a nan).
  _survey  (R, S)  only where rows filter, or the distribution is to be described: how many tokens, and how much mass, lie
                   above each of 16 fixed pivot scores. The lowest pivot that surely holds all kept tokens is the row's cut.
  _race    (R, S)  without filters: the best score + noise of each split. With: the tokens above the cut become candidates.
  _finish  (R)     the best of the splits' bests; or the exact thresholds and the best kept candidate.
More than C tokens above the cut (a flat distribution): _finish goes through the whole row instead; slower, the same result.

Keys, masses and the search for thresholds: thresholds.py.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from eagle.kernels.noise.device import token_gumbel
from eagle.kernels.sample.reference import Choice
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.sample.thresholds import BEST_MASS, FINITE, among_all, among_candidates, key_of, load_scores, mass_of
from eagle.kernels.variants import TYPES, Variant

SPLIT, CANDIDATES, PIVOTS = 4096, 4096, 16
SURVEY_PIECE, RACE_PIECE, ROW_PIECE = 256, 1024, 1024  # tokens that a program works on at a time
_PIVOTS = tl.constexpr(PIVOTS)
# The noise lies between -3.14 and 22.88, and the best token's score is 0: what is below this cannot win.
_HOPELESS = tl.constexpr(-26.1)


@triton.jit
def _pivot_keys(i):
    """Ever wider steps down to a score of about -43; the last pivot holds every token that can be drawn."""
    step = (i + 1).to(tl.float32)
    pivots = step + step * step * step * 0.0078125
    return tl.where(i == _PIVOTS - 1, FINITE, pivots.to(tl.int32, bitcast=True))


@triton.jit
def _row_peak(Peaks, row, splits, SPLITS: tl.constexpr):
    s = tl.arange(0, SPLITS)
    return tl.max(tl.load(Peaks + row * splits + s, mask=s < splits, other=float("-inf")), 0)


@triton.jit
def _filters(TopK, TopP, LogMinP, Joint, b, vocab_size):
    """(k, p, key of the lowest score that min-p keeps, joint, any); k: vocab_size when off."""
    k = tl.load(TopK + b)
    k = tl.where((k > 0) & (k < vocab_size), k, vocab_size)
    p = tl.load(TopP + b)
    lowest = tl.minimum(key_of(tl.load(LogMinP + b)), FINITE)
    joint = tl.load(Joint + b) != 0
    return k, p, lowest, joint, (k < vocab_size) | (p < 1.0) | (lowest < FINITE)


@triton.jit
def _cut(Counts, Masses, Totals, row, splits, k, p, lowest, joint, vocab_size, SPLITS: tl.constexpr):
    """(pivot, its key, tokens up to it, mass of all tokens): every token that the filters keep is up to that pivot."""
    i, s = tl.arange(0, _PIVOTS), tl.arange(0, SPLITS)
    at = (row * splits + s)[:, None] * _PIVOTS + i[None, :]
    counts = tl.sum(tl.load(Counts + at, mask=(s < splits)[:, None], other=0), 0)
    masses = tl.sum(tl.load(Masses + at, mask=(s < splits)[:, None], other=0.0), 0)
    total = tl.sum(tl.load(Totals + row * splits + s, mask=s < splits, other=0), 0)
    last = i == _PIVOTS - 1
    goal = (
        p * (total.to(tl.float32) / BEST_MASS) * 1.00001
    )  # these masses are floats: a little more than the share is safe
    by_k = tl.min(tl.where((counts >= k) | last, i, _PIVOTS), 0)
    by_p = tl.min(tl.where((masses >= goal) | last, i, _PIVOTS), 0)
    by_min_p = tl.min(tl.where((_pivot_keys(i) >= lowest) | last, i, _PIVOTS), 0)
    # In sequence, top-p takes its share of what top-k left: all of that is needed.
    pivot = tl.where((k < vocab_size) & (joint == 0), by_k, tl.minimum(by_k, tl.minimum(by_p, by_min_p)))
    key = tl.sum(tl.where(i == pivot, _pivot_keys(i), 0), 0)
    return pivot, key, tl.sum(tl.where(i == pivot, counts, 0), 0), total


@triton.jit
def _peaks(Logits, Peaks, PeakTokens, stride, vocab_size, splits, SPLIT: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = split * SPLIT + tl.arange(0, SPLIT)
    logits = tl.load(Logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    nan = logits != logits
    peak, place = tl.max(tl.where(nan, float("-inf"), logits), 0, return_indices=True)
    tl.store(Peaks + row * splits + split, peak)
    tl.store(PeakTokens + row * splits + split, tl.where(tl.max(nan.to(tl.int32), 0) > 0, -1, split * SPLIT + place))


@triton.jit
def _survey(
    Logits, Peaks, Counts, Masses, Totals, Temperature,
    stride, vocab_size, splits, nodes, SPLIT: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(Temperature + row // nodes)
    if temperature > 0.0:
        peak = _row_peak(Peaks, row, splits, SPLITS)
        i = tl.arange(0, _PIVOTS)
        pivots = _pivot_keys(i)
        counts = tl.zeros([PIECE, _PIVOTS], tl.int32)
        masses = tl.zeros([PIECE, _PIVOTS], tl.float32)
        totals = tl.zeros([PIECE], tl.int64)
        first = split * SPLIT
        for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
            at = start + tl.arange(0, PIECE)
            scores = load_scores(Logits + row * stride, at, vocab_size, peak, temperature)
            above = key_of(scores)[:, None] <= pivots[None, :]
            counts += above.to(tl.int32)
            masses += tl.where(above, tl.exp(scores)[:, None], 0.0)
            totals += mass_of(scores)
        out = (row * splits + split) * _PIVOTS + i
        tl.store(Counts + out, tl.sum(counts, 0))
        tl.store(Masses + out, tl.sum(masses, 0))
        tl.store(Totals + row * splits + split, tl.sum(totals, 0))


@triton.jit
def _race(
    Logits, Peaks, Counts, Masses, Totals, Bests, BestTokens, CandidateScores, CandidateTokens,
    Temperature, TopK, TopP, LogMinP, Joint, Seeds, Positions,
    stride, vocab_size, splits, nodes, capacity,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // nodes
    temperature = tl.load(Temperature + b)
    if temperature > 0.0:
        peak = _row_peak(Peaks, row, splits, SPLITS)
        Row = Logits + row * stride
        lane, first = tl.arange(0, PIECE), split * SPLIT
        filters = False
        if FILTERED:
            k, p, lowest, joint, filters = _filters(TopK, TopP, LogMinP, Joint, b, vocab_size)
            if filters:
                pivot, key, count, _ = _cut(
                    Counts, Masses, Totals, row, splits, k, p, lowest, joint, vocab_size, SPLITS
                )
                if count <= capacity:
                    s = tl.arange(0, SPLITS)
                    before = tl.load(Counts + (row * splits + s) * _PIVOTS + pivot, mask=s < split, other=0)
                    slot = row * capacity + tl.sum(before, 0)
                    for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
                        scores = load_scores(Row, start + lane, vocab_size, peak, temperature)
                        above = key_of(scores) <= key
                        place = slot + tl.cumsum(above.to(tl.int32), 0) - 1
                        tl.store(CandidateScores + place, scores, mask=above)
                        tl.store(CandidateTokens + place, start + lane, mask=above)
                        slot += tl.sum(above.to(tl.int32), 0)
        if filters == 0:
            seed, position = tl.load(Seeds + b), tl.load(Positions + row).to(tl.int32)
            best = tl.full([PIECE], float("-inf"), tl.float32)
            token = tl.zeros([PIECE], tl.int32)
            for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
                scores = load_scores(Row, start + lane, vocab_size, peak, temperature)
                if tl.max(scores, 0) >= _HOPELESS:
                    noisy = scores + token_gumbel(seed, position, start, PIECE)
                    token = tl.where(noisy > best, start + lane, token)
                    best = tl.maximum(best, noisy)
            top = tl.max(best, 0)
            tl.store(Bests + row * splits + split, top)
            tl.store(BestTokens + row * splits + split, tl.min(tl.where(best == top, token, 0x7FFFFFFF), 0))


@triton.jit
def _best(Values, Tokens, row, splits, SPLITS: tl.constexpr):
    """The token of the largest value; among equals the lowest."""
    s = tl.arange(0, SPLITS)
    values = tl.load(Values + row * splits + s, mask=s < splits, other=float("-inf"))
    _, place = tl.max(values, 0, return_indices=True)
    return tl.load(Tokens + row * splits + place)


@triton.jit
def _finish(
    Logits, Peaks, PeakTokens, Counts, Masses, Totals, Bests, BestTokens, CandidateScores, CandidateTokens,
    Temperature, TopK, TopP, LogMinP, Joint, Seeds, Positions,
    OutTokens, OutPeaks, OutThresholds, OutTotals,
    stride, vocab_size, splits, nodes, capacity,
    SPLITS: tl.constexpr, CANDIDATES: tl.constexpr, PIECE: tl.constexpr, FILTERED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """capacity: at most CANDIDATES (a power of 2)."""
    row = tl.program_id(0).to(tl.int64)
    b = row // nodes
    temperature = tl.load(Temperature + b)
    peak = _row_peak(Peaks, row, splits, SPLITS)
    threshold = tl.full([], 0x7F800000, tl.int32)
    mass = tl.full([], 0, tl.int64)
    if temperature > 0.0:
        filters = False
        if FILTERED or DESCRIBED:
            k, p, lowest, joint, filters = _filters(TopK, TopP, LogMinP, Joint, b, vocab_size)
            _, _, count, mass = _cut(Counts, Masses, Totals, row, splits, k, p, lowest, joint, vocab_size, SPLITS)
        if FILTERED and filters:
            seed, position = tl.load(Seeds + b), tl.load(Positions + row).to(tl.int32)
            if count <= capacity:
                token, threshold, mass = among_candidates(
                    CandidateScores + row * capacity, CandidateTokens + row * capacity, count,
                    k, p, lowest, joint, mass, seed, position, vocab_size, CANDIDATES,
                )  # fmt: skip
            else:
                token, threshold, mass = among_all(
                    Logits + row * stride, peak, temperature,
                    k, p, lowest, joint, mass, seed, position, vocab_size, PIECE,
                )  # fmt: skip
        else:
            token = _best(Bests, BestTokens, row, splits, SPLITS)
    else:
        token = _best(Peaks, PeakTokens, row, splits, SPLITS)
    s = tl.arange(0, SPLITS)
    no_nan = tl.min(tl.load(PeakTokens + row * splits + s, mask=s < splits, other=0), 0) >= 0
    sound = no_nan & (peak > float("-inf")) & ((temperature == 0.0) | (peak < float("inf")))
    tl.store(OutTokens + row, tl.where(sound, token, -1).to(tl.int64))
    if DESCRIBED:
        tl.store(OutPeaks + row, tl.where(sound, peak, float("nan")))
        lowest_kept = -(threshold.to(tl.float32, bitcast=True))
        tl.store(OutThresholds + row, tl.where(temperature > 0.0, lowest_kept, 0.0))
        share = tl.where(temperature > 0.0, mass.to(tl.float32) / BEST_MASS, 1.0)
        tl.store(OutTotals + row, tl.log(share))


def launch(
    logits_RV: torch.Tensor, *, positions_R: torch.Tensor, settings: RowSettings, described: bool, capacity: int
) -> Choice:
    """See op.py, which has checked the arguments. described: False leaves all of the result but the tokens unwritten.
    capacity: candidates of a row kept in scratch memory, at most CANDIDATES."""
    rows, vocab_size = logits_RV.shape
    stride, device = logits_RV.stride(0), logits_RV.device
    splits = triton.cdiv(vocab_size, SPLIT)
    padded = triton.next_power_of_2(splits)
    nodes = rows // settings.rows
    surveyed = settings.filtered or described

    def scratch(*shape: int, dtype: torch.dtype, used: bool = True) -> torch.Tensor:
        return torch.empty(shape if used else (1,), dtype=dtype, device=device)

    peaks, peak_tokens = scratch(rows, splits, dtype=torch.float32), scratch(rows, splits, dtype=torch.int32)
    bests, best_tokens = scratch(rows, splits, dtype=torch.float32), scratch(rows, splits, dtype=torch.int32)
    counts = scratch(rows, splits, PIVOTS, dtype=torch.int32, used=surveyed)
    masses = scratch(rows, splits, PIVOTS, dtype=torch.float32, used=surveyed)
    totals = scratch(rows, splits, dtype=torch.int64, used=surveyed)
    candidate_scores = scratch(rows, capacity, dtype=torch.float32, used=settings.filtered)
    candidate_tokens = scratch(rows, capacity, dtype=torch.int32, used=settings.filtered)
    choice = Choice(
        tokens_R=scratch(rows, dtype=torch.int64),
        peaks_R=scratch(rows, dtype=torch.float32),
        thresholds_R=scratch(rows, dtype=torch.float32),
        log_totals_R=scratch(rows, dtype=torch.float32),
    )
    row_settings = (
        settings.temperature_B, settings.top_k_B, settings.top_p_B, settings.log_min_p_B, settings.joint_B, settings.seed_B,
    )  # fmt: skip
    grid = (rows, splits)
    _peaks[grid](logits_RV, peaks, peak_tokens, stride, vocab_size, splits, SPLIT=SPLIT, num_warps=4)
    if surveyed:
        _survey[grid](
            logits_RV, peaks, counts, masses, totals, settings.temperature_B,
            stride, vocab_size, splits, nodes, SPLIT=SPLIT, PIECE=SURVEY_PIECE, SPLITS=padded, num_warps=4,
        )  # fmt: skip
    _race[grid](
        logits_RV, peaks, counts, masses, totals, bests, best_tokens, candidate_scores, candidate_tokens,
        *row_settings, positions_R,
        stride, vocab_size, splits, nodes, capacity,
        SPLIT=SPLIT, PIECE=RACE_PIECE, SPLITS=padded, FILTERED=settings.filtered, num_warps=4,
    )  # fmt: skip
    _finish[(rows,)](
        logits_RV, peaks, peak_tokens, counts, masses, totals, bests, best_tokens, candidate_scores, candidate_tokens,
        *row_settings, positions_R, *choice,
        stride, vocab_size, splits, nodes, capacity,
        SPLITS=padded, CANDIDATES=CANDIDATES, PIECE=ROW_PIECE, FILTERED=settings.filtered, DESCRIBED=described, num_warps=16,
    )  # fmt: skip
    return choice


_TYPES = {
    **dict.fromkeys(("Peaks", "Masses", "Bests", "CandidateScores", "OutPeaks", "OutThresholds", "OutTotals"), "*fp32"),
    **dict.fromkeys(("Temperature", "TopP", "LogMinP"), "*fp32"),
    **dict.fromkeys(("PeakTokens", "BestTokens", "CandidateTokens", "Counts", "TopK", "Joint"), "*i32"),
    **dict.fromkeys(("Totals", "Seeds", "Positions", "OutTokens"), "*i64"),
    **dict.fromkeys(("stride", "vocab_size", "splits", "nodes", "capacity"), "i32"),
}


def variants() -> Iterator[Variant]:
    """Every version that `launch` can choose for vocabularies of 2^15 to 2^18 tokens."""
    for element, splits in product(TYPES.values(), (8, 16, 32, 64)):
        types = {**_TYPES, "Logits": f"*{element}"}
        split = {"SPLIT": SPLIT, "SPLITS": splits}
        versions = [("survey", _survey, {**split, "PIECE": SURVEY_PIECE}, 4)]
        if splits == 8:  # it does not depend on their number
            versions.append(("peaks", _peaks, {"SPLIT": SPLIT}, 4))
        for filtered in (False, True):
            flag = " filtered" * filtered
            versions.append((f"race{flag}", _race, {**split, "PIECE": RACE_PIECE, "FILTERED": filtered}, 4))
            for described in (False, True):
                constants = {"SPLITS": splits, "CANDIDATES": CANDIDATES, "PIECE": ROW_PIECE}
                constants |= {"FILTERED": filtered, "DESCRIBED": described}
                versions.append((f"finish{flag}{' described' * described}", _finish, constants, 16))
        for name, function, constants, warps in versions:
            names = [one for one in function.arg_names if one not in constants]
            yield Variant(
                kernel="sample",
                name=f"{name} {element}" + ("" if name == "peaks" else f" splits{splits}"),
                function=function,
                types={one: types[one] for one in names},
                constants=constants,
                divisible=frozenset(one for one in names if one[0].isupper()),
                num_warps=warps,
                no_spills=True,
                representative=element == "bf16"
                and (splits == 32 or name == "peaks")
                and name in ("peaks", "survey", "race", "race filtered", "finish filtered described"),
            )
