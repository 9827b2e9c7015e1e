"""Which of the target's next tokens a head with a reduced vocabulary could draft at all.

A position counts for the classification when the target's likeliest token, over its FULL vocabulary, is a draft token.
That bit needs the full LM head: most of a step's time when the draft vocabulary is small. It depends on the document
alone, so it is kept, one byte a token, and later epochs compute only the draft vocabulary's rows. B rows, T tokens,
S positions, H hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch

from eagle.train.chunks import chunk_rows
from eagle.vocab import DraftTokens

UNKNOWN = -1
MOST_BYTES = 2**30
"""Documents beyond this are computed anew each epoch."""


class Draftable:
    """Computes the bits of a batch's positions, or remembers them from an earlier batch."""

    def __init__(self, tokens: DraftTokens):
        self.tokens = tokens
        self.known: dict[int, torch.Tensor] = {}
        """document number -> int8 [T]: 1, 0 or UNKNOWN, by the index of the feature that predicts the token"""
        self.computed = 0
        """Positions put through the full LM head so far."""

    @torch.no_grad()
    def of(
        self,
        features_BTH: torch.Tensor,
        targets_S: torch.Tensor,
        *,
        document_BT: torch.Tensor,
        numbers: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """bool [S], on the features' device: whether the target's likeliest token after each position is a draft token.

        targets_S: int64, positions in the flattened [B * T]. numbers: each row's documents by their numbers in the source,
        in the order of document_BT; a row without any is computed and not remembered.
        """
        if self.tokens.vocabulary is None:
            return torch.ones_like(targets_S, dtype=torch.bool)
        spans = _spans(document_BT.cpu(), numbers)
        bits = torch.full((document_BT.numel(),), UNKNOWN, dtype=torch.int8)
        for number, start, end in spans:
            if number in self.known:
                bits[start:end] = self.known[number]
        targets_cpu_S = targets_S.cpu()
        missing_M = targets_cpu_S[bits[targets_cpu_S] == UNKNOWN]
        if len(missing_M):
            bits[missing_M] = self._compute(features_BTH.flatten(0, 1), missing_M).to("cpu", torch.int8)
            self._remember(bits, spans)
        return bits[targets_cpu_S].to(features_BTH.device) == 1

    def _compute(self, features_NH: torch.Tensor, at_M: torch.Tensor) -> torch.Tensor:
        self.computed += len(at_M)
        rows = chunk_rows(self.tokens.full.vocab_size, features_NH.device)
        parts = at_M.to(features_NH.device).split(rows)
        chosen = [self.tokens.full.logits(features_NH[part_C]).float().argmax(dim=-1) for part_C in parts]
        return self.tokens.holds(torch.cat(chosen))

    def _remember(self, bits: torch.Tensor, spans: Sequence[tuple[int, int, int]]) -> None:
        held = sum(len(known_T) for known_T in self.known.values())
        for number, start, end in spans:
            if number in self.known or held + end - start <= MOST_BYTES:
                held += 0 if number in self.known else end - start
                self.known[number] = bits[start:end].clone()


def _spans(document_BT: torch.Tensor, numbers: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(document number, start, end) in the flattened [B * T] of every document of the batch."""
    spans, width = [], document_BT.shape[1]
    for row, row_numbers in enumerate(numbers):
        for place, number in enumerate(row_numbers):
            inside = (document_BT[row] == place).nonzero()[:, 0]
            start = row * width + int(inside[0])
            spans.append((number, start, start + len(inside)))
    return spans
