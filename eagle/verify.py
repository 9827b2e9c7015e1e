"""Verification: which of a draft tree's nodes are accepted, and which token follows them. One class a rule, by name.

A rule sees the tree and, for the nodes it visits, the target (`NodeView`). It emits tokens: those of the accepted nodes
and one more, the bonus (the walk ended at a leaf) or the correction (it left the tree).
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from eagle.tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What one row's verification accepted."""

    path: list[int]
    """Visited nodes, the root first: their keys and values are kept."""
    tokens: list[int]
    """Emitted tokens: the visited nodes' (without the root's) and the last one: bonus or correction."""
    at_leaf: bool
    """True: the walk ended at a leaf (bonus token); False: it left the tree (correction)."""


class NodeView(Protocol):
    """The target at one row's tree nodes. `accepted`: the tokens of the node's path, the root's excluded."""

    def choose(self, node: int, accepted: list[int]) -> int:
        """The token that plain sampling emits after the node."""

    def probabilities(self, node: int, accepted: list[int]) -> torch.Tensor:
        """float64 [V]: the target's distribution after the node, processors, temperature and filters applied."""

    def coin(self, accepted: list[int], attempt: int) -> float:
        """Uniform in (0, 1) from the acceptance stream, for the attempt-th decision after `accepted`."""


class Rule(Protocol):
    """A verification rule."""

    name: str
    lossless: bool
    """Whether the output is distributed exactly as the target's."""

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        """Verifies row `row` of the tree."""


class Coupled:
    """Emit what plain decoding emits at every node, and follow it while the tree holds it.

    The text is exactly plain decoding's with the same seed, whatever the tree: at temperature 0 (argmax) and above it
    (argmax of scores + shared Gumbel noise).
    """

    name, lossless = "coupled", True

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        parents, tokens = tree.parents_BN[row].tolist(), tree.tokens_BN[row].tolist()
        child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens)) if parent >= 0}
        inner = set(parents)
        path: list[int] = [0]
        emitted: list[int] = []
        while True:
            token = view.choose(path[-1], emitted)
            node = child.get((path[-1], token))
            emitted.append(token)
            if node is None:
                return Walk(path=path, tokens=emitted, at_leaf=path[-1] not in inner)
            path.append(node)
