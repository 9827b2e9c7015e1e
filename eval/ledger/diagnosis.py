"""What holds a drafted decode back, in words, from the parts of its cycle.

Speed-up = tau * T_plain / (T_draft + T_target(n) + T_host). Each part has an ideal, and the diagnosis is the single change
that recovers most, so it has no thresholds of its own:
- acceptance: tau -> every level accepted, at the costs as they are: a factor (levels + 1) / tau;
- costs: drafting and the host's work for nothing and n nodes at the price of one a row, at the acceptance as it is: a factor
  cycle / T_target(B). Where that is the larger factor, the largest part of the cycle beyond T_target(B) is the cause.
It is healthy where the speed-up is at least as large as either factor: more is gained than any one change would still bring.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from eagle.sample.stats import AcceptanceLength, DecodeStats

Cause = Literal["acceptance", "draft", "compute", "host", "healthy"]

NAMES: dict[Cause, str] = {
    "acceptance": "acceptance too low",
    "draft": "draft too slow",
    "compute": "verification too dear",
    "host": "host overhead",
    "healthy": "healthy",
}

# What to change depends on what drafts; drafters that are not named here are draft heads.
MORE_DATA = "train the head on more of the target's own words (and with unrolling)"
SMALLER_TREE = "until then a smaller tree, which eagle tune finds, costs less for the same guesses"
RAISE_ACCEPTANCE = {
    "tuned": MORE_DATA,
    "ngram": "prompt lookup guesses only what the text repeats: use it for tasks that copy (retrieval, summaries, edits), ask "
    "for longer matches (decode.drafter.shortest), or draft with a head",
    "model": "take a draft model closer to the target (of its family, or tuned on its answers), draft fewer levels "
    "(decode.drafter.depth), or train a head",
}
DRAFT_FASTER = {
    "tuned": "draft from fewer tokens (head.draft_vocab_size)",
    "ngram": "look up fewer continuations (decode.drafter.continuations, decode.drafter.longest)",
    "model": "draft fewer levels (decode.drafter.depth, level_cost), or take a smaller draft model",
}
DRAFT_FEWER_LEVELS = (
    "draft fewer levels (decode.drafter.depth, level_cost; eagle tune), or fewer tokens (head.draft_vocab_size)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycle:
    """The parts of a decode cycle of one batch; times are milliseconds per cycle."""

    batch: int
    nodes: float
    """Nodes per row and verification, the root included"""
    levels: int
    """Levels of the trees: the most drafts that a verification can accept"""
    tau: float
    draft_ms: float
    target_ms: float
    """T_target(n), n = batch * nodes"""
    host_ms: float
    one_ms: float
    """T_target(B): the same forward with one node a row, as plain decoding's"""
    plain_host_ms: float
    """Of a step of plain decoding, everything but the forward"""
    more_nodes: int | None = None
    """Of the larger numbers of nodes per row that were measured, the cheapest: what this machine can do"""
    more_nodes_ms: float | None = None
    """Its T_target"""

    @property
    def cycle_ms(self) -> float:
        return self.draft_ms + self.target_ms + self.host_ms

    @property
    def plain_ms(self) -> float:
        """A step of plain decoding."""
        return self.one_ms + self.plain_host_ms

    @property
    def speedup(self) -> float:
        """Over the plain loop, prefills left out."""
        return self.tau * self.plain_ms / self.cycle_ms

    @property
    def breakeven_tau(self) -> float:
        """The tau above which drafting pays."""
        return self.cycle_ms / self.plain_ms

    @property
    def uneven(self) -> bool:
        """Whether more nodes were verified in no more time: then the machine's limit is elsewhere."""
        return self.more_nodes_ms is not None and self.more_nodes_ms <= self.target_ms

    @property
    def recoverable(self) -> dict[Cause, float]:
        """By cause: the factor by which the speed-up would grow, were this one at its ideal."""
        saturation = max(0.0, self.target_ms - self.one_ms)
        return {
            "acceptance": (self.levels + 1) / self.tau,
            "draft": self.cycle_ms / max(1e-9, self.cycle_ms - self.draft_ms),
            "compute": self.cycle_ms / max(1e-9, self.cycle_ms - saturation),
            "host": self.cycle_ms / max(1e-9, self.cycle_ms - self.host_ms),
        }

    @property
    def costs_factor(self) -> float:
        """The factor by which the speed-up would grow, were all costs beyond one node's forward gone."""
        return self.cycle_ms / min(self.one_ms, self.cycle_ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A cause, and what to say about it."""

    cause: Cause
    name: str
    """The cause in words"""
    figure: str
    """The figure that says so"""
    change: str
    """What to change"""
    speedup: float
    recoverable: dict[Cause, float]

    def __str__(self) -> str:
        return f"{self.name}: {self.figure}; {self.change}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def diagnose(cycle: Cycle, *, alone: Cycle | None = None, drafter: str = "eagle2") -> Diagnosis:
    """alone: the same decoder with one row, where it was measured too: it tells a large batch from a large tree.
    drafter: what proposes, as in decode.drafter: what to change depends on it."""
    recoverable = cycle.recoverable
    acceptance, costs = recoverable["acceptance"], cycle.costs_factor
    cause: Cause
    if cycle.speedup >= max(acceptance, costs):
        cause = "healthy"
    elif acceptance >= costs:
        cause = "acceptance"
    else:
        parts: dict[Cause, float] = {
            "draft": cycle.draft_ms,
            "compute": cycle.target_ms - cycle.one_ms,
            "host": cycle.host_ms,
        }
        cause = max(parts, key=lambda one: parts[one])
    figure, change = _words(cause, cycle, alone, drafter)
    return Diagnosis(
        cause=cause,
        name=NAMES[cause] if cause != "compute" or cycle.uneven else "compute saturated",
        figure=figure,
        change=change,
        speedup=cycle.speedup,
        recoverable=recoverable,
    )


def _words(cause: Cause, cycle: Cycle, alone: Cycle | None, drafter: str) -> tuple[str, str]:
    share = f"of a cycle's {cycle.cycle_ms:.1f} ms"
    if cause == "healthy":
        return (
            f"{cycle.speedup:.2f}x over plain decoding with tau {cycle.tau:.2f}; no single change would bring as much again",
            "nothing needs to change",
        )
    if cause == "acceptance":
        limit = (cycle.levels + 1) / cycle.breakeven_tau
        return (
            f"tau is {cycle.tau:.2f}, a cycle costs {cycle.breakeven_tau:.2f} plain steps; {cycle.levels} level"
            f"{'s' * (cycle.levels != 1)} all accepted would give {limit:.2f}x",
            RAISE_ACCEPTANCE.get(drafter, f"{MORE_DATA}; {SMALLER_TREE}"),
        )
    if cause == "draft":
        return (
            f"drafting takes {cycle.draft_ms:.1f} ms {share}, for {cycle.levels} level{'s' * (cycle.levels != 1)}",
            DRAFT_FASTER.get(drafter, DRAFT_FEWER_LEVELS),
        )
    if cause == "host":
        return (
            f"work outside the forwards takes {cycle.host_ms:.1f} ms {share} (plain: {cycle.plain_host_ms:.1f} ms a step)",
            "look at logits processors, stopping criteria, stop strings and the streamer: they run for every token on the host",
        )
    ratio = cycle.target_ms / cycle.one_ms
    figure = (
        f"verifying {cycle.nodes:.0f} nodes a row{f' in a batch of {cycle.batch}' if cycle.batch > 1 else ''} takes "
        f"{cycle.target_ms:.1f} ms, {ratio:.1f} times as long as one node a row ({cycle.one_ms:.1f} ms), for tau {cycle.tau:.2f}"
    )
    if cycle.uneven:
        more = cycle.more_nodes
        return (
            f"{figure}; {more} nodes take {cycle.more_nodes_ms:.1f} ms, so it is not the machine's limit but a product that is "
            "slow for so few",
            f"let the products be chosen by timing (decode.engine auto), or verify {more} nodes "
            "(decode.drafter.budget; eagle tune)",
        )
    if alone is not None and cycle.batch > 1 and alone.target_ms / alone.one_ms < ratio:
        figure += f"; for a single row it takes {alone.target_ms / alone.one_ms:.1f} times as long"
        return (
            figure,
            "draft only for smaller batches, or with fewer nodes in large ones (decode.drafter.budget; eagle tune)",
        )
    return figure, "verify fewer nodes (decode.drafter.budget, top_k): eagle tune finds how many pay on this machine"


def cycle_of(drafted: Sequence[DecodeStats], plain: Sequence[DecodeStats], *, batch: int, levels: int) -> Cycle:
    """The parts as the stats of the rows of two loops tell them, over the same prompts in batches of one size.

    What the drafter makes of the prompts is spread over the cycles.
    """
    steps, plain_steps = (sum(row.verify_steps for row in rows) for rows in (drafted, plain))

    def per_step(rows: Sequence[DecodeStats], name: str, count: int) -> float:
        return float(sum(getattr(row, name) for row in rows)) / max(1, count)

    return Cycle(
        batch=batch,
        nodes=per_step(drafted, "nodes", steps),
        levels=levels,
        tau=AcceptanceLength.of((row.new_tokens, row.accepted) for row in drafted).tau or 1.0,
        draft_ms=per_step(drafted, "draft_ms", steps),
        target_ms=per_step(drafted, "verify_ms", steps),
        host_ms=per_step(drafted, "host_ms", steps),
        one_ms=per_step(plain, "verify_ms", plain_steps),
        plain_host_ms=per_step(plain, "host_ms", plain_steps) + per_step(plain, "draft_ms", plain_steps),
    )
