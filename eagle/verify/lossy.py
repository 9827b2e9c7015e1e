"""Lossy rules: they accept drafts the target finds likely enough, and so change what it would say. On request only.

What they emit after the last accepted node is what plain sampling emits there. V vocabulary.
"""

import math
from collections.abc import Callable

import torch

from eagle import decode_config
from eagle.draft.tree import DraftTree
from eagle.verify.coupled import NodeView, Rule, Walk

Scores = Callable[[int, list[int]], torch.Tensor]
"""(node, accepted) -> float [V]: -inf for tokens that are not acceptable there."""


class TopK(decode_config.TopK, Rule):
    """Accepts a draft token that is among the target's k most likely (of its processed logits)."""

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        def scores(node: int, emitted: list[int]) -> torch.Tensor:
            processed_V = view.processed(node, emitted)
            least = processed_V.topk(min(self.k, len(processed_V))).values[-1]
            return processed_V.masked_fill(processed_V < least, -math.inf)

        return _walk(tree, row, view, scores)


class Typical(decode_config.Typical, Rule):
    """Typical acceptance (Medusa, arXiv 2401.10774): accepts x when p(x) > min(epsilon, delta * exp(-entropy of p))."""

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        def scores(node: int, emitted: list[int]) -> torch.Tensor:
            probabilities_V = view.probabilities(node, emitted)
            entropy = float(torch.special.entr(probabilities_V).sum())
            threshold = min(self.epsilon, self.delta * math.exp(-entropy))
            return probabilities_V.log().masked_fill(probabilities_V <= threshold, -math.inf)

        return _walk(tree, row, view, scores)


def _walk(tree: DraftTree, row: int, view: NodeView, scores: Scores) -> Walk:
    """Follows the best child whose score is above -inf; where there is none, emits what plain sampling emits."""
    children, tokens = tree.children_of(row), tree.tokens_BN[row].tolist()
    path, emitted = [0], list[int]()
    while siblings := children[path[-1]]:
        scores_V = scores(path[-1], emitted)
        best = max(siblings, key=lambda child: float(scores_V[tokens[child]]))
        if scores_V[tokens[best]] == -math.inf:
            break
        path.append(best)
        emitted.append(tokens[best])
        if view.stops(emitted):
            return Walk(path=path, tokens=emitted, at_leaf=True)
    return Walk(path=path, tokens=[*emitted, view.choose(path[-1], emitted)], at_leaf=not children[path[-1]])
