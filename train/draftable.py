"""Which of the target's next tokens a head with a reduced vocabulary could draft at all.

A position counts for the classification when the target's likeliest token, over its FULL vocabulary, is a draft token.
That bit needs the full LM head: most of a step's time when the draft vocabulary is small. It depends on the document
alone, so it is kept, one byte a token, and later epochs compute only the draft vocabulary's rows. B rows, T tokens,
S positions, H hidden, V vocabulary.

A product's last bits depend on how many rows it has, and so, at a tie, may the likeliest token. Each document is therefore
computed by itself: its bits are the same in whatever batch it is met first, before and after a resumption.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from eagle.data.chunks import chunk_rows
from eagle.heads.vocabulary import DraftTokens

UNKNOWN = -1
MOST_BYTES = 2**30
"""Documents beyond this are computed anew each epoch."""
Memory = Literal["documents", "nothing"]
"""nothing: for features that depend on the batch they are read in (a target in memory), whose bits do so as well."""


class Draftable:
    """Computes the bits of a batch's positions, or remembers them from an earlier batch."""

    def __init__(self, tokens: DraftTokens, *, memory: Memory = "documents"):
        self.tokens, self.memory = tokens, memory
        self.known: dict[int, torch.Tensor] = {}
        """document number -> int8 [T]: 1, 0 or UNKNOWN, by the index of the feature that predicts the token"""
        self.held = 0
        """Bytes of `known`."""
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

        targets_S: int64, positions in the flattened [B * T], ascending. numbers: each row's documents by their numbers in
        the source, in the order of document_BT; a row without any is computed and not remembered.
        """
        if self.tokens.vocabulary is None:
            return torch.ones_like(targets_S, dtype=torch.bool)
        targets_cpu_S = targets_S.cpu()
        bits = torch.full((document_BT.numel(),), UNKNOWN, dtype=torch.int8)
        spans = _spans(document_BT.cpu(), numbers) if self.memory == "documents" else []
        for number, start, end in spans:
            if number in self.known:
                bits[start:end] = self.known[number]
            inside_M = targets_cpu_S[(targets_cpu_S >= start) & (targets_cpu_S < end)]
            if bool((bits[inside_M] == UNKNOWN).any()):
                bits[inside_M] = self._compute(features_BTH, inside_M)
                self._remember(number, bits[start:end])
        missing_M = targets_cpu_S[bits[targets_cpu_S] == UNKNOWN]
        if len(missing_M):
            bits[missing_M] = self._compute(features_BTH, missing_M)
        return bits[targets_cpu_S].to(features_BTH.device) == 1

    def _compute(self, features_BTH: torch.Tensor, at_M: torch.Tensor) -> torch.Tensor:
        """int8 [M], on the CPU."""
        self.computed += len(at_M)
        features_NH = features_BTH.flatten(0, 1)
        rows = chunk_rows(self.tokens.full.vocab_size, features_NH.device)
        parts = at_M.to(features_NH.device).split(rows)
        chosen = [self.tokens.full.logits(features_NH[part_C]).float().argmax(dim=-1) for part_C in parts]
        return self.tokens.holds(torch.cat(chosen)).to("cpu", torch.int8)

    def _remember(self, number: int, bits_T: torch.Tensor) -> None:
        if number not in self.known:
            if self.held + len(bits_T) > MOST_BYTES:
                return
            self.held += len(bits_T)
        self.known[number] = bits_T.clone()


def _spans(document_BT: torch.Tensor, numbers: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(document number, start, end) in the flattened [B * T] of every document of the batch."""
    spans, width = [], document_BT.shape[1]
    for row, row_numbers in enumerate(numbers):
        for place, number in enumerate(row_numbers):
            inside = (document_BT[row] == place).nonzero()[:, 0]
            start = row * width + int(inside[0])
            spans.append((number, start, start + len(inside)))
    return spans
