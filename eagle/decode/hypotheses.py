"""What beam search keeps: hypotheses, and the two forms of the search over them, for one row and without a model.

M live hypotheses, T tokens, V vocabulary, k = num_beams. The score s of a hypothesis is the sum of its tokens'
log-probabilities after the processors; its rank among the finished is s / length ** length_penalty.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eagle.decode.beam_settings import BeamSettings, SearchForm
from eagle.sample.processing import process
from eagle.sample.row import Row
from eagle.sample.stats import BeamStats

NO_HYPOTHESIS = -1e9
"""Score of a returned answer that no hypothesis is left for, as in Hugging Face; it is all padding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """A token and what came before it; the root stands for the prompt's last token."""

    token: int
    parent: "Hypothesis | None" = None
    length: int = 0
    """New tokens, this one included."""
    score: float = 0.0
    """s: the sum of log-probabilities."""
    last: float | None = None
    """The last token's log-probability."""
    origin: int = 0
    """Index of the parent among the live hypotheses that it was one of."""
    ending: str = ""
    """Why it is finished: "eos", "stop" or "length"; empty: it is live."""

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        tokens, node = [], self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def normalised(self, length_penalty: float) -> float:
        return self.score / self.length**length_penalty if self.length else self.score


class Answer(NamedTuple):
    """What a search returns."""

    tokens: list[int]
    """New tokens, the sampled ones included."""
    score: float
    """s / length ** length_penalty."""


