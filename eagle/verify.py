"""Verification: which of a draft tree's nodes the target would have emitted itself.

The coupled walk: start at the root; at each visited node take the token that plain decoding emits there (the argmax
of the target's logits; later with shared Gumbel noise, of which temperature 0 is the case of none). If it is one of the
node's children, go there, otherwise stop. The text is exactly plain decoding's, whatever the tree.
"""

from collections.abc import Callable
from dataclasses import dataclass

from eagle.tree import DraftTree

NextToken = Callable[[int, int], int]
"""next_token(row, node): the token that plain decoding emits after that node's path."""


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What one row's verification accepted."""

    path: list[int]
    """Visited nodes, the root first: their keys and values are kept."""
    tokens: list[int]
    """Emitted tokens: the visited nodes' (without the root's) and the last one: bonus or correction."""
    at_leaf: bool
    """True: the walk ended at a leaf (bonus token); False: it left the tree (correction)."""


def coupled_walk(tree: DraftTree, row: int, next_token: NextToken) -> Walk:
    """Walks row `row` of the tree. Asks for one token per visited node and for no other."""
    parents, tokens = tree.parents_BN[row].tolist(), tree.tokens_BN[row].tolist()
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens)) if parent >= 0}
    inner = set(parents)
    path, emitted = [0], []
    while True:
        token = next_token(row, path[-1])
        emitted.append(token)
        node = child.get((path[-1], token))
        if node is None:
            return Walk(path=path, tokens=emitted, at_leaf=path[-1] not in inner)
        path.append(node)
