"""Lossy rules: they accept drafts the target finds likely enough, and so change what it would say. On request only.

What they emit after the last accepted node is what plain sampling emits there. V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eagle.draft.tree import Children, DraftTree
from eagle.errors import EagleError
from eagle.verify.coupled import NodeView, Noise, Walk

Scores = Callable[[int, list[int]], torch.Tensor]
"""(node, accepted) -> float [V]: -inf for tokens that are not acceptable there."""
_ANY: tuple[Children, ...] = ("top", "coupled", "sampled")


@dataclass(kw_only=True)
class TopK:
    """Accepts a draft token that is among the target's k most likely (of its processed logits)."""

    k: int = 3
    """How many; 1 at temperature 0 is lossless."""

    name, lossless, chains_only, looks_ahead = "top_k", False, False, False
    noise: Noise = "coupling"
    children = _ANY

    def __post_init__(self) -> None:
        if self.k < 1:
            raise EagleError(f'the rule "top_k" got k={self.k}, expected 1 or more')

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        def scores(node: int, emitted: list[int]) -> torch.Tensor:
            processed_V = view.processed(node, emitted)
            least = processed_V.topk(min(self.k, len(processed_V))).values[-1]
            return processed_V.masked_fill(processed_V < least, -math.inf)

        return _walk(tree, row, view, scores)


@dataclass(kw_only=True)
class Typical:
    """Typical acceptance (Medusa, arXiv 2401.10774): accepts x when p(x) > min(epsilon, delta * exp(-entropy of p))."""

    epsilon: float = 0.3
    """Probability that is always enough."""
    delta: float = 0.09
    """Factor of exp(-entropy): flat distributions accept less likely tokens."""

    name, lossless, chains_only, looks_ahead = "typical", False, False, False
    noise: Noise = "coupling"
    children = _ANY

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 <= getattr(self, name) <= 1:
                raise EagleError(f'the rule "typical" got {name}={getattr(self, name)}, expected 0 to 1')

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
