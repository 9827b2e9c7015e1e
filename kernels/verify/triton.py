"""Verification of draft trees in Triton, without waiting for the device.

B rows, N nodes, R = B * N, V vocabulary, S splits of a row of logits, A attempts (the most children of a node), E nodes whose
q is recorded. The rules are eagle/verify/coupled.py's coupled walk and eagle/verify/rejection.py's rejection.

_walk (B): follow each node's emitted token, or its accepted child, from the root down.

Rejection: a node's coins depend on its position and attempt alone, so all nodes decide at once, and the walk comes after.
  _attempt (R, S), once per attempt: is the node's next child accepted? Else each split sums what the rejection leaves.
  _weigh (R, S), _draw (R): the token of a node without an accepted child: the final coin's place in the cumulated weights.
What is left of p after some rejections is never stored: it is computed anew for every token from p, q and the totals of the
earlier rejections (`_rest`). Sums are float64: the cancellation in max(0, r - q) wants no further rounding.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from eagle.kernels.noise.device import coin
from eagle.kernels.sample.reference import Choice
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.variants import TYPES, Variant
from eagle.kernels.verify.reference import Decisions, Tree, Walks

SPLIT, PIECE = 4096, 512
LARGEST_TREE = 256
REGISTERS = 96  # left to itself, ptxas aims lower for some versions and spills a word
COINS, FINALS = tl.constexpr(1), tl.constexpr(3)  # streams of noise/reference.py


@triton.jit
def _walk(
    Tokens, Parents, Emitted, Followers, Path, Counts, OutTokens, AtLeaf,
    nodes, width, NODES: tl.constexpr, MATCH: tl.constexpr,
):  # fmt: skip
    """MATCH: a node's follower is its child with the emitted token; else Followers says which."""
    b = tl.program_id(0)
    j = tl.arange(0, NODES)
    tokens = tl.load(Tokens + b * nodes + j, mask=j < nodes, other=-1)
    parents = tl.load(Parents + b * nodes + j, mask=j < nodes, other=-1)
    node, count = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    following = node
    while (following >= 0) & (count < width):
        node = following
        token = tl.load(Emitted + b * nodes + node)
        tl.store(Path + b * width + count, node.to(tl.int64))
        tl.store(OutTokens + b * width + count, token)
        if MATCH:
            following = tl.max(tl.where((parents == node) & (tokens == token), j, -1), 0)
        else:
            following = tl.load(Followers + b * nodes + node).to(tl.int32)
        count += 1
    tl.store(Counts + b, count.to(tl.int64))
    tl.store(AtLeaf + b, tl.max((parents == node).to(tl.int32), 0) == 0)


