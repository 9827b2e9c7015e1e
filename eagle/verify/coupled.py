"""Verification: which of a draft tree's nodes are accepted, and which token follows them. One class a rule.

A rule sees the tree and, for the nodes it visits, the target (`NodeView`). It emits tokens: those of the accepted nodes
and one more, the bonus (the walk ended at a leaf) or the correction (it left the tree). Here: what all share and the coupled
walk; the other rules are in rejection.py, block.py and lossy.py beside this file; their options in eagle/decode_config.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from eagle import decode_config
from eagle.draft.tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What one row's verification accepted."""

    path: list[int]
    """Visited nodes, the root first: their keys and values are kept."""
    tokens: list[int]
    """Emitted tokens: the visited nodes' (without the root's) and the last one: bonus or correction. No last one, where the
    row stops at a node and nothing behind it may be asked for."""
    at_leaf: bool
    """True: the walk ended at a leaf (bonus token); False: it left the tree (correction)."""


class NodeView(Protocol):
    """The target at one row's tree nodes. `accepted`: the tokens of the node's path, the root's excluded."""

    def choose(self, node: int, accepted: list[int]) -> int:
        """The token that plain sampling emits after the node."""

    def processed(self, node: int, accepted: list[int]) -> torch.Tensor:
        """float32 [V]: the target's logits after the node, processors applied, temperature and filters not."""

    def probabilities(self, node: int, accepted: list[int]) -> torch.Tensor:
        """float64 [V]: the target's distribution after the node, processors, temperature and filters applied."""

    def accepts(self, probability: float, accepted: list[int], attempt: int) -> bool:
        """True with the probability (1 and more: always; 0: never): the attempt-th decision after `accepted`."""

    def draw(self, weights_V: torch.Tensor, accepted: list[int]) -> int:
        """A token drawn in proportion to the weights: the one that ends the walk, after `accepted`."""

    def stops(self, accepted: list[int]) -> bool:
        """Whether nothing may be asked for behind `accepted`, which is to be emitted: the row stops there, and processors
        with a state would notice."""

    def ends(self, accepted: list[int]) -> bool:
        """As `stops`, of tokens that may not be emitted: stopping criteria are not asked."""


class Rule(decode_config.RuleOptions, ABC):
    """A verification rule: its facts (eagle/decode_config.py) and its walk."""

    @abstractmethod
    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        """Verifies row `row` of the tree. Raises EagleError for a tree that the rule cannot verify."""


class Coupled(decode_config.Coupled, Rule):
    """Emit what plain decoding emits at every node, and follow it while the tree holds it.

    The text is exactly plain decoding's with the same seed, whatever the tree: at temperature 0 (argmax) and above it
    (argmax of scores + shared Gumbel noise).
    """

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
            if view.stops(emitted):
                return Walk(path=path, tokens=emitted, at_leaf=True)
