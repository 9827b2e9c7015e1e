"""From answers to figures. Each figure has one definition, printed with the results."""

import dataclasses
import itertools
from collections.abc import Sequence

from eagle.eval.answers import Answer, Request
from eagle.eval.statistics import Estimate, median, paired_ratio

DEFINITIONS = {
    "request": "one turn of one prompt; later turns hold plain decoding's own earlier answers",
    "tau": "acceptance length: sum over verify steps of (accepted drafts + 1) / verify steps, over all requests, "
    "before EOS and length trimming; the token that prefill yields is not counted",
    "tau_trimmed": "the same with the tokens that were kept: (new tokens - 1 per request) / verify steps",
    "acceptance": "per depth d = 0, 1, ...: share of the walks at depth d, on a node with children, that went on",
    "n_alpha": "of the chain: acceptance of the draft token whose context holds n of the head's own features, "
    "conditional on those before it; 0-alpha is the first draft token's",
    "tokens_per_second": "sum of new tokens / sum of wall-clock seconds of the whole calls, prefill included",
    "ms_per_token": "median over requests of wall-clock milliseconds / new tokens, prefill included",
    "decode_ms_per_token": "median over requests of (wall clock - time to first token) / (new tokens - 1)",
    "step_ms": "sum of (wall clock - time to first token) / verify steps; speculation pays when tau exceeds the method's "
    "step_ms / plain's step_ms",
    "first_token_ms": "median over requests of the time from the call to the first token",
    "speedup": "median over requests of (baseline's time per token / the method's time per token) on that request, "
    "with its 95% bootstrap interval; pooled: sum of the baseline's seconds / sum of the method's",
    "shares": "of the wall clock behind the prefill: verify (target forwards and LM head), draft (proposing trees, feeding "
    "the head), host (the rest: sampling, walking, committing, streaming)",
    "baselines": "hf: Hugging Face generate, same loaded weights and sampling; plain: this package's loop without drafting",
    "exact": "answers whose tokens equal plain decoding's with the same seed (plain's own row and Hugging Face's assisted "
    "modes, at temperature 0: Hugging Face's); a tie is a first divergence where the two best scores (noise included) "
    "are closer than 1e-4 logits (half precision: two spacings). by law: another draw from the same distribution, as the "
    "rule promises and `python -m eagle.eval.chi_square` tests; lossy: another distribution",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one method over some requests; None where a figure does not exist."""

    requests: int
    new_tokens: int
    verify_steps: int
    tau: float | None
    tau_trimmed: float | None
    acceptance: list[float]
    tokens_per_second: float
    ms_per_token: float | None
    decode_ms_per_token: float | None
    first_token_ms: float | None
    step_ms: float | None
    """Milliseconds per verify step (drafting, verification, host), prefill left out; of plain decoding: per token."""
    shares: dict[str, float] | None
    """Of the wall clock behind the prefill: verify, draft, host; None of Hugging Face's loop"""
    speedup_hf: Estimate | None
    speedup_plain: Estimate | None


def figures(requests: Sequence[Request], method: str, *, baselines: Sequence[str], seed: int = 0) -> Figures:
    """Figures of `method`; speed-ups only against `baselines`: those whose tokens its own were proved equal to."""
    answers = [request.answers[method] for request in requests]
    steps = [accepted for answer in answers for accepted in answer.accepted]
    seconds = sum(answer.seconds for answer in answers)
    new_tokens = sum(len(answer.tokens) for answer in answers)
    drafted = any(answer.attempts_per_depth for answer in answers)

    def speedup(baseline: str) -> Estimate | None:
        if baseline not in baselines or baseline == method:
            return None
        return paired_ratio(
            [_per_token(request.answers[baseline]) for request in requests],
            [_per_token(answer) for answer in answers],
            totals=[(request.answers[baseline].seconds, request.answers[method].seconds) for request in requests],
            seed=seed,
        )

    return Figures(
        requests=len(requests),
        new_tokens=new_tokens,
        verify_steps=len(steps),
        tau=1 + sum(steps) / len(steps) if drafted else None,
        tau_trimmed=sum(len(a.tokens) - 1 for a in answers) / len(steps) if drafted else None,
        acceptance=acceptance_per_depth(answers),
        tokens_per_second=new_tokens / seconds,
        ms_per_token=median([1e3 * _per_token(answer) for answer in answers]),
        decode_ms_per_token=median(
            [1e3 * (a.seconds - a.first_token_seconds) / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1]
        ),
        first_token_ms=median([1e3 * answer.first_token_seconds for answer in answers]),
        step_ms=1e3 * sum(a.seconds - a.first_token_seconds for a in answers) / len(steps) if steps else None,
        shares=_shares(answers) if steps else None,
        speedup_hf=speedup("hf"),
        speedup_plain=speedup("plain"),
    )


def _shares(answers: Sequence[Answer]) -> dict[str, float]:
    verify, draft = sum(a.verify_seconds for a in answers), sum(a.draft_seconds for a in answers)
    total = sum(a.seconds - a.prefill_seconds for a in answers)
    return {"verify": verify / total, "draft": draft / total, "host": 1 - (verify + draft) / total}


def acceptance_per_depth(answers: Sequence[Answer]) -> list[float]:
    """Pooled over answers: [d] of the walks that stood at depth d on a node with children, the share that went on.

    Of a chain this is n-alpha, n = d.
    """
    stood, went = (
        _summed([getattr(a, name) for a in answers]) for name in ("attempts_per_depth", "accepted_per_depth")
    )
    return [above / below for above, below in zip(went, stood, strict=True)]


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def _per_token(answer: Answer) -> float:
    return answer.seconds / len(answer.tokens)
