"""Whether a node's features are the same bits alone, in trees of any size and in any batch; if not, what is to blame.

Where they are, greedy and coupled decoding equal plain decoding by construction: no tie can be broken by rounding. It depends
on the processor's kernels and on the model's family, so it is tried on the machine at hand: `find` takes a second or two.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from eagle.draft.tree import DraftTree
from eagle.kernels.tree_attention.split_sum import BLOCK, DEEPEST
from eagle.target.target import Target

PREFIX = BLOCK + DEEPEST - 3
"""Committed tokens of the trial: its deeper nodes lie behind the border at which attention's sum is cut in two."""
SIZES = (60, 8, 2)
TRIED = 6
"""Paths of the largest tree that are also walked token by token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bitwise:
    """What was found."""

    holds: bool
    culprit: str | None = None
    """The first module of the target whose result differs where its inputs do not; or why nothing was tried."""

    def __str__(self) -> str:
        return "bitwise" if self.holds else f"not bitwise: {self.culprit}"


@torch.inference_mode()
def find(target: Target, *, seed: int = 0) -> Bitwise:
    """Tries random texts: every node of trees of 60, 8 and 2 nodes against itself in a smaller tree, alone, and in a batch."""
    if target.engine != "compiled":
        return Bitwise(holds=False, culprit=f'the engine "{target.engine}" uses library products, which round by shape')
    generator = torch.Generator().manual_seed(seed)
    longest = target.max_positions or 2 * PREFIX
    length = min(PREFIX, longest // 2)
    ids_BT = torch.randint(target.vocab_size, (2, length), generator=generator)
    lengths_B = torch.tensor([length, max(1, length - 5)])
    parents = [-1, *(int(torch.randint(max(0, i - 9), i, (), generator=generator)) for i in range(1, max(SIZES)))]
    tokens = torch.randint(target.vocab_size, (max(SIZES),), generator=generator).tolist()
    largest = _Trial(target, ids_BT, lengths_B).tree(tokens, parents)
    for size in SIZES[1:]:
        smaller = _Trial(target, ids_BT, lengths_B).tree(tokens[:size], parents[:size])
        if (wrong := largest.differs(smaller)) is not None:
            return Bitwise(holds=False, culprit=wrong)
    alone = _Trial(target, ids_BT[:1], lengths_B[:1]).tree(tokens, parents)
    if (wrong := largest.differs(alone)) is not None:
        return Bitwise(holds=False, culprit=wrong)
    for leaf in range(max(SIZES) - 1, 0, -(max(SIZES) // TRIED)):
        trial, path = _Trial(target, ids_BT[:1], lengths_B[:1]), _path(parents, leaf)
        for node in path:
            plain = trial.tree([tokens[node]], [-1])
            if (wrong := largest.differs(plain, nodes={node: 0})) is not None:
                return Bitwise(holds=False, culprit=wrong)
            trial.commit()
    return Bitwise(holds=True)


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """What every module made of every node of row 0, in the order of execution; the last are the features and the logits."""

    by_module: dict[str, torch.Tensor]

    def differs(self, other: "_Outputs", nodes: dict[int, int] | None = None) -> str | None:
        """The first module that made other bits of a node. nodes: of this one -> of the other; None: those of its number."""
        for name, mine in self.by_module.items():
            theirs = other.by_module[name]
            pairs = nodes or {node: node for node in range(theirs.shape[0])}
            if not torch.equal(mine[list(pairs)], theirs[list(pairs.values())]):
                return name
        return None


class _Trial:
    """A prefix in a cache of its own, and what is tried behind it."""

    def __init__(self, target: Target, ids_BT: torch.Tensor, lengths_B: torch.Tensor):
        self.target, self.rows = target, len(ids_BT)
        self.cache = target.new_cache(rows=self.rows, capacity=ids_BT.shape[1] + max(SIZES) + 1)
        target.prefill(ids_BT, lengths_B, self.cache)

    def tree(self, tokens: list[int], parents: list[int]) -> _Outputs:
        """The same tree behind every row."""
        tree = DraftTree.from_parents(
            torch.tensor(tokens).expand(self.rows, -1), torch.tensor(parents).expand(self.rows, -1)
        )
        with _recorded(self.target.running) as by_module:
            states = self.target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, self.cache)
            by_module["the final norm"] = states.features_BNH[0]
            by_module["the LM head"] = self.target.logits(states.features_BNH)[0]
        return _Outputs(by_module)

    def commit(self) -> None:
        self.cache.commit(torch.zeros(self.rows, 1, dtype=torch.int64), torch.ones(self.rows, dtype=torch.int64))


@contextmanager
def _recorded(decoder: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Row 0 of what every module without children, and every attention and layer, returns."""
    by_module: dict[str, torch.Tensor] = {}

    def note(name: str, kind: str) -> object:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and first.ndim == 3:
                by_module[f"{name} ({kind})"] = first[0].clone()

        return hook

    handles = [
        module.register_forward_hook(note(name, type(module).__name__))
        for name, module in decoder.named_modules()
        if name
    ]
    try:
        yield by_module
    finally:
        for handle in handles:
            handle.remove()


def _path(parents: list[int], leaf: int) -> list[int]:
    """From the root down to the leaf."""
    path = [leaf]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