class RowSearch:
    """One row's search: `live` hypotheses go on, `done` ones are finished. Over when none is live."""

    def __init__(self, row: Row, settings: BeamSettings):
        self.row, self.settings = row, settings
        self.live = [Hypothesis(token=row.tokens[-1])]
        self.done: list[Hypothesis] = []
        self.stats = row.stats.beams = BeamStats(num_beams=settings.num_beams)

    def advance(self, logits_MV: torch.Tensor) -> list[int]:
        """One token further. logits_MV: the target's, after each live hypothesis.

        Returns, for each of the new live hypotheses, the index of the old one that it extends.
        """
        self.stats.steps += 1
        if len(self.row.new_tokens) < self.settings.sample_first:
            self._sample(logits_MV[0])
        else:
            self._select(self._processed(logits_MV.float().log_softmax(-1)))
        if not self.live:
            self._note_best()
        return [one.origin for one in self.live]

    def answers(self) -> list[Answer]:
        """num_return_sequences of them, best first; empty ones at the end where pruning left fewer."""
        penalty, count = self.settings.length_penalty, self.settings.num_return_sequences
        given = self.row.new_tokens
        best = [Answer(given + one.tokens, one.normalised(penalty)) for one in _best(self.done, count, penalty)]
        return best + [Answer([], NO_HYPOTHESIS)] * (count - len(best))

    def _note_best(self) -> None:
        for best in _best(self.done, 1, self.settings.length_penalty):
            self.row.stats.new_tokens = len(self.row.new_tokens) + best.length
            self.row.stats.finish_reason = best.ending

    def _select(self, log_probs_MV: torch.Tensor) -> None:
        """Sets `live` and `done` from the tokens' log-probabilities."""
        raise NotImplementedError

    def _processed(self, log_probs_MV: torch.Tensor) -> torch.Tensor:
        """As in Hugging Face, processors see normalised scores here, not logits, and all of a row's hypotheses at once.

        Raises UnsoundScoresError for nan and inf. A hypothesis that nothing may follow (-inf for all) is at its end.
        """
        row = self.row
        ids_MT = self._ids(self.live).to(log_probs_MV.device)
        step = len(row.new_tokens) + self.live[0].length + 1
        log_probs_MV = process(
            row.sampler.processors, ids_MT, log_probs_MV, step=step, fits=lambda peak_M: peak_M < float("inf")
        )
        return log_probs_MV.log_softmax(-1) if self.row.normalises_scores else log_probs_MV

    def _sample(self, logits_V: torch.Tensor) -> None:
        """One token as plain decoding emits it; the search's root moves behind it."""
        row = self.row
        token = row.sampler.choose(row.sampler.processed(logits_V, row.tokens, []), len(row.tokens))
        row.emit([token])
        row.sampler.forget_before(len(row.tokens))
        root = Hypothesis(token=token, ending=row.stats.finish_reason)
        self.live, self.done = ([], [root]) if row.finished else ([root], [])

    def _candidates(self, log_probs_MV: torch.Tensor, count: int) -> list[Hypothesis]:
        """The `count` best one-token extensions of the live hypotheses, best first; impossible ones are left out."""
        scores_M1 = torch.tensor([[one.score] for one in self.live], device=log_probs_MV.device)
        totals = (log_probs_MV + scores_M1).flatten()
        best, places = totals.topk(min(count, totals.numel()))
        lasts = log_probs_MV.flatten()[places].tolist()
        found = [
            Hypothesis(
                token=place % log_probs_MV.shape[1],
                parent=self.live[place // log_probs_MV.shape[1]],
                length=self.live[0].length + 1,
                score=score,
                last=last,
                origin=place // log_probs_MV.shape[1],
            )
            for score, place, last in zip(best.tolist(), places.tolist(), lasts)
            if score > float("-inf")
        ]
        return self._with_endings(found)

    def _with_endings(self, found: list[Hypothesis]) -> list[Hypothesis]:
        row = self.row
        stopped = [False] * len(found)
        if row.criteria and found:
            stopped = row.criteria(self._ids(found), None).tolist()
        endings = [
            "eos" if one.token in row.eos else "stop" if stop else "length" if one.length == self._limit else ""
            for one, stop in zip(found, stopped)
        ]
        return [replace(one, ending=ending) if ending else one for one, ending in zip(found, endings)]

    @property
    def _limit(self) -> int:
        """New tokens of the longest hypothesis."""
        return self.row.max_new_tokens - len(self.row.new_tokens)

    def _ids(self, hypotheses: Iterable[Hypothesis]) -> torch.Tensor:
        """int64 [M, T]: whole unpadded texts; the hypotheses are of one length."""
        return torch.tensor([self.row.tokens + one.tokens for one in hypotheses])

    def _survivors(self, candidates: list[Hypothesis], *, exempt: int = 0) -> list[Hypothesis]:
        """What pruning leaves; the first `exempt` candidates are old ones, without a token of this step."""
        local = [None if i < exempt else one.last for i, one in enumerate(candidates)]
        keeps = self.settings.pruning.keeps([one.score for one in candidates], local)
        return [one for one, stays in zip(candidates, keeps) if stays]


class HuggingFaceSearch(RowSearch):
    """transformers' `_beam_search` for one row, in its own terms.

    Its candidates are the max(2, 1 + EOS ids) * k best extensions, so that k live ones are among them whatever ends;
    only the k best candidates may finish. It carries k hypotheses in every case, filled up with impossible ones of
    score -1e9, and returns those too where no other is left; here they do not exist.
    """

    def _select(self, log_probs_MV: torch.Tensor) -> None:
        k = self.settings.num_beams
        candidates = self._candidates(log_probs_MV, count=max(2, 1 + len(self.row.eos)) * k)
        kept = self._survivors(candidates)
        ended = [one for one in kept[:k] if one.ending]
        self.done = _best([*self.done, *ended], k, self.settings.length_penalty)
        self.live = [one for one in kept if not one.ending][:k]
        if self._is_decided():
            self.live = []
        else:
            unpruned = min(k, sum(not one.ending for one in candidates))
            self.stats.count_pruned(len(candidates) - len(kept), beams=unpruned - len(self.live))

    def _is_decided(self) -> bool:
        """Whether no live hypothesis can get among the k best finished ones, as early_stopping judges it."""
        settings = self.settings
        if not self.live or len(self.done) < settings.num_beams:
            return not self.live
        if settings.early_stopping is True:
            return True
        hopes_for_more = settings.early_stopping == "never" and settings.length_penalty > 0
        length = self._limit if hopes_for_more else self.live[0].length
        return self.live[0].score / length**settings.length_penalty <= self.done[-1].normalised(settings.length_penalty)


class TextbookSearch(RowSearch):
    """One heap of the k best hypotheses by score; a finished one extends with EOS only, at no cost, so it stays as it is."""

    def _select(self, log_probs_MV: torch.Tensor) -> None:
        k = self.settings.num_beams
        pool = [*self.done, *self._candidates(log_probs_MV, count=k)]
        kept = self._survivors(pool, exempt=len(self.done))
        unpruned, heap = (_best(ones, k, length_penalty=0.0) for ones in (pool, kept))
        self.done, self.live = [one for one in heap if one.ending], [one for one in heap if not one.ending]
        if self.live:
            beams = sum(not one.ending for one in unpruned) - len(self.live)
            self.stats.count_pruned(len(pool) - len(kept), beams=beams)


FORMS: dict[SearchForm, type[RowSearch]] = {"huggingface": HuggingFaceSearch, "textbook": TextbookSearch}
"""The forms of the search by name."""


def _best(hypotheses: Iterable[Hypothesis], count: int, length_penalty: float) -> list[Hypothesis]:
    """Best first; of equal ones the earlier."""
    return sorted(hypotheses, key=lambda one: -one.normalised(length_penalty))[:count]
