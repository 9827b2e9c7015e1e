"""Row: one sequence being generated, and where it stops."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from transformers import StoppingCriteriaList

from eagle.sample.sampling import RowSampler
from eagle.sample.stats import DecodeStats


@dataclass(kw_only=True, eq=False)
class Row:
    """State of one sequence. V vocabulary."""

    prompt_length: int
    tokens: list[int]
    """The unpadded prompt and what was emitted since."""
    sampler: RowSampler
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    keeps_scores: bool = False
    scores: list[torch.Tensor] = field(default_factory=list)
    """float32 [V] of every emitted token, when kept: Hugging Face's scores, temperature and filters applied."""
    normalises_scores: bool = False
    """Keep log-probabilities (renormalize_logits)."""
    stats: DecodeStats = field(default_factory=DecodeStats)
    finished: bool = False
    _judged: list[tuple[int, str]] = field(default_factory=list)
    """Tokens about to be emitted, and why the row stops at each ("": it goes on)."""

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def note_scores(self, processed_V: torch.Tensor, *, position: int) -> None:
        """Keeps the scores from which the token at `position` is chosen."""
        if self.keeps_scores:
            scores_V = self.sampler.warped(processed_V)
            index = position - self.prompt_length
            self.scores[index:] = [scores_V.log_softmax(-1) if self.normalises_scores else scores_V]

    def emit(self, block: Sequence[int]) -> list[int]:
        """Adds a block of tokens up to the first stop inside it: an EOS, a criterion, the length limit.

        Returns what was added. Criteria (stop strings among them) see the row after every single token, as in plain
        decoding, so that a stop in the middle of an accepted block is found there.
        """
        if self.stops(block):
            self.finished, self.stats.finish_reason = True, self._judged[-1][1]
        emitted = [token for token, _ in self._judged]
        self._judged = []
        self.tokens += emitted
        self.stats.new_tokens = len(self.tokens) - self.prompt_length
        return emitted

    def stops(self, accepted: Sequence[int]) -> bool:
        """Whether the row stops within the tokens, about to be emitted. A criterion is asked about each token once."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0][0] == pair[1], zip(self._judged, accepted)))
        self._judged = self._judged[:same]
        while len(self._judged) < len(accepted) and not (self._judged and self._judged[-1][1]):
            upto = accepted[: len(self._judged) + 1]
            self._judged.append((upto[-1], self._stop_reason(upto)))
        return bool(self._judged) and bool(self._judged[-1][1])

    def ends(self, accepted: Sequence[int]) -> bool:
        """Whether the last of the tokens ends the row whatever its criteria say: an EOS, or the length limit."""
        count = len(self.tokens) + len(accepted) - self.prompt_length
        return bool(accepted) and (accepted[-1] in self.eos or count >= self.max_new_tokens)

    def _stop_reason(self, accepted: Sequence[int]) -> str:
        if accepted[-1] in self.eos:
            return "eos"
        count = len(self.tokens) + len(accepted) - self.prompt_length
        if self.criteria:
            scores = tuple(scores_V[None] for scores_V in self.scores[:count]) if self.keeps_scores else None
            if bool(self.criteria(torch.tensor([[*self.tokens, *accepted]]), scores).any()):
                return "stop"
        return "length" if count == self.max_new_tokens else ""


@contextmanager
def timed(rows: Sequence[Row], field: str, *, device: torch.device) -> Iterator[None]:
    """Adds the block's wall time, on the device too, to a field (in milliseconds) of every row's stats: they all waited."""
    rows, start = list(rows), time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elapsed = 1e3 * (time.perf_counter() - start)
    for row in rows:
        setattr(row.stats, field, getattr(row.stats, field) + elapsed)
