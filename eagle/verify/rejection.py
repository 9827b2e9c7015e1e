"""Rejection: speculative sampling, for chains and trees. Lossless in distribution; the text is not plain decoding's.

Chain: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (2302.01318). Children drawn without replacement: Jeong et
al. 2024 (recursive rejection sampling, 2402.14160), Yang et al. 2024 (2401.05749). V vocabulary, r what is left of the
target's distribution after the children that were rejected.
"""

import torch

from eagle import decode_config
from eagle.decode_config import check_tree
from eagle.draft.tree import DraftTree
from eagle.verify.coupled import NodeView, Rule, Walk


class Rejection(decode_config.Rejection, Rule):
    """Go through a node's children, accept one by a coin, and draw from what the rejected ones left.

    Sampled children, in draw order, r = p and q_1 = q: accept x with min(1, r(x) / q_i(x)); on rejection r becomes
    norm(max(0, r - q_i)) and q_{i+1} is q_i without x, renormalised.
    Top children, in any order that knows nothing of the coins: accept x with r(x); on rejection x leaves r. Over such a
    tree no rule accepts more: the expected count is the sum over nodes of the target's probability of their path.
    """

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        if tree.nodes > 1:
            check_tree(self, children=tree.children, chain=False)
        children, tokens = tree.children_of(row), tree.tokens_BN[row].tolist()
        path, emitted = [0], list[int]()
        while True:
            node = path[-1]
            rest_V = view.probabilities(node, emitted)
            # Plain q: without a record the children are one distribution's only outcomes, each certain in its turn.
            q_V = tree.q_after(row, node).to(rest_V.device) if tree.children == "sampled" and children[node] else None
            follower = None
            for attempt, child in enumerate(children[node]):
                token = tokens[child]
                drafted = 1.0 if q_V is None else float(q_V[token])
                if drafted == 0:
                    continue  # a filler: q had fewer tokens than children were wanted
                if view.accepts(float(rest_V[token]) / drafted, emitted, attempt):
                    follower = child
                    break
                if q_V is None:
                    rest_V = without(rest_V, token)
                else:
                    rest_V = residual(rest_V, q_V)
                    q_V = without(q_V, token)
            if follower is None:
                final = view.draw(rest_V, emitted)
                return Walk(path=path, tokens=[*emitted, final], at_leaf=not children[node])
            path.append(follower)
            emitted.append(tokens[follower])
            if view.stops(emitted):
                return Walk(path=path, tokens=emitted, at_leaf=True)


def residual(rest_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """norm(max(0, r - q)): what a rejected draw from q leaves of r. Both float64 [V], summing to 1."""
    return _normalised((rest_V - q_V).clamp_min(0), otherwise_V=rest_V)


def without(weights_V: torch.Tensor, token: int) -> torch.Tensor:
    """The distribution without a token, renormalised. float64 [V]."""
    return _normalised(
        weights_V.index_fill(0, torch.tensor([token], device=weights_V.device), 0.0), otherwise_V=weights_V
    )


def _normalised(weights_V: torch.Tensor, *, otherwise_V: torch.Tensor) -> torch.Tensor:
    """Nothing left can only be a rounding error (such a token is always accepted), or q drawn to its end."""
    total = weights_V.sum()
    return weights_V / total if total > 0 else otherwise_V
