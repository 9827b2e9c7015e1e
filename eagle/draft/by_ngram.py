"""NgramDrafter: prompt lookup. What followed the last few tokens before is drafted again; no model is run.

(Saxena 2023, prompt lookup decoding.) B rows, N nodes, L tokens of a row.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from eagle.draft.tree import DraftTree
from eagle.kernels.placement import sent
from eagle.sample.row import Row

CONFIDENCE = 0.5
"""What a token is taken for that followed before: half of them are what the target says. Only the order of work depends on it
(eagle/verify/node_view.py)."""


class NgramIndex:
    """One row's tokens and where its n-grams were last followed by something: a step costs what it adds, whatever L is.

    shortest, longest: lengths n of the n-grams. places: how many of the latest occurrences of each are remembered.
    """

    def __init__(self, first: int, *, shortest: int, longest: int, places: int):
        self.tokens = [first]
        self._lengths, self._places = range(longest, shortest - 1, -1), places
        self._followers: dict[tuple[int, ...], deque[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens: each follows the n-grams that end before it."""
        for token in tokens:
            end = len(self.tokens)
            for n in self._lengths:
                if n <= end:
                    gram = tuple(self.tokens[end - n :])
                    self._followers.setdefault(gram, deque(maxlen=self._places)).append(end)
            self.tokens.append(token)

    def continuations(self, *, length: int, count: int) -> list[list[int]]:
        """Up to `count` different continuations of the tokens, each of `length` tokens: first those after the longest
        n-gram, the latest first."""
        found: list[list[int]] = []
        for n in self._lengths:
            gram = tuple(self.tokens[-n:])
            for start in reversed(self._followers.get(gram, ()) if len(gram) == n else ()):
                continuation = self._from(start, length)
                if continuation not in found:
                    found.append(continuation)
                if len(found) == count:
                    return found
        return found

    def _from(self, start: int, length: int) -> list[int]:
        """The tokens from `start` on; where the row ends the repetition goes on: its period is the distance to the end."""
        known = self.tokens[start : start + length]
        return [known[i % len(known)] for i in range(length)]


class NgramDrafter:
    """A Drafter (eagle/draft/drafter.py) by prompt lookup: the longest suffix of the row's tokens that was there before.

    depth: tokens per continuation. continuations: how many different ones a tree may hold (1: a chain). budget: nodes per
    tree, the root included. shortest, longest: lengths of the suffixes looked up. A row without a match gets the root
    alone: plain decoding.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, *, depth: int = 8, continuations: int = 1, budget: int = 60, shortest: int = 1, longest: int = 4
    ) -> None:
        self.depth, self.count, self.budget, self.shortest, self.longest = (
            depth,
            continuations,
            budget,
            shortest,
            longest,
        )

    def __str__(self) -> str:
        longest = min(self.depth, self.budget - 1)
        tokens = f"up to {longest} token{'s' * (longest != 1)}"
        return tokens if self.count == 1 else f"{self.count} continuations of {tokens}, {self.budget} nodes at most"

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        for row in rows:
            row.stats.tree = f"prompt lookup: {self}"
        self._device = torch.device("cpu")  # until the first observe
        self._ends = [row.eos for row in rows]
        self._indices = [
            NgramIndex(row.tokens[0], shortest=self.shortest, longest=self.longest, places=self.count) for row in rows
        ]

    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        self._device = states_BKX.device
        for index, tokens, count in zip(self._indices, next_tokens_BK.tolist(), counts_B.tolist()):
            index.extend(tokens[:count])

    def keep_rows(self, kept: Sequence[int]) -> None:
        self._indices = [self._indices[b] for b in kept]
        self._ends = [self._ends[b] for b in kept]

    def propose(self) -> DraftTree:
        return padded([self._tree(*row) for row in zip(self._indices, self._ends)], device=self._device)

    def _tree(self, index: NgramIndex, ends: frozenset[int]) -> tuple[list[int], list[int]]:
        """(tokens, parents) of one row, by depth: continuations that begin alike share their nodes, and stop at the row's end."""
        tokens, parents = [index.tokens[-1]], [-1]
        continuations = index.continuations(length=self.depth, count=self.count)
        stands = [0] * len(continuations)  # the node at which each continuation stands
        children: dict[tuple[int, int], int] = {}
        for depth in range(self.depth):
            for place, continuation in enumerate(continuations):
                if stands[place] < 0:
                    continue  # cut off by the budget, or at its end
                key = (stands[place], continuation[depth])
                if key not in children and len(tokens) < self.budget:
                    children[key] = len(tokens)
                    tokens.append(continuation[depth])
                    parents.append(stands[place])
                stands[place] = -1 if continuation[depth] in ends else children.get(key, -1)
        return tokens, parents


def padded(trees: Sequence[tuple[list[int], list[int]]], *, device: torch.device | str = "cpu") -> DraftTree:
    """Rows of (tokens, parents), by depth and of any sizes, as one DraftTree on a device.

    A padding node is a root of its own (parent -1, the root's token, depth 0) right behind the root: nobody's child, so no
    walk gets there (confidence 0), no sibling has its token, and nodes stay ordered by depth.
    """
    nodes = max(len(tokens) for tokens, _ in trees)
    tokens_BN, parents_BN = [], []
    for tokens, parents in trees:
        extra = nodes - len(tokens)
        tokens_BN.append([tokens[0]] * (1 + extra) + tokens[1:])
        parents_BN.append([-1] * (1 + extra) + [parent + extra if parent else 0 for parent in parents[1:]])
    widest = max(max(Counter(parents[1:]).values(), default=0) for _, parents in trees)
    tree = DraftTree.from_parents(
        sent(torch.tensor(tokens_BN), device), sent(torch.tensor(parents_BN), device), widest=widest
    )
    log_confidence_BN = tree.depths_BN * math.log(CONFIDENCE)
    log_confidence_BN[:, 1:].masked_fill_(tree.parents_BN[:, 1:] < 0, -math.inf)
    return replace(tree, log_confidence_BN=log_confidence_BN)
