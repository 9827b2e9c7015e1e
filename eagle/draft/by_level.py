"""What drafters that grow a tree level by level share: rows, a cache of committed tokens, and the scores of children.

B rows, N nodes, L prefix length, H hidden, C = nodes * count children, D (draft) vocabulary.

A model is run once per level; its predictions become logits. Which nodes a level holds is the tree shape's business
(eagle/draft/dynamic_tree.py, eagle/draft/published_tree.py), what the model is the drafter's (eagle/draft/by_head.py,
eagle/draft/by_model.py).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from eagle.draft.children import DraftSampler
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.placement import sent
from eagle.sample.row import Row
from eagle.target.attention import TreeStep
from eagle.target.cache import TreeCache


class TreeShape(Protocol):
    """Decides which nodes are expanded and which are kept. str(): its sizes, in words."""

    @property
    def widest(self) -> int:
        """Children of one node, at most."""

    @property
    def columns(self) -> int:
        """Nodes run through the drafting model per tree: the room they need behind the committed tokens."""

    def grow(self, draft: "LevelDrafter") -> DraftTree:
        """The tree behind each row's root."""


class LevelDrafter(ABC):
    """A Drafter (eagle/draft/drafter.py) whose trees grow level by level from a model's predictions.

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
    sampler: DraftSampler
    roots_B: torch.Tensor
    """int64 [B], on the host: each row's last committed token."""
    predicted_BH: torch.Tensor
    """[B, H]: the prediction at the root, from which its children come."""

    def __init__(self, shape: TreeShape, vocabulary: DraftTokens, *, target_size: int):
        self.shape, self.vocabulary, self.target_size = shape, vocabulary, target_size
        if shape.widest > vocabulary.size:
            raise EagleError(
                f"the draft tree gives a node {shape.widest} children, the draft vocabulary has {vocabulary.size} tokens; "
                "lower decode.drafter.top_k"
            )

    @abstractmethod
    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        """See Drafter. Sets `rows`."""

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

    @property
    def rows(self) -> list[Row]:
        return self.sampler.rows

    @rows.setter
    def rows(self, rows: Sequence[Row]) -> None:
        self.sampler = DraftSampler(rows, self.vocabulary, target_size=self.target_size)
        most = max(len(row.eos) for row in rows)
        self._eos_BE = torch.tensor([[*row.eos, *[-1] * (most - len(row.eos))] for row in rows], dtype=torch.int64)

    def ends(self, tokens_BN: torch.Tensor) -> torch.Tensor | None:
        """bool [B, N]: which tokens end their row, so that nothing is drafted behind them; None: no token does."""
        if not self._eos_BE.shape[1]:
            return None
        self._eos_BE = sent(self._eos_BE, tokens_BN.device)
        return (tokens_BN[..., None] == self._eos_BE[:, None]).any(-1)

    def growing(self, tokens_BN: torch.Tensor, scores_BN: torch.Tensor) -> torch.Tensor:
        """The nodes' path log-confidences as what is expanded is chosen by, and its children's begin with: -inf at the row's
        end."""
        ends_BN = self.ends(tokens_BN)
        return scores_BN if ends_BN is None else scores_BN.masked_fill(ends_BN, -math.inf)

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
        where the draft's logits do, best child first.
        """
        logits_BND = self.draft_logits(predictions_BNH)
        if choice == "top":
            log_q_BND = logits_BND.float().log_softmax(-1)
        else:
            log_q_BND = self.sampler.confidence(logits_BND, depth=depth)
        best = log_q_BND.topk(count, dim=-1)
        tokens_BNk = self.vocabulary.to_target(best.indices)
        above_BN1 = sent(scores_BN, best.values.device)[..., None]
        return tokens_BNk.flatten(1), (above_BN1 + best.values + self.vocabulary.log_coverage).flatten(1)

    def _committed(
        self,
        predictions_BKH: torch.Tensor,
        next_tokens_BK: torch.Tensor,
        counts_B: torch.Tensor,
        *,
        written_B: torch.Tensor,
    ) -> None:
        """Notes that written_B[b] entries of the last run are committed: the last of them is the root."""
        self.cache.lengths_B = self.cache.lengths_B + written_B
        self.roots_B = next_tokens_BK[torch.arange(len(counts_B)), counts_B - 1]
        self.predicted_BH = pick(predictions_BKH, (written_B - 1)[:, None])[:, 0]


def pick(values_BKX: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    """values[b, index[b, i]] for every i, on the values' device."""
    index_BK1 = sent(index_BK, values_BKX.device)[..., None]
    return values_BKX.gather(1, index_BK1.expand(-1, -1, values_BKX.shape[-1]))
