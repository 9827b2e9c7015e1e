"""What drafters that grow a tree level by level share: rows, a cache of committed tokens, and the scores of children.

B rows, N nodes, L prefix length, H hidden, C = nodes * count children, D (draft) vocabulary.

A model is run once per level; its predictions become logits. Which nodes a level holds is the tree shape's business
(eagle/dynamic_tree.py, eagle/static_tree.py), what the model is the drafter's (eagle/head_drafter.py,
eagle/model_drafter.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from eagle.attention import TreeStep
from eagle.cache import TreeCache
from eagle.errors import EagleError
from eagle.rows import Row
from eagle.tree import DraftTree
from eagle.vocab import DraftTokens


class TreeShape(Protocol):
    """Decides which nodes are expanded and which are kept."""

    @property
    def widest(self) -> int:
        """Children of one node, at most."""

    @property
    def columns(self) -> int:
        """Nodes run through the drafting model per tree: the room they need behind the committed tokens."""

    def grow(self, draft: "LevelDrafter") -> DraftTree:
        """The tree behind each row's root."""


class LevelDrafter(ABC):
    """A Drafter (eagle/drafting.py) whose trees grow level by level from a model's predictions.

    The cache holds what was committed, the root included: a child of the root is run at cache position
    lengths_B + 0, its children at lengths_B + 1, and so on. A tree's own entries are overwritten by the next `observe`.

    Sampled rows draft with the noise that verification will use, so the tree holds the tokens that the target is about
    to emit; the confidence is softmax(log q + T * G), times the share of the text that the draft vocabulary covers.
    """

    aux_layers: tuple[int, ...] = ()
    """See Drafter."""
    tree_source: str = "given"
    """DecodeStats.tree of its rows."""
    cache: TreeCache
    rows: list[Row]
    roots_B: torch.Tensor
    """int64 [B], CPU: each row's last committed token."""
    predicted_BH: torch.Tensor
    """[B, H]: the prediction at the root, from which its children come."""

    def __init__(self, shape: TreeShape, vocabulary: DraftTokens, *, target_size: int):
        self.shape, self.vocabulary, self.target_size = shape, vocabulary, target_size
        if shape.widest > vocabulary.size:
            raise EagleError(
                f"the draft tree gives a node {shape.widest} children, the draft vocabulary has {vocabulary.size} tokens; "
                "lower decode.top_k"
            )

    @abstractmethod
    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        """See Drafter."""

    @abstractmethod
    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        """See Drafter."""

    @abstractmethod
    def run(self, features_BNH: torch.Tensor, tokens_BN: torch.Tensor, step: TreeStep) -> torch.Tensor:
        """Predictions [B, N, H] of N nodes, written behind what the step says. features: their parents' predictions."""

    def begin(self, rows: Sequence[Row]) -> None:
        """A new batch: `reset` begins with it."""
        self.rows = list(rows)
        for row in rows:
            row.stats.tree = self.tree_source

    def draft_logits(self, predictions_BNH: torch.Tensor) -> torch.Tensor:
        """[B, N, D]: what the predictions say of each draft token."""
        return self.vocabulary.logits(predictions_BNH)

    @property
    def deepest(self) -> int | None:
        """Levels that the model's positions leave room for; None: any number."""
        return None

    def keep_rows(self, kept: Sequence[int]) -> None:
        self.rows = [self.rows[b] for b in kept]
        self.cache.keep_rows(kept)
        self.roots_B, self.predicted_BH = self.roots_B[list(kept)], self.predicted_BH[list(kept)]

    @torch.inference_mode()
    def propose(self) -> DraftTree:
        return self.shape.grow(self)

    def children(
        self,
        predictions_BNH: torch.Tensor,
        scores_BN: torch.Tensor,
        *,
        depth: int,
        count: int,
        choice: Literal["coupled", "top"] = "coupled",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` most confident children, at `depth`, of every node: target ids and path log-confidences [B, N * count].

        scores_BN: the nodes' own path log-confidences. choice: with verification's noise, or by plain q. Both results lie
        on the CPU, best child first.
        """
        logits_BND = self.draft_logits(predictions_BNH)
        if choice == "top" or all(row.sampler.sampling.greedy for row in self.rows):
            log_q_BND = logits_BND.float().log_softmax(-1)
        else:  # the root lies at position len(row.tokens) - 1
            log_q_BND = torch.stack(
                [
                    row.sampler.draft_scores(
                        logits_ND,
                        len(row.tokens) - 1 + depth,
                        target_ids_V=self.vocabulary.target_ids_D,
                        target_size=self.target_size,
                    )
                    for row, logits_ND in zip(self.rows, logits_BND)
                ]
            )
        best = log_q_BND.topk(count, dim=-1)
        tokens_BNk = self.vocabulary.to_target(best.indices)
        scores_BNk = scores_BN[..., None] + best.values.cpu() + self.vocabulary.log_coverage
        return tokens_BNk.flatten(1).cpu(), scores_BNk.flatten(1)

    def _committed(
        self,
        predictions_BKH: torch.Tensor,
        next_tokens_BK: torch.Tensor,
        counts_B: torch.Tensor,
        *,
        written_B: torch.Tensor,
    ) -> None:
        """Notes that written_B[b] entries of the last run are committed: the last of them is the root."""
        each_B = torch.arange(len(counts_B))
        self.cache.lengths_B = self.cache.lengths_B + written_B
        self.roots_B = next_tokens_BK[each_B, counts_B - 1]
        self.predicted_BH = predictions_BKH[each_B, written_B - 1]


def pick(values_BKX: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    """values[b, index[b, i]] for every i, on the values' device."""
    return values_BKX.gather(1, index_BK.to(values_BKX.device)[..., None].expand_as(values_BKX))
