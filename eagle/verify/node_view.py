"""What verification sees of the target: logits at the nodes of a batch's trees.

B rows, N nodes, H hidden, V vocabulary. The LM head is the largest matrix of a small target, and running it on one more
position costs little beside reading it. So it runs once for all rows, on the roots and on every node that the walk is likely
enough to visit; a node that it visits nevertheless costs one more run.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from eagle.draft.tree import DraftTree
from eagle.sample.noise import FINALS, coin
from eagle.sample.processing import UnsoundScoresError
from eagle.sample.row import Row
from eagle.sample.sampling import draw
from eagle.target.target import Target

MOST_AHEAD = 256
"""Positions whose logits are held at a time, at most (one per row always)."""

Clock = Callable[[], AbstractContextManager[None]]


class NodeLogits:
    """Logits at the trees' nodes: those of the likely ones are computed at once, when this is made, any other's when it is
    asked for."""

    def __init__(self, target: Target, tree: DraftTree, features_BNH: torch.Tensor, clock: Clock = nullcontext):
        self._target, self._features_BNH, self._clock = target, features_BNH, clock
        rows, nodes = _likely(tree, share=target.tokens.row_share)
        device = features_BNH.device
        with clock():
            logits_MV = target.logits(features_BNH[rows.to(device), nodes.to(device)])
        self._logits = dict(zip(zip(rows.tolist(), nodes.tolist()), logits_MV))

    def at(self, row: int, node: int) -> torch.Tensor:
        """[V]."""
        if (row, node) not in self._logits:
            with self._clock():
                self._logits[row, node] = self._target.logits(self._features_BNH[row, node])
        return self._logits[row, node]


def _likely(tree: DraftTree, *, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, nodes), int64 each: the roots, and the nodes worth computing before the walk asks.

    share: what one more position costs, as a share of a run of its own. A node's path confidence is the probability that it
    is asked for, so it is worth it from that confidence on. MOST_AHEAD at most, the most confident ones.
    """
    confidence_BN = tree.log_confidence_BN.clone()
    confidence_BN[:, 0] = float("inf")
    likely_BN = confidence_BN >= math.log(share)
    count = max(MOST_AHEAD, len(confidence_BN))
    if confidence_BN.numel() > count:
        order = confidence_BN.flatten().sort(descending=True, stable=True).indices
        likely_BN.view(-1)[order[count:]] = False
    rows, nodes = likely_BN.nonzero(as_tuple=True)
    return rows, nodes


class TargetView:
    """The target at one row's nodes: a NodeView of eagle/verify/coupled.py."""

    def __init__(self, row: Row, b: int, logits: NodeLogits):
        self.row, self._b, self._logits = row, b, logits
        self._processed: dict[int, torch.Tensor] = {}

    def processed(self, node: int, accepted: list[int]) -> torch.Tensor:
        """Processors see a node once, however often a rule asks."""
        if node not in self._processed:
            logits_V = self._logits.at(self._b, node)
            try:
                processed_V = self.row.sampler.processed(logits_V, self.row.tokens, accepted)
            except UnsoundScoresError:
                if not self.row.stops(accepted):
                    raise
                processed_V = torch.zeros_like(logits_V)  # plain decoding ends before, and so will the block
            self.row.note_scores(processed_V, position=len(self.row.tokens) + len(accepted))
            self._processed[node] = processed_V
        return self._processed[node]

    def choose(self, node: int, accepted: list[int]) -> int:
        position = len(self.row.tokens) + len(accepted)
        return self.row.sampler.choose(self.processed(node, accepted), position)

    def probabilities(self, node: int, accepted: list[int]) -> torch.Tensor:
        return self.row.sampler.probabilities(self.processed(node, accepted))

    def accepts(self, probability: float, accepted: list[int], attempt: int) -> bool:
        # The coin lies in the open interval (0, 1): probability 0 never passes, 1 always does.
        return coin(self.row.sampler.sampling.seed, len(self.row.tokens) + len(accepted), attempt) < probability

    def draw(self, weights_V: torch.Tensor, accepted: list[int]) -> int:
        position = len(self.row.tokens) + len(accepted)
        return draw(weights_V, coin(self.row.sampler.sampling.seed, position, 0, stream=FINALS))

    def stops(self, accepted: list[int]) -> bool:
        return bool(self.row.sampler.processors) and self.row.stops(accepted)

    def ends(self, accepted: list[int]) -> bool:
        return bool(self.row.sampler.processors) and self.row.ends(accepted)


def views(
    rows: Sequence[Row], target: Target, tree: DraftTree, features_BNH: torch.Tensor, clock: Clock = nullcontext
) -> list[TargetView]:
    """One view per row. clock: what the LM head's time is counted with."""
    logits = NodeLogits(target, tree, features_BNH, clock)
    return [TargetView(row, b, logits) for b, row in enumerate(rows)]
