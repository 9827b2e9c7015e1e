"""What any dynamic tree would have accepted, replayed exactly from one recording.

At every position of texts that the target wrote, the head drafts once, so widely that the trees of every top_k and depth in
question lie inside. Under the coupled rule the text does not depend on the trees, and a node is accepted exactly when its
path is what the text says: so decoding with another tree need not be run, only walked.

P positions (all rows' one after the other), M candidate nodes, R choices of top_k, D levels, B rows.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import LevelDrafter, pick
from eagle.draft.tuning import TreeSettings
from eagle.eval.tuner.calibration import ConfidenceCounts
from eagle.kernels.tree_attention.reference import own_bits
from eagle.sample.row import Row
from eagle.target.attention import TreeStep
from eagle.target.target import Target

NEVER = 32767
"""`Replay.needed` of what no budget holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """The recording, boiled down to what trees of any size need."""

    top_ks: tuple[int, ...]
    """R choices"""
    depth: int
    """D"""
    rows: tuple[int, ...]
    """Positions of each row"""
    needed_PRDD: np.ndarray
    """int16 [position, top_k, levels - 1, j]: the smallest budget of a tree with that many levels that holds the first j + 1
    tokens of what the text says next."""
    gains_PRD: np.ndarray
    """float32 [position, top_k, l - 1]: what level l + 1 can be expected to add (DynamicTree's test against level_cost)."""

    def levels(self, tree: TreeSettings) -> np.ndarray:
        """int64 [P]: levels drafted at every position."""
        full = np.full(len(self.gains_PRD), tree.depth)
        if tree.level_cost == 0 or tree.depth == 1:
            return full
        below_PL = self.gains_PRD[:, self.top_ks.index(tree.top_k), : tree.depth - 1] < tree.level_cost
        return np.where(below_PL.any(axis=1), 1 + below_PL.argmax(axis=1), full)

    def accepted(self, tree: TreeSettings) -> np.ndarray:
        """int64 [P]: drafts accepted by a verify step at every position. top_k is one of the choices, depth at most D."""
        levels_P = self.levels(tree)
        needed_PD = self.needed_PRDD[np.arange(len(levels_P)), self.top_ks.index(tree.top_k), levels_P - 1]
        return np.asarray((needed_PD <= tree.budget).sum(axis=1))

    def steps(self, tree: TreeSettings) -> list[list[int]]:
        """Positions at which decoding every row with the tree would verify."""
        accepted = self.accepted(tree).tolist()
        found, start = [], 0
        for count in self.rows:
            visited, place = [], start
            while place < start + count:
                visited.append(place)
                place += accepted[place] + 1
            found.append(visited)
            start += count
        return found

    def outcome(self, tree: TreeSettings) -> "Outcome":
        steps = list(itertools.chain.from_iterable(self.steps(tree)))
        levels = self.levels(tree)[steps]
        k = tree.top_k
        nodes = np.minimum(tree.budget, 1 + k + (levels - 1) * k * k)
        return Outcome(tau=sum(self.rows) / len(steps), levels=levels, nodes=nodes)

    def half(self, which: int) -> "Replay":
        """The rows of even (0) or odd (1) number."""
        ends = np.cumsum([0, *self.rows])
        rows = range(which, len(self.rows), 2)
        places = np.concatenate([np.arange(ends[r], ends[r + 1]) for r in rows])
        return dataclasses.replace(
            self,
            rows=tuple(self.rows[r] for r in rows),
            needed_PRDD=self.needed_PRDD[places],
            gains_PRD=self.gains_PRD[places],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A tree's decoding of the recorded texts. S verify steps."""

    tau: float
    """Tokens per verify step that reach the text (trimmed at its end)."""
    levels: np.ndarray
    """[S] levels drafted"""
    nodes: np.ndarray
    """[S] nodes verified, the root included"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wide:
    """One position's candidates for B rows. Parents come first."""

    tokens_BM: torch.Tensor
    scores_BM: torch.Tensor
    parents_BM: torch.Tensor
    """Place among the candidates; -1: the root"""
    levels_M: torch.Tensor
    """1 .. D"""
    members_RBM: torch.Tensor
    """bool: candidates of the dynamic tree with the r-th top_k"""
    gains_RBD: torch.Tensor


def record(
    target: Target,
    drafter: HeadDrafter,
    rows: Sequence[Row],
    texts: Sequence[Sequence[int]],
    *,
    top_ks: Sequence[int],
    depth: int,
    counts: ConfidenceCounts,
) -> Replay:
    """Drafts at every position of the rows' texts (what the target said behind each row's tokens; two tokens or more).

    The rows' tokens are the prompts, and grow to hold the texts. counts: takes every candidate node's confidence and fate.
    """
    static, drafter.static = drafter.static, None  # levels' widths vary: no shape comes again
    try:
        return _record(target, drafter, rows, texts, tuple(top_ks), depth, counts)
    finally:
        drafter.static = static


def _record(
    target: Target,
    drafter: HeadDrafter,
    rows: Sequence[Row],
    texts: Sequence[Sequence[int]],
    top_ks: tuple[int, ...],
    depth: int,
    counts: ConfidenceCounts,
) -> Replay:
    prompts = [len(row.tokens) for row in rows]
    states_BTX = _states(target, drafter, rows, texts)
    longest, recorded = max(map(len, texts)), []
    next_BT = torch.zeros(len(rows), max(prompts), dtype=torch.int64)
    for b, (row, text) in enumerate(zip(rows, texts)):
        next_BT[b, : prompts[b]] = torch.tensor([*row.tokens[1:], text[0]])
        row.tokens.append(text[0])
    drafter.reset(rows, capacity=max(prompts) + longest)
    drafter.observe(states_BTX[:, : max(prompts)], next_BT, torch.tensor(prompts))
    each_B, ones_B = torch.arange(len(rows)), torch.ones(len(rows), dtype=torch.int64)
    padded_BT = torch.tensor([[*text, *[-1] * (longest + depth - len(text))] for text in texts])
    for place in range(longest - 1):
        wide = _grow(drafter, top_ks, depth)
        recorded.append(_boil(wide, padded_BT[:, place + 1 : place + 1 + depth], counts, depth))
        next_B = padded_BT[:, place + 1].clamp_min(0)
        at_B = torch.tensor([min(p + place, p + len(text) - 1) for p, text in zip(prompts, texts)])
        for row, token in zip(rows, next_B.tolist()):
            row.sampler.forget_before(len(row.tokens))
            row.tokens.append(token)
        drafter.observe(states_BTX[each_B, at_B][:, None], next_B[:, None], ones_B)
    lengths = tuple(len(text) - 1 for text in texts)
    return Replay(
        top_ks=top_ks,
        depth=depth,
        rows=lengths,
        needed_PRDD=np.concatenate([np.stack([n[b] for n, _ in recorded[:t]]) for b, t in enumerate(lengths)]),
        gains_PRD=np.concatenate([np.stack([g[b] for _, g in recorded[:t]]) for b, t in enumerate(lengths)]),
    )


def joined(replays: Sequence[Replay]) -> Replay:
    """Several batches' recordings as one."""
    return dataclasses.replace(
        replays[0],
        rows=tuple(itertools.chain.from_iterable(one.rows for one in replays)),
        needed_PRDD=np.concatenate([one.needed_PRDD for one in replays]),
        gains_PRD=np.concatenate([one.gains_PRD for one in replays]),
    )


def _states(target: Target, drafter: HeadDrafter, rows: Sequence[Row], texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[B, T, X]: what the drafter is shown of every token of prompts and texts."""
    ids = [torch.tensor([*row.tokens, *text]) for row, text in zip(rows, texts)]
    ids_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    cache = target.new_cache(rows=len(rows), capacity=ids_BT.shape[1])
    states = target.prefill(ids_BT, torch.tensor([len(one) for one in ids]), cache, drafter.aux_layers)
    if not drafter.aux_layers:
        return states.features_BNH
    assert states.aux_BNA is not None
    return states.aux_BNA


@torch.inference_mode()
def _grow(draft: LevelDrafter, top_ks: tuple[int, ...], depth: int) -> _Wide:
    """Every candidate of the dynamic trees of all top_ks (eagle/draft/dynamic_tree.py): their beams' union is expanded."""
    rows, K = len(draft.roots_B), max(top_ks)
    ranks_K = torch.arange(K)
    tokens_BM, scores_BM = _children(draft, draft.predicted_BH[:, None], torch.zeros(rows, 1), depth=1, count=K)
    members_RBM = torch.stack([(ranks_K < k).expand(rows, -1) for k in top_ks])
    beams_RBM, parts = members_RBM, [(tokens_BM, scores_BM, torch.full((rows, K), -1), members_RBM)]
    width = 1 + sum(top_ks) * depth // 64
    gains, first, offset = [], 0, 0
    kept_BW = torch.arange(K).expand(rows, -1)
    features = draft.predicted_BH[:, None].expand(-1, K, -1)
    bits = own_bits(K, width, start=0).expand(rows, -1, -1)
    column_depths = torch.zeros(0, dtype=torch.int64)
    for level in range(1, depth):
        gains.append(torch.where(beams_RBM, scores_BM.exp(), 0.0).sum(-1))
        W = kept_BW.shape[1]
        column_depths = torch.cat([column_depths, torch.full((W,), level - 1)])
        step = TreeStep(
            lengths_B=draft.cache.lengths_B,
            depths_BN=torch.full((rows, W), level - 1),
            ancestors_BNW=bits,
            column_depths_BC=column_depths.expand(rows, -1),
            offset=offset,
        )
        beam_scores = scores_BM.gather(1, kept_BW)
        predictions = draft.run(features, tokens_BM.gather(1, kept_BW), step)
        parents_BM = (first + kept_BW).repeat_interleave(K, dim=1)
        in_beam_RBM = beams_RBM.gather(2, kept_BW.expand(len(top_ks), -1, -1)).repeat_interleave(K, dim=2)
        first, offset = first + tokens_BM.shape[1], offset + W
        tokens_BM, scores_BM = _children(draft, predictions, beam_scores, depth=level + 1, count=K)
        rank_M = ranks_K.repeat(W)
        members_RBM = torch.stack([in_beam_RBM[r] & (rank_M < k) for r, k in enumerate(top_ks)])
        parts.append((tokens_BM, scores_BM, parents_BM, members_RBM))
        beams_RBM = torch.zeros_like(members_RBM)
        for r, k in enumerate(top_ks):
            best = scores_BM.masked_fill(~members_RBM[r], -torch.inf).topk(k, dim=1).indices
            beams_RBM[r].scatter_(1, best, True)
        union_BM = beams_RBM.any(0)
        widest = int(union_BM.sum(1).max())
        kept_BW = (scores_BM + union_BM * 1e6).topk(widest, dim=1).indices.sort(dim=1).values
        features, bits = pick(predictions, kept_BW // K), pick(bits, kept_BW // K)
        bits = bits | own_bits(widest, width, start=offset)
    tokens, scores, parents, members = (torch.cat(one, dim=-1) for one in zip(*parts))
    sizes = torch.tensor([part[0].shape[1] for part in parts])
    return _Wide(
        tokens_BM=tokens,
        scores_BM=scores,
        parents_BM=parents,
        levels_M=torch.arange(1, depth + 1).repeat_interleave(sizes),
        members_RBM=members,
        gains_RBD=torch.stack(gains, dim=-1) if gains else torch.zeros(len(top_ks), rows, 0),
    )


def _children(
    draft: LevelDrafter, predictions: torch.Tensor, scores: torch.Tensor, *, depth: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, child_scores = draft.children(predictions, scores, depth=depth, count=count)
    return tokens.cpu(), child_scores.cpu()


def _boil(wide: _Wide, text_BD: torch.Tensor, counts: ConfidenceCounts, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """(needed int16 [B, R, D, D], gains float32 [B, R, D - 1]) of one position; text_BD: what comes next (-1: the end)."""
    rows, M = wide.tokens_BM.shape
    R = len(wide.members_RBM)
    needed_BRDD = np.full((rows, R, depth, depth), NEVER, dtype=np.int16)
    on_text_BM = torch.zeros(rows, M + 1, dtype=torch.bool)  # the last place, -1, is the root's
    on_text_BM[:, -1] = True
    below = torch.tensor([int((wide.levels_M <= levels).sum()) for levels in range(1, depth + 1)])
    for j, place_M in enumerate(_by_level(wide.levels_M, depth)):
        above_BM = on_text_BM.gather(1, wide.parents_BM[:, place_M] % (M + 1))
        on_text_BM[:, place_M] = above_BM & (wide.tokens_BM[:, place_M] == text_BD[:, j : j + 1])
        found_B = on_text_BM[:, place_M].any(1)
        node_B = place_M[0] + on_text_BM[:, place_M].int().argmax(1)
        score_B1 = wide.scores_BM.gather(1, node_B[:, None])
        before_BM = (wide.scores_BM > score_B1) | (
            (wide.scores_BM == score_B1) & (torch.arange(M) < node_B[:, None])
        )  # as in a stable sort by descending confidence
        ahead_RBM = (before_BM & wide.members_RBM).int().cumsum(-1)
        member_RB = wide.members_RBM.gather(2, node_B.expand(R, -1)[..., None])[..., 0] & found_B
        for levels in range(j + 1, depth + 1):
            rank_RB = ahead_RBM[..., below[levels - 1] - 1]
            needed_BRDD[:, :, levels - 1, j] = torch.where(member_RB, rank_RB + 2, NEVER).T.numpy()
    ended_B = (text_BD[:, 0] < 0).numpy()
    known = ~ended_B
    # A node beyond the text's end has no fate.
    judged_BM = (text_BD >= 0)[:, wide.levels_M - 1] & torch.from_numpy(known)[:, None]
    counts.add(wide.scores_BM[judged_BM].numpy(), on_text_BM[:, :-1][judged_BM].numpy())
    return needed_BRDD, wide.gains_RBD.permute(1, 0, 2).float().numpy()


def _by_level(levels_M: torch.Tensor, depth: int) -> Iterator[torch.Tensor]:
    for level in range(1, depth + 1):
        yield (levels_M == level).nonzero()[:, 0]
