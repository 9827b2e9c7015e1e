"""Drafters: what proposes a tree. One protocol; EAGLE-2's dynamic tree is the one built from a draft head.

B rows, N nodes, L prefix length, H hidden, K = top_k, C tree columns in the head's cache, W = ceil(C / 64), V (draft)
vocabulary, M candidates.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from eagle.attention import TreeStep
from eagle.cache import TreeCache
from eagle.heads import Attend, EagleHead
from eagle.kernels.tree_attention.reference import own_bits
from eagle.rows import Row
from eagle.token_layers import TokenLayers
from eagle.tree import DraftTree, best_connected


class Drafter(Protocol):
    """Proposes a tree per row and verification, and is told what was committed."""

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        """Forgets everything: a new batch begins, of about `capacity` tokens a row."""

    def observe(self, features_BKH: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        """Newly committed pairs, counts_B[b] of row b: the target's feature f_i and the token t_{i+1} that follows it."""

    def propose(self) -> DraftTree:
        """A tree per row, its root the row's last observed token, its nodes ordered by depth."""

    def keep_rows(self, kept: Sequence[int]) -> None:
        """Forgets the rows that are not in `kept` (their places in the batch, ascending)."""


class EagleDrafter:
    """EAGLE-2's dynamic tree (arXiv 2406.16858): expand the most confident nodes, keep the most confident of all.

    budget: nodes per tree, the root included. top_k: children per expanded node, and nodes expanded per level.
    depth: levels below the root. top_k = 1 gives a chain.

    Sampled rows draft with the noise that verification will use, so the tree holds the tokens that the target is about
    to emit; the confidence is softmax(log q + T * G). The head's cache holds committed pairs only, computed from the
    target's features; a tree's own entries are overwritten by the next `observe`.
    """

    def __init__(self, head: EagleHead, tokens: TokenLayers, *, budget: int = 60, top_k: int = 10, depth: int = 6):
        self.head, self.tokens = head, tokens
        self.budget, self.top_k, self.depth = budget, top_k, depth
        # Tree columns of the head's cache: K per expanded level; their depth is counted in pairs behind the committed.
        self._column_depths_C = torch.arange(depth - 1).repeat_interleave(top_k)
        self._width = max(1, -(-len(self._column_depths_C) // 64))

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        self.rows = list(rows)
        self.cache = TreeCache(layers=1, rows=len(rows), capacity=capacity + self.top_k * self.depth)
        self._roots_B, self._predicted_BH = torch.empty(0), torch.empty(0)  # until the first observe

    def keep_rows(self, kept: Sequence[int]) -> None:
        self.rows = [self.rows[b] for b in kept]
        self.cache.keep_rows(kept)
        self._roots_B, self._predicted_BH = self._roots_B[list(kept)], self._predicted_BH[list(kept)]

    @torch.inference_mode()
    def observe(self, features_BKH: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        rows, count = next_tokens_BK.shape
        depths_BN = torch.arange(count).expand(rows, -1)
        step = TreeStep(lengths_B=self.cache.lengths_B, depths_BN=depths_BN, ancestors_BNW=None)
        predictions_BKH = self._head_step(features_BKH, next_tokens_BK, step)
        self.cache.lengths_B = self.cache.lengths_B + counts_B
        each_B = torch.arange(rows)
        self._roots_B, self._predicted_BH = next_tokens_BK[each_B, counts_B - 1], predictions_BKH[each_B, counts_B - 1]

    @torch.inference_mode()
    def propose(self) -> DraftTree:
        """Levels are lists of K expanded nodes. Candidates are numbered in the order they are made, the root being -1,
        so a parent's number is smaller than its children's."""
        rows, K = len(self._roots_B), self.top_k
        tokens_BM, scores_BM = self._children(self._predicted_BH[:, None], torch.zeros(rows, 1), depth=1)
        candidates = [(tokens_BM, scores_BM, torch.full((rows, K), -1))]

        # Level 1's beam is all of the root's children; their drafting feature is the one predicted for the root.
        beam_tokens, beam_scores, beam_number = tokens_BM, scores_BM, torch.arange(K).expand(rows, -1)
        beam_features = self._predicted_BH[:, None].expand(-1, K, -1)
        bits_BKW = own_bits(K, self._width).expand(rows, -1, -1)
        for level in range(1, self.depth):
            step = TreeStep(
                lengths_B=self.cache.lengths_B,
                depths_BN=torch.full((rows, K), level - 1),
                ancestors_BNW=bits_BKW,
                column_depths_BC=self._column_depths_C[: level * K].expand(rows, -1),
                offset=(level - 1) * K,
            )
            predictions_BKH = self._head_step(beam_features, beam_tokens, step)
            tokens_BM, scores_BM = self._children(predictions_BKH, beam_scores, depth=level + 1)
            candidates.append((tokens_BM, scores_BM, beam_number.repeat_interleave(K, dim=1)))
            if level == self.depth - 1:
                break
            kept_BK = scores_BM.topk(K, dim=1).indices
            origin_BK = kept_BK // K  # which beam node it is a child of
            beam_tokens, beam_scores = tokens_BM.gather(1, kept_BK), scores_BM.gather(1, kept_BK)
            beam_number = K + (level - 1) * K * K + kept_BK
            beam_features = _pick(predictions_BKH, origin_BK)
            bits_BKW = _pick(bits_BKW, origin_BK) | own_bits(K, self._width, start=level * K)
        return self._select(candidates)

    def _children(
        self, predictions_BKH: torch.Tensor, scores_BK: torch.Tensor, *, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The K most confident children, at `depth`, of every node: tokens and path log-confidences [B, nodes * K], CPU."""
        logits_BKV = self.tokens.logits(predictions_BKH)
        if all(row.sampler.sampling.greedy for row in self.rows):
            log_q_BKV = logits_BKV.float().log_softmax(-1)
        else:  # the root lies at position len(row.tokens) - 1
            log_q_BKV = torch.stack(
                [
                    row.sampler.draft_scores(logits_KV, len(row.tokens) - 1 + depth)
                    for row, logits_KV in zip(self.rows, logits_BKV)
                ]
            )
        children = log_q_BKV.topk(self.top_k, dim=-1)
        return children.indices.flatten(1).cpu(), (scores_BK[..., None] + children.values.cpu()).flatten(1)

    def _head_step(self, features: torch.Tensor, tokens_BN: torch.Tensor, step: TreeStep) -> torch.Tensor:
        """Predicted features of N pairs written behind the committed ones."""
        self.cache.reserve(step.offset + tokens_BN.shape[1])
        positions_BN = step.lengths_B[:, None] + step.depths_BN
        dtype = self.head.fc.weight.dtype
        with self.cache.writing(offset=step.offset):
            predictions: torch.Tensor = self.head(
                features.to(dtype),
                self.tokens.embed(tokens_BN).to(dtype),
                positions_BN.to(features.device),
                self._attend(step),
            )
        return predictions

    def _attend(self, step: TreeStep) -> Attend:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = self.cache.update(key, value, 0)
            return step.attend(query, keys, values, scaling=query.shape[-1] ** -0.5)

        return attend

    def _select(self, candidates: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> DraftTree:
        """The root and the best budget - 1 candidates, renumbered."""
        tokens_BM, scores_BM, parents_BM = (torch.cat(parts, dim=1) for parts in zip(*candidates))
        rows, count = len(tokens_BM), min(self.budget - 1, tokens_BM.shape[1])
        chosen_BN = best_connected(scores_BM, count)
        # Number of a chosen candidate in the tree: 1 + its rank; the root is node 0.
        number_BM = torch.zeros(tokens_BM.shape, dtype=torch.int64)
        number_BM.scatter_(1, chosen_BN, torch.arange(1, count + 1).expand(rows, -1))
        old_parents_BN = parents_BM.gather(1, chosen_BN)
        parents_BN = torch.where(old_parents_BN < 0, 0, number_BM.gather(1, old_parents_BN.clamp_min(0)))
        return DraftTree.from_parents(
            torch.cat([self._roots_B[:, None].cpu(), tokens_BM.gather(1, chosen_BN)], dim=1),
            torch.cat([torch.full((rows, 1), -1), parents_BN], dim=1),
            torch.cat([torch.zeros(rows, 1), scores_BM.gather(1, chosen_BN)], dim=1),
        )


def _pick(values_BKX: torch.Tensor, index_BK: torch.Tensor) -> torch.Tensor:
    """values[b, index[b, i]] for every i, on the values' device."""
    return values_BKX.gather(1, index_BK.to(values_BKX.device)[..., None].expand_as(values_BKX))