@triton.jit
def _target(Logits, stride, row, temperature, Chosen, Peaks, Thresholds, LogTotals, at, vocab_size):
    """p of the tokens `at`. float32."""
    logits = tl.load(Logits + row * stride + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0.0:
        scores = tl.div_rn(logits - tl.load(Peaks + row), temperature)
        kept = (scores >= tl.load(Thresholds + row)) & (scores > float("-inf"))
        p = tl.where(kept, tl.exp(scores - tl.load(LogTotals + row)), 0.0)
    else:
        p = tl.where(at == tl.load(Chosen + row), 1.0, 0.0)
    return p


@triton.jit
def _draft(LogQ, QRows, row, b, recorded, at, vocab_size, SAMPLED: tl.constexpr):
    """q of the tokens `at`; 0 for a node without a record. float32."""
    if SAMPLED:
        place = tl.load(QRows + row)
        here = at < tl.where(place >= 0, vocab_size, 0)
        log_q = tl.load(LogQ + (b * recorded + place) * vocab_size + at, mask=here, other=float("-inf"))
        q = tl.exp(log_q)
    else:
        q = tl.zeros(at.shape, tl.float32)
    return q


@triton.jit
def _sum(Sums, row, i, attempts, splits, SPLITS: tl.constexpr):
    s = tl.arange(0, SPLITS)
    return tl.sum(tl.load(Sums + (row * attempts + i) * splits + s, mask=s < splits, other=0.0), 0)


@triton.jit
def _share(Rests, row, last, attempts, splits, SPLITS: tl.constexpr):
    """What q without the rejected is multiplied with to have mass 1 again. last: the last rejection (-1: none)."""
    share = tl.full([], 1.0, tl.float32)
    if last >= 0:
        share = 1.0 / tl.maximum(_sum(Rests, row, last, attempts, splits, SPLITS).to(tl.float32), 1e-30)
    return share


@triton.jit
def _rest(
    p, q, at, Rejected, Lefts, Rests, row, count, attempts, splits, SPLITS: tl.constexpr, SAMPLED: tl.constexpr
):  # fmt: skip
    """(r, q without the rejected, the last rejection) of the tokens `at` after `count` attempts. q is not renormalised."""
    last = tl.full([], -1, tl.int32)
    for i in range(count):
        token = tl.load(Rejected + row * attempts + i)
        if token >= 0:
            left = _sum(Lefts, row, i, attempts, splits, SPLITS)
            if left > 0.0:  # nothing left can only be a rounding error
                if SAMPLED:
                    share = _share(Rests, row, last, attempts, splits, SPLITS)
                    less = tl.maximum(p - q * share, 0.0)
                else:
                    less = tl.where(at == token, 0.0, p)
                p = less / left.to(tl.float32)
            q = tl.where(at == token, 0.0, q)
            last = i
    return p, q, last


@triton.jit
def _attempt(
    Logits, Temperature, Seeds, Positions, Chosen, Peaks, Thresholds, LogTotals,
    Tokens, Parents, LogQ, QRows, Rejected, Lefts, Rests, Followers,
    stride, vocab_size, nodes, recorded, attempts, splits, attempt,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, NODES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Rejected [R, A]: the child's token, -1 where none was tried. Lefts, Rests [R, A, S]: sums of r and q after it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // nodes
    j = tl.arange(0, NODES)
    ours = tl.load(Parents + b * nodes + j, mask=j < nodes, other=-1) == row - b * nodes
    child = tl.max(tl.where(ours & (tl.cumsum(ours.to(tl.int32), 0) - 1 == attempt), j, -1), 0)
    if (child >= 0) & (tl.load(Followers + row) < 0) & (tl.load(Chosen + row) >= 0):
        temperature = tl.load(Temperature + b)
        token = tl.load(Tokens + b * nodes + child)
        one = token + tl.arange(0, 1)
        p_x = _target(Logits, stride, row, temperature, Chosen, Peaks, Thresholds, LogTotals, one, vocab_size)
        q_x = _draft(LogQ, QRows, row, b, recorded, one, vocab_size, SAMPLED)
        r_x, q_x, last = _rest(p_x, q_x, one, Rejected, Lefts, Rests, row, attempt, attempts, splits, SPLITS, SAMPLED)
        share = _share(Rests, row, last if SAMPLED else -1, attempts, splits, SPLITS)
        drafted = tl.max(q_x, 0) * share if SAMPLED else share
        if drafted > 0.0:  # else a filler: q had fewer tokens than children were wanted
            toss = coin(tl.load(Seeds + b), tl.load(Positions + row).to(tl.int32), attempt, COINS)
            if toss * drafted.to(tl.float64) < tl.max(r_x, 0).to(tl.float64):
                tl.store(Followers + row, child.to(tl.int64))
            else:
                left = tl.zeros([PIECE], tl.float64)
                rest = tl.zeros([PIECE], tl.float64)
                first = split * SPLIT
                for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
                    at = start + tl.arange(0, PIECE)
                    p = _target(Logits, stride, row, temperature, Chosen, Peaks, Thresholds, LogTotals, at, vocab_size)
                    q = _draft(LogQ, QRows, row, b, recorded, at, vocab_size, SAMPLED)
                    r, q, _ = _rest(p, q, at, Rejected, Lefts, Rests, row, attempt, attempts, splits, SPLITS, SAMPLED)
                    if SAMPLED:
                        left += tl.maximum(r - q * share, 0.0).to(tl.float64)
                        rest += tl.where(at == token, 0.0, q).to(tl.float64)
                    else:
                        left += tl.where(at == token, 0.0, r).to(tl.float64)
                place = (row * attempts + attempt) * splits + split
                tl.store(Lefts + place, tl.sum(left, 0))
                if SAMPLED:
                    tl.store(Rests + place, tl.sum(rest, 0))
                tl.store(Rejected + row * attempts + attempt, token)


@triton.jit
def _weigh(
    Logits, Temperature, Chosen, Peaks, Thresholds, LogTotals, LogQ, QRows, Rejected, Lefts, Rests, Followers, Weights,
    stride, vocab_size, nodes, recorded, attempts, splits,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Weights [R, S]: sums of what the last rejection left."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // nodes
    if tl.load(Followers + row) < 0:
        temperature = tl.load(Temperature + b)
        weight = tl.zeros([PIECE], tl.float64)
        first = split * SPLIT
        for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
            at = start + tl.arange(0, PIECE)
            p = _target(Logits, stride, row, temperature, Chosen, Peaks, Thresholds, LogTotals, at, vocab_size)
            q = _draft(LogQ, QRows, row, b, recorded, at, vocab_size, SAMPLED)
            r, _, _ = _rest(p, q, at, Rejected, Lefts, Rests, row, attempts, attempts, splits, SPLITS, SAMPLED)
            weight += r.to(tl.float64)
        tl.store(Weights + row * splits + split, tl.sum(weight, 0))


@triton.jit
def _draw(
    Logits, Temperature, Seeds, Positions, Chosen, Peaks, Thresholds, LogTotals,
    Tokens, LogQ, QRows, Rejected, Lefts, Rests, Followers, Weights, Emitted,
    stride, vocab_size, nodes, recorded, attempts, splits,
    SPLIT: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // nodes
    follower = tl.load(Followers + row)
    if follower >= 0:
        tl.store(Emitted + row, tl.load(Tokens + b * nodes + follower))
    else:
        s = tl.arange(0, SPLITS)
        weights = tl.load(Weights + row * splits + s, mask=s < splits, other=0.0)
        upto = tl.cumsum(weights, 0)
        goal = coin(tl.load(Seeds + b), tl.load(Positions + row).to(tl.int32), 0, FINALS) * tl.max(upto, 0)
        split = tl.min(tl.where(upto > goal, s, SPLITS), 0)  # the split that the goal falls into
        passed = tl.sum(tl.where(s < split, weights, 0.0), 0)
        temperature = tl.load(Temperature + b)
        chosen = tl.full([], 0x7FFFFFFF, tl.int32)
        last = tl.full([], 0, tl.int32)  # the last token with a weight, should rounding let the goal slip by
        first = split * SPLIT
        for start in range(first, tl.minimum(first + SPLIT, vocab_size), PIECE):
            at = start + tl.arange(0, PIECE)
            p = _target(Logits, stride, row, temperature, Chosen, Peaks, Thresholds, LogTotals, at, vocab_size)
            q = _draft(LogQ, QRows, row, b, recorded, at, vocab_size, SAMPLED)
            r, _, _ = _rest(p, q, at, Rejected, Lefts, Rests, row, attempts, attempts, splits, SPLITS, SAMPLED)
            heap = passed + tl.cumsum(r.to(tl.float64), 0)
            over = (heap > goal) & (r > 0.0)
            chosen = tl.minimum(chosen, tl.min(tl.where(over, at, 0x7FFFFFFF), 0))
            last = tl.maximum(last, tl.max(tl.where(r > 0.0, at, 0), 0))
            passed += tl.sum(r.to(tl.float64), 0)
        drawn = tl.where(chosen == 0x7FFFFFFF, last, chosen).to(tl.int64)
        tl.store(Emitted + row, tl.where(tl.load(Chosen + row) < 0, -1, drawn))


def launch_walk(*, tree: Tree, emitted_BN: torch.Tensor, followers_BN: torch.Tensor | None, width: int) -> Walks:
    """See op.walk, which has checked the arguments."""
    rows, nodes = emitted_BN.shape
    walks = Walks(
        path_BK=emitted_BN.new_zeros(rows, width),
        counts_B=emitted_BN.new_empty(rows),
        tokens_BK=emitted_BN.new_full((rows, width), -1),
        at_leaf_B=torch.empty(rows, dtype=torch.bool, device=emitted_BN.device),
    )
    _walk[(rows,)](
        tree.tokens_BN, tree.parents_BN, emitted_BN, emitted_BN if followers_BN is None else followers_BN, *walks,
        nodes, width, NODES=_padded(nodes), MATCH=followers_BN is None, num_warps=1,
    )  # fmt: skip
    return walks


def launch_decide(
    logits_RV: torch.Tensor,
    *,
    tree: Tree,
    choice: Choice,
    positions_R: torch.Tensor,
    settings: RowSettings,
    most_children: int,
) -> Decisions:
    """See op.decide, which has checked the arguments."""
    (rows, vocab_size), device = logits_RV.shape, logits_RV.device
    nodes = tree.tokens_BN.shape[1]
    splits, attempts = triton.cdiv(vocab_size, SPLIT), max(1, most_children)
    recorded = 0 if tree.log_q_BEV is None else tree.log_q_BEV.shape[1]
    sampled = tree.log_q_BEV is not None
    lefts, rests = (torch.empty(rows, attempts, splits, dtype=torch.float64, device=device) for _ in range(2))
    weights = torch.empty(rows, splits, dtype=torch.float64, device=device)
    rejected = torch.full((rows, attempts), -1, dtype=torch.int64, device=device)
    decisions = Decisions(torch.empty_like(tree.tokens_BN), torch.full_like(tree.tokens_BN, -1))
    log_q, q_rows = (tree.log_q_BEV, tree.q_row_BN) if sampled else (weights, rejected)
    described = (choice.tokens_R, choice.peaks_R, choice.thresholds_R, choice.log_totals_R)
    chance = (settings.seed_B, positions_R)
    state = (rejected, lefts, rests, decisions.followers_BN)
    sizes = (logits_RV.stride(0), vocab_size, nodes, recorded, attempts, splits)
    shape: dict[str, Any] = {"SPLIT": SPLIT, "PIECE": PIECE, "SPLITS": _padded(splits), "SAMPLED": sampled}
    for attempt in range(most_children):
        _attempt[(rows, splits)](
            logits_RV, settings.temperature_B, *chance, *described,
            tree.tokens_BN, tree.parents_BN, log_q, q_rows, *state, *sizes, attempt,
            **shape, NODES=_padded(nodes), maxnreg=REGISTERS,
        )  # fmt: skip
    _weigh[(rows, splits)](
        logits_RV,
        settings.temperature_B,
        *described,
        log_q,
        q_rows,
        *state,
        weights,
        *sizes,
        **shape,
        maxnreg=REGISTERS,
    )
    _draw[(rows,)](
        logits_RV, settings.temperature_B, *chance, *described, tree.tokens_BN, log_q, q_rows, *state, weights,
        decisions.emitted_BN, *sizes, **shape, maxnreg=REGISTERS,
    )  # fmt: skip
    return decisions


def _padded(count: int) -> int:
    return max(2, triton.next_power_of_2(count))


_TYPES = {
    **dict.fromkeys(("Tokens", "Parents", "Emitted", "Followers", "Path", "Counts", "OutTokens"), "*i64"),
    **dict.fromkeys(("Seeds", "Positions", "Chosen", "QRows", "Rejected"), "*i64"),
    **dict.fromkeys(("Temperature", "Peaks", "Thresholds", "LogTotals", "LogQ"), "*fp32"),
    **dict.fromkeys(("Lefts", "Rests", "Weights"), "*fp64"),
    **dict.fromkeys(["nodes", "width", "stride", "vocab_size", "recorded", "attempts", "splits", "attempt"], "i32"),
    "AtLeaf": "*i1",
}


def variants() -> Iterator[Variant]:
    """Every version that the launchers can choose for vocabularies of 2^15 to 2^18 tokens."""
    versions: list[tuple[str, Any, dict[str, Any], str, bool]] = [
        (
            f"walk{' by token' * match} nodes{nodes}",
            _walk,
            {"NODES": nodes, "MATCH": match},
            "fp32",
            nodes == 64 and match,
        )
        for nodes, match in product((16, 32, 64, 128, 256), (False, True))
    ]
    for element, splits, sampled in product(TYPES.values(), (8, 16, 32, 64), (False, True)):
        shape = {"SPLIT": SPLIT, "PIECE": PIECE, "SPLITS": splits, "SAMPLED": sampled}
        name = f"{element} splits{splits}{' sampled' * sampled}"
        typical = element == "bf16" and splits == 32 and sampled
        versions.append((f"weigh {name}", _weigh, shape, element, False))
        versions.append((f"draw {name}", _draw, shape, element, typical))
        for nodes in (16, 64, 256):
            versions.append(
                (f"attempt {name} nodes{nodes}", _attempt, {**shape, "NODES": nodes}, element, typical and nodes == 64)
            )
    for name, function, constants, element, representative in versions:
        types = {**_TYPES, "Logits": f"*{element}"}
        names = [one for one in function.arg_names if one not in constants]
        yield Variant(
            kernel="verify",
            name=name,
            function=function,
            types={one: types[one] for one in names},
            constants=constants,
            divisible=frozenset(one for one in names if one[0].isupper()),
            num_warps=1 if function is _walk else 4,
            options={} if function is _walk else {"maxnreg": REGISTERS},
            no_spills=True,
            representative=representative,
        )
