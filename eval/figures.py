"""From answers to figures. Each figure has one definition, printed with the results."""

import dataclasses
import itertools
from collections.abc import Sequence

from eagle.eval.answers import Answer, Request
from eagle.eval.statistics import FEWEST, Estimate, median, paired_ratio, quantile
from eagle.sample.stats import AcceptanceLength

DEFINITIONS = {
    "request": "one turn of one prompt; later turns hold plain decoding's own earlier answers",
    "tau": "acceptance length: tokens that verifications gave to the answers / verify steps, over all requests; what EOS or the "
    "length limit cut off does not count, nor does the token that prefill yields: tau x verify steps = new tokens - requests",
    "tau_raw": "(accepted drafts + 1) / verify steps, before anything is cut off: what servers and other projects report, to be "
    "compared with theirs. accept_lengths of spec_bench/ add up to it",
    "tau_request_mean": "mean over requests of each request's own tau: short answers count as much as long ones",
    "acceptance": "per depth d = 0, 1, ...: share of the walks at depth d, on a node with children, that went on; whole walks, "
    "also where the answer was cut inside one",
    "n_alpha": "of the chain: acceptance of the draft token whose context holds n of the head's own features, "
    "conditional on those before it; 0-alpha is the first draft token's",
    "tokens_per_second": "sum of new tokens / sum of wall-clock seconds of the whole calls, prefill included",
    "ms_per_token": "median over requests of wall-clock milliseconds / new tokens, prefill included",
    "decode_ms_per_token": "median over requests of (wall clock - time to first token) / (new tokens - 1)",
    "step_ms": "sum of (wall clock - time to first token) / verify steps; speculation pays when tau exceeds the method's "
    "step_ms / plain's step_ms",
    "first_token_ms": "median over requests of the time from the call to the first token; p95: of all requests, 95% are faster",
    "inter_token_ms": "inter-token latency, p50 and p95 over all tokens behind the first: the time between two commits divided "
    "by the tokens of the later one. What a reader gets who is shown the tokens of a block one after the other",
    "commit_gap_ms": "p50 and p95 over commits of the time since the commit before, undivided: how long the text stands still. "
    "A commit is what one verify step yields: one token of plain decoding, a block of drafting",
    "speedup": "median over requests of (baseline's time per token / the method's time per token) on that request, "
    "with its 95% bootstrap interval (prompts are drawn, each with all its turns; shown for "
    f"{FEWEST} prompts or more); pooled, here and in throughput and the ledger: sum of the baseline's seconds, for as many "
    "tokens as the method's where the texts differ, / sum of the method's",
    "shares": "of the wall clock behind the prefill: verify (target forwards and LM head), draft (proposing trees, feeding "
    "the head), host (the rest: sampling, walking, committing, streaming)",
    "baselines": "hf: Hugging Face generate, same loaded weights and sampling; plain: this package's loop without drafting",
    "device_use": "CPU: processor time of the process / (wall clock x torch's threads), over whole calls; waiting threads that "
    "spin count. GPU: mean over requests of NVML's utilisation at the end of the call; null without pynvml",
    "peak_memory": "rss_bytes: most host memory the process held in any call of the method, the weights of target and heads "
    "included (null where the system cannot set a peak back); cuda_bytes: most that torch's allocator held, null on a CPU",
    "record": "per setting and method, what an experiment notes: inter-token latency of the baselines and of the method (p50), "
    "device use, peak memory, acceptance; figures defined above",
    "throughput": "tokens per second behind the prefill of ragged batches, plain and drafted alternately, every answer equal to "
    "plain decoding's; crossing: the batch size at which the pooled speed-up falls through 1 for good, linear between the sizes "
    "measured; null where it does not, or where that is not known",
    "processes": "each process answers its own share of the prompts, every method of a request in the same process: ratios are "
    "within one process, and tokens/s is that of one process among as many as shared the machine",
    "exact": "answers whose tokens equal plain decoding's with the same seed (plain's own row and Hugging Face's assisted "
    "modes, at temperature 0: Hugging Face's); a tie is a first divergence where the two best scores (noise included) "
    "are closer than 1e-4 logits (half precision: two spacings); a router tie: on the way there two experts were closer than "
    "rounding, so that another forward may take the other one. by law: another draw from the same distribution, as the "
    "rule promises and `eagle eval RECIPE --check distribution` tests; lossy: another distribution",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Of many times: the middle one, and the one that 95% do not exceed."""

    p50: float
    p95: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one method over some requests; None where a figure does not exist."""

    requests: int
    new_tokens: int
    verify_steps: int
    tau: float | None
    tau_raw: float | None
    tau_request_mean: float | None
    acceptance: list[float]
    tokens_per_second: float
    ms_per_token: float | None
    decode_ms_per_token: float | None
    first_token_ms: float | None
    first_token_ms_p95: float | None
    inter_token_ms: Spread | None
    commit_gap_ms: Spread | None
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
    length = acceptance_length(answers)

    def speedup(baseline: str) -> Estimate | None:
        if baseline not in baselines or baseline == method:
            return None
        return paired_ratio(
            [_per_token(request.answers[baseline]) for request in requests],
            [_per_token(answer) for answer in answers],
            tokens=[len(answer.tokens) for answer in answers],
            units=[request.prompt for request in requests],
            unit="prompt",
            seed=seed,
        )

    return Figures(
        requests=len(requests),
        new_tokens=new_tokens,
        verify_steps=len(steps),
        tau=length.tau,
        tau_raw=length.raw,
        tau_request_mean=_mean(request_taus(answers)),
        acceptance=acceptance_per_depth(answers),
        tokens_per_second=new_tokens / seconds,
        ms_per_token=median([1e3 * _per_token(answer) for answer in answers]),
        decode_ms_per_token=median(
            [1e3 * (a.seconds - a.first_token_seconds) / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1]
        ),
        first_token_ms=median([1e3 * answer.first_token_seconds for answer in answers]),
        first_token_ms_p95=quantile([1e3 * answer.first_token_seconds for answer in answers], 0.95),
        inter_token_ms=inter_token(answers),
        commit_gap_ms=spread([1e3 * gap for answer in answers for gap in answer.commit_seconds]),
        step_ms=1e3 * sum(a.seconds - a.first_token_seconds for a in answers) / len(steps) if steps else None,
        shares=_shares(answers) if steps else None,
        speedup_hf=speedup("hf"),
        speedup_plain=speedup("plain"),
    )


def acceptance_length(answers: Sequence[Answer]) -> AcceptanceLength:
    """Of all answers together; without a step where nothing was drafted (plain decoding)."""
    drafted = any(answer.attempts_per_depth for answer in answers)
    return AcceptanceLength.of((len(a.tokens), a.accepted) for a in answers if drafted)


def request_taus(answers: Sequence[Answer], *, raw: bool = False) -> list[float]:
    """Each answer's own tau, of those with a verify step; nothing of methods that do not draft."""
    if not any(answer.attempts_per_depth for answer in answers):
        return []
    lengths = [AcceptanceLength.of([(len(a.tokens), a.accepted)]) for a in answers]
    found = [one.raw if raw else one.tau for one in lengths]
    return [tau for tau in found if tau is not None]


def inter_token(answers: Sequence[Answer]) -> Spread | None:
    """Inter-token latency in milliseconds, pooled over answers: a block's time, shared out evenly over its tokens."""
    return spread(
        [
            1e3 * gap / tokens
            for answer in answers
            for tokens, gap in zip(answer.commit_tokens, answer.commit_seconds, strict=True)
            for _ in range(tokens)
        ]
    )


def spread(values: Sequence[float]) -> Spread | None:
    """p50 and p95, None of nothing."""
    p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
    return None if p50 is None or p95 is None else Spread(p50=p50, p95=p95)


def device_use(answers: Sequence[Answer]) -> float | None:
    """0..1: how busy the device was during whole calls (see DEFINITIONS); None where it cannot be told."""
    if any(answer.use.peak_cuda_bytes is not None for answer in answers):
        return _mean([answer.use.gpu_use for answer in answers if answer.use.gpu_use is not None])
    wall = sum(answer.seconds * answer.use.threads for answer in answers)
    return sum(answer.use.cpu_seconds for answer in answers) / wall if wall else None


def peaks(answers: Sequence[Answer]) -> dict[str, int | None]:
    """The most that any of the calls held, in bytes."""
    return {
        name: max((peak for answer in answers if (peak := getattr(answer.use, field)) is not None), default=None)
        for name, field in (("rss_bytes", "peak_rss_bytes"), ("cuda_bytes", "peak_cuda_bytes"))
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    rss_bytes: int | None
    cuda_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One row of the record table: what an experiment with a method notes."""

    baseline_inter_token_ms: dict[str, float | None]
    """hf and plain, those that ran: p50"""
    inter_token_ms: float | None
    device_use: float | None
    """0..1"""
    peak_memory: Peaks
    tau: float | None
    tau_raw: float | None
    acceptance: list[float]


def record(requests: Sequence[Request], method: str, *, baselines: Sequence[str]) -> Record:
    answers = [request.answers[method] for request in requests]
    length = acceptance_length(answers)

    def p50(name: str) -> float | None:
        latency = inter_token([request.answers[name] for request in requests])
        return None if latency is None else latency.p50

    return Record(
        baseline_inter_token_ms={name: p50(name) for name in baselines},
        inter_token_ms=p50(method),
        device_use=device_use(answers),
        peak_memory=Peaks(**peaks(answers)),
        tau=length.tau,
        tau_raw=length.raw,
        acceptance=acceptance_per_depth(answers),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


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
