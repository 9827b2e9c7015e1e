"""Verification: which of a draft tree's nodes are accepted, and which token follows them. One class a rule.

A rule sees the tree and, for the nodes it visits, the target (`NodeView`). It emits tokens: those of the accepted nodes
and one more, the bonus (the walk ended at a leaf) or the correction (it left the tree). Here: the protocol and the coupled
walk; the other rules are in eagle/verify/rejection.py, verify_block.py and verify_lossy.py, their names in eagle/verify/rules.py.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from eagle.draft.tree import Children, DraftTree
from eagle.errors import EagleError


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


Noise = Literal["coupling", "independent"]
"""What a rule's chance comes from. coupling: the noise plain sampling chooses with, which drafting may share. independent:
coins and final draws that no draft has seen; drafts made with the coupling noise would not be what their q says."""


class Rule(Protocol):
    """A verification rule."""

    name: str
    lossless: bool
    """Whether the output is distributed exactly as the target's."""
    noise: Noise
    children: tuple[Children, ...]
    """How a tree's children may have been chosen; the first is what drafts best for the rule."""
    chains_only: bool
    """Whether a node may have no more than one child."""
    looks_ahead: bool
    """Whether it asks for the target after tokens that are then not emitted."""

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        """Verifies row `row` of the tree. Raises EagleError for a tree that the rule cannot verify."""


def check_tree(rule: Rule, *, children: Children, chain: bool) -> None:
    """Raises EagleError unless the rule can verify trees (or chains) with children chosen that way."""
    if children not in rule.children:
        raise EagleError(
            f'the rule "{rule.name}" got a tree whose children are "{children}", expected {_either(rule.children)}: '
            f"{_WHY[rule.noise]}; draft with children={_either(rule.children)}"
        )
    if rule.chains_only and not chain:
        raise EagleError(
            f'the rule "{rule.name}" got a tree with siblings, expected a chain; draft with top_k=1 (or take another rule)'
        )


_WHY = {
    "coupling": "its noise is plain sampling's",
    "independent": "its acceptance holds only for children chosen apart from the noise that verification draws with",
}


def _either(names: tuple[Children, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)


class Coupled:
    """Emit what plain decoding emits at every node, and follow it while the tree holds it.

    The text is exactly plain decoding's with the same seed, whatever the tree: at temperature 0 (argmax) and above it
    (argmax of scores + shared Gumbel noise).
    """

    name, lossless, chains_only, looks_ahead = "coupled", True, False, False
    noise: Noise = "coupling"
    children: tuple[Children, ...] = ("coupled", "top", "sampled")

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
