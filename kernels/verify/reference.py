"""Verification of draft trees in plain PyTorch: the judge of the Triton version. Rules: coupled.py, rejection.py in eagle/verify.

B rows, N nodes, R = B * N, V vocabulary, E nodes whose q is recorded, K the most nodes of a path. Parents come before their
children, node 0 is the root.
"""

from typing import NamedTuple

import torch

from eagle.kernels.noise.reference import FINALS, coin
from eagle.kernels.sample.reference import NOTHING, Choice, scores
from eagle.kernels.sample.settings import RowSettings


class Walks(NamedTuple):
    """What every row's verification accepted."""

    path_BK: torch.Tensor
    """int64: visited nodes, the root first; 0 behind the last."""
    counts_B: torch.Tensor
    """int64: visited nodes, and emitted tokens."""
    tokens_BK: torch.Tensor
    """int64: emitted tokens: those of the visited nodes without the root's, and the last one (NOTHING: none can be chosen at
    the last node); -1 behind them."""
    at_leaf_B: torch.Tensor
    """bool: the walk ended at a leaf (bonus token); else it left the tree (correction)."""


class Decisions(NamedTuple):
    """What the rejection rule does at every node, visited or not: nodes decide by coins of their own."""

    emitted_BN: torch.Tensor
    """int64: the accepted child's token, or the one drawn in its place; NOTHING where none can be."""
    followers_BN: torch.Tensor
    """int64: the accepted child, -1: none."""


class Tree(NamedTuple):
    """The draft trees, on the device of the logits. See eagle/draft/tree.py's DraftTree."""

    tokens_BN: torch.Tensor
    """int64."""
    parents_BN: torch.Tensor
    """int64, -1 for the root."""
    log_q_BEV: torch.Tensor | None = None
    """float32; None: the children were chosen without chance (the deterministic top-k)."""
    q_row_BN: torch.Tensor | None = None
    """int64: a node's place in log_q_BEV."""


def walk_reference(*, tree: Tree, emitted_BN: torch.Tensor, followers_BN: torch.Tensor | None, width: int) -> Walks:
    """As op.walk."""
    rows = len(emitted_BN)
    path_BK, tokens_BK = torch.zeros(rows, width, dtype=torch.int64), torch.full((rows, width), -1)
    counts, at_leaf = [], []
    for b in range(rows):
        parents, tokens, emitted = tree.parents_BN[b].tolist(), tree.tokens_BN[b].tolist(), emitted_BN[b].tolist()
        if followers_BN is None:
            child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens)) if parent >= 0}
            followers = [child.get((node, token), -1) for node, token in enumerate(emitted)]
        else:
            followers = followers_BN[b].tolist()
        path = [0]
        while followers[path[-1]] >= 0 and len(path) < width:
            path.append(followers[path[-1]])
        path_BK[b, : len(path)] = torch.tensor(path)
        tokens_BK[b, : len(path)] = torch.tensor([emitted[node] for node in path])
        counts.append(len(path))
        at_leaf.append(path[-1] not in parents)
    device = emitted_BN.device
    return Walks(
        path_BK.to(device), torch.tensor(counts).to(device), tokens_BK.to(device), torch.tensor(at_leaf).to(device)
    )


def decide_reference(
    logits_RV: torch.Tensor, *, tree: Tree, choice: Choice, positions_R: torch.Tensor, settings: RowSettings
) -> Decisions:
    """As op.decide."""
    rows, nodes = tree.tokens_BN.shape
    p_RV = probabilities(logits_RV, choice, settings)
    emitted_BN, followers_BN = torch.zeros_like(tree.tokens_BN), torch.full_like(tree.tokens_BN, -1)
    for b in range(rows):
        seed, parents, tokens = int(settings.seed_B[b]) & (2**64 - 1), tree.parents_BN[b].tolist(), tree.tokens_BN[b]
        for node in range(nodes):
            position = int(positions_R[b * nodes + node])
            if choice.tokens_R[b * nodes + node] == NOTHING:
                emitted_BN[b, node] = NOTHING
                continue
            rest_V, q_V = p_RV[b * nodes + node], None
            children = [child for child in range(nodes) if parents[child] == node]
            if tree.log_q_BEV is not None and tree.q_row_BN is not None and children:
                q_V = tree.log_q_BEV[b, int(tree.q_row_BN[b, node])].double().softmax(-1)
            for attempt, child in enumerate(children):
                token = int(tokens[child])
                drafted = 1.0 if q_V is None else float(q_V[token])
                if drafted == 0:
                    continue  # a filler
                if coin(seed, position, attempt) < float(rest_V[token]) / drafted:
                    followers_BN[b, node] = child
                    break
                if q_V is None:
                    rest_V = _without(rest_V, token)
                else:
                    rest_V = _normalised((rest_V - q_V).clamp_min(0), otherwise_V=rest_V)
                    q_V = _without(q_V, token)
            if followers_BN[b, node] >= 0:
                emitted_BN[b, node] = tokens[followers_BN[b, node]]
            else:
                cumulated_V = rest_V.cumsum(-1)
                target = coin(seed, position, 0, stream=FINALS) * cumulated_V[-1]
                emitted_BN[b, node] = torch.searchsorted(cumulated_V, target, right=True)
    return Decisions(emitted_BN, followers_BN)


def probabilities(logits_RV: torch.Tensor, choice: Choice, settings: RowSettings) -> torch.Tensor:
    """float64 [R, V]: what each row's token is drawn from; greedy: all on the best."""
    rows, vocab_size = logits_RV.shape
    temperature_R = settings.temperature_B.repeat_interleave(rows // settings.rows)
    scores_RV = scores(logits_RV.float(), temperature_R)
    kept_RV = scores_RV.isfinite() & (scores_RV >= choice.thresholds_R[:, None])
    p_RV = scores_RV.double().masked_fill(~kept_RV, float("-inf")).softmax(-1)
    greedy_RV = torch.nn.functional.one_hot(choice.tokens_R.clamp_min(0), vocab_size).double()
    return torch.where((temperature_R == 0)[:, None], greedy_RV, p_RV)


def _without(weights_V: torch.Tensor, token: int) -> torch.Tensor:
    return _normalised(
        weights_V.index_fill(0, torch.tensor([token], device=weights_V.device), 0.0), otherwise_V=weights_V
    )


def _normalised(weights_V: torch.Tensor, *, otherwise_V: torch.Tensor) -> torch.Tensor:
    total = weights_V.sum()
    return weights_V / total if total > 0 else otherwise_V
