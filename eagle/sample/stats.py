"""What one generation did: one definition of every figure, used by the API, the command line and the evaluation."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from eagle.kernels.dispatch import Path

Origin = Literal["plain", "drafted", "bonus", "correction"]
"""How a token came. drafted: an accepted draft; bonus: the target's own behind an accepted leaf; correction: the target's own
where the walk left the tree; plain: without drafts (the prefill's token, and steps whose tree was its root alone)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceLength:
    """Tokens per verification of the target, over some answers: the one definition of tau. Sums: parts add up."""

    committed: int = 0
    """Tokens that verifications gave to the answers: what EOS, a stop string or the length limit cut off does not count, nor
    does the token that the prefill yields."""
    uncut: int = 0
    """Accepted drafts + 1 of every verify step, cut off or not: what servers count."""
    steps: int = 0
    """Verify steps."""

    @classmethod
    def of(cls, answers: Iterable[tuple[int, Sequence[int]]]) -> "AcceptanceLength":
        """answers: (new tokens, the prefill's included; accepted drafts of each verify step) of each. One without a step counts
        for nothing."""
        found = [(new_tokens, accepted) for new_tokens, accepted in answers if accepted]
        return cls(
            committed=sum(new_tokens - 1 for new_tokens, _ in found),
            uncut=sum(sum(accepted) + len(accepted) for _, accepted in found),
            steps=sum(len(accepted) for _, accepted in found),
        )

    @property
    def tau(self) -> float | None:
        """The acceptance length: tau * steps = committed tokens; None without a step."""
        return self.committed / self.steps if self.steps else None

    @property
    def raw(self) -> float | None:
        """The same before anything is cut off, to be compared with what servers report; None without a step."""
        return self.uncut / self.steps if self.steps else None

    def as_dict(self) -> dict[str, float | None]:
        """Both, under the names that every file of results uses."""
        return {"tau": self.tau, "tau_raw": self.raw}


@dataclasses.dataclass(kw_only=True)
class BeamStats:
    """Work and memory of one row's beam search. A target row is one hypothesis in one forward."""

    num_beams: int
    """Hypotheses carried along at most."""
    steps: int = 0
    """Tokens by which the search advanced, the prefill's first one included."""
    forward_rows: int = 0
    """Target rows computed after the prefill: live hypotheses expanded."""
    expansions_avoided: int = 0
    """Target rows saved: hypotheses of each step that would have been expanded next, had pruning not dropped them."""
    candidates_pruned: int = 0
    """Candidates that pruning dropped, whether or not they would have been expanded."""
    kv_bytes: int = 0
    """Memory reserved for the row's keys and values at its most hypotheses."""
    plain_kv_bytes: int = 0
    """The same for plain decoding of the row: one hypothesis."""
    kv_tokens: int = 0
    """Tokens whose keys and values were held at the search's fullest: live hypotheses times their length, prompt included."""

    @property
    def share_saved(self) -> float:
        """Share of the target rows that pruning saved."""
        return self.expansions_avoided / max(self.expansions_avoided + self.forward_rows, 1)

    def count_pruned(self, candidates: int, *, beams: int) -> None:
        """Counts one step's dropped candidates, and those of them that would have been live."""
        self.candidates_pruned += candidates
        self.expansions_avoided += beams

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        return dataclasses.asdict(self) | {"share_saved": self.share_saved}


@dataclasses.dataclass(kw_only=True)
class DecodeStats:
    """Counts and times of one row's generation. The prefill and the token it yields are outside every ratio.

    Times of parts are wall times; on a CUDA device the device's, by events in its stream (eagle/sample/stopwatch.py).
    """

    accepted: list[int] = dataclasses.field(default_factory=list)
    """Accepted draft tokens of each verify step, before EOS and length trimming."""
    ended_at_leaf: list[bool] = dataclasses.field(default_factory=list)
    """Whether each verify step's walk ended at a leaf (its last token is a bonus token) or left the tree (a correction)."""
    attempts_per_depth: list[int] = dataclasses.field(default_factory=list)
    """[d]: verify steps whose walk stood at depth d on a node with children."""
    accepted_per_depth: list[int] = dataclasses.field(default_factory=list)
    """[d]: those of them that went on to depth d + 1."""
    new_tokens: int = 0
    """Tokens in the output after the prompt, the EOS included."""
    prefill_ms: float = 0.0
    """Prompt forward and the choice of the first token; what the drafter makes of the prompt is in draft_ms."""
    draft_ms: float = 0.0
    """Proposing trees and feeding committed features to the head."""
    verify_ms: float = 0.0
    """Target forwards over the trees and the LM head on their nodes."""
    total_ms: float = 0.0
    """Wall time of the whole generation."""
    finish_reason: str = ""
    """"eos", "stop" (a stop string or criterion) or "length"."""
    seed: int = 0
    """The row's 64-bit seed."""
    kv_bytes_per_token: int = 0
    """Memory that the target's keys and values of one token take, over all layers."""
    rule: str = "coupled"
    """The verification rule (eagle.verify.rules)."""
    lossless: bool = True
    """Whether that rule leaves the target's distribution as it is; False: the text is not a sample of the target's."""

    engine: str = ""
    """What ran the target's forwards (eagle/target/engine.py)."""
    tree: str = ""
    """The draft tree, and where its sizes come from: "given: 8 nodes, top-k 4, 3 levels" (decode.*), "published: ..." (the
    defaults), "timed: ..." (costs timed on this machine, eagle/draft/timed_trees.py), "tuned: ..." (tuned.json, for such a batch;
    "tuned: no drafting" where that was the fastest); "": plain, or a drafter without."""
    nodes: int = 0
    """Tree nodes verified, roots (and a batch's padding) included, over all verify steps."""
    kernels: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Kernel -> what ran it ("reference" or "triton") -> calls, while this row was in the batch."""
    beams: BeamStats | None = None
    """Of a search (num_beams above 1)."""

    @property
    def verify_steps(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Acceptance length: tokens that reached the output per verify step (`AcceptanceLength`); 0 without a step."""
        return self.acceptance_length.tau or 0.0

    @property
    def tau_raw(self) -> float:
        """(Accepted drafts + 1) per verify step, before a stop cut the last block: what servers count."""
        return self.acceptance_length.raw or 0.0

    @property
    def acceptance_length(self) -> AcceptanceLength:
        return AcceptanceLength.of([(self.new_tokens, self.accepted)])

    @property
    def origins(self) -> list[Origin]:
        """How each new token came, in order; those that stopping cut off are left out."""
        origins: list[Origin] = ["plain"]
        drafted: Origin = "drafted"
        for accepted, at_leaf in zip(self.accepted, self.ended_at_leaf):
            last: Origin = "correction" if not at_leaf else "bonus" if accepted else "plain"
            origins += [drafted] * accepted + [last]
        return origins[: self.new_tokens]

    @property
    def acceptance_per_depth(self) -> list[float]:
        """[d]: share of the walks standing at depth d, on a node with children, that went on to depth d + 1.

        For a chain this is n-alpha: entry n is the acceptance rate of the draft token whose context holds n of the head's
        own features, conditional on the ones before it being accepted.
        """
        return [went / stood for went, stood in zip(self.accepted_per_depth, self.attempts_per_depth)]

    @property
    def host_ms(self) -> float:
        """What is neither prefill, draft nor verify: sampling, walking, committing, bookkeeping, streaming."""
        return self.total_ms - self.prefill_ms - self.draft_ms - self.verify_ms

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole wall time, prefill included."""
        return 1e3 * self.new_tokens / self.total_ms if self.total_ms else 0.0

    def count_step(self, *, path_length: int, at_leaf: bool) -> None:
        """Counts one verify step whose walk visited `path_length` nodes, the root included."""
        drafts = path_length - 1
        self.accepted.append(drafts)
        self.ended_at_leaf.append(at_leaf)
        stood = drafts if at_leaf else drafts + 1
        while len(self.attempts_per_depth) < stood:
            self.attempts_per_depth.append(0)
            self.accepted_per_depth.append(0)
        for depth in range(stood):
            self.attempts_per_depth[depth] += 1
            self.accepted_per_depth[depth] += depth < drafts

    def count_kernels(self, calls: Mapping[tuple[str, Path], int]) -> None:
        """Adds calls: (kernel, what ran it) -> how many."""
        for (kernel, path), count in calls.items():
            paths = self.kernels.setdefault(kernel, {})
            paths[path] = paths.get(path, 0) + count

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived figures as JSON values."""
        derived = ("verify_steps", "tau", "tau_raw", "acceptance_per_depth", "host_ms", "tokens_per_second")
        beams = self.beams.as_dict() if self.beams is not None else None
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived} | {"beams": beams}
