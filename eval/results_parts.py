"""The parts of results.json that are there when they were measured: batches, the ledger, the tuner's trees, decode steps."""

import dataclasses
from typing import Any, Literal, dataclass_transform

from pydantic import ConfigDict

from eagle.eval.ledger.diagnosis import Cycle
from eagle.eval.statistics import Estimate


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Part:
    """Its subclasses are frozen, keyword-only dataclasses; the texts under their fields go into the schema."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class BatchPoint(Part):
    batch: int
    plain_tokens_per_second: float
    tokens_per_second: float
    tau: float | None
    tau_raw: float | None
    different: int
    """Answers that are not plain decoding's; any: no speed-up"""
    speedup: Estimate | None


class Curve(Part):
    """Speed-up against batch size under a sampling setting."""

    setting: str
    drafter: str
    """decode.drafter: its kind"""
    max_new_tokens: int
    prompts: int
    """Answered at every batch size"""
    points: list[BatchPoint]
    crossing: float | None
    """The batch size at which the pooled speed-up falls through 1 for good; null: it does not, or that is not known"""
    verdict: str


class CostPoint(Part):
    nodes: int
    """Of a row"""
    n: int
    """Of all rows together"""
    ms: float
    low: float
    high: float
    beta_ms: float


class Cost(Part):
    """T_target(n) at one batch size, milliseconds."""

    batch: int
    alpha_ms: float
    ms_per_node: float
    points: list[CostPoint]

    @property
    def rows(self) -> str:
        return f"{self.batch} row{'s' if self.batch > 1 else ''}"


class Rejected(Part):
    """Nodes that were verified for nothing, and their operations."""

    nodes_verified: int
    nodes_accepted: int
    nodes_rejected: int
    share: float
    flops_rejected: float


class Diagnosis(Part):
    name: str
    figure: str
    change: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerMethod(Cycle):
    """A method's cycle, the speed-up predicted from it, and what was measured."""

    method: str
    tau_raw: float
    predicted: float
    predicted_from_run: float
    measured: Estimate
    error: float
    error_from_run: float
    rejected: Rejected
    diagnosis: Diagnosis

    @property
    def gains(self) -> bool:
        """Whether drafting pays at these costs."""
        return self.tau > self.breakeven_tau


class LedgerPoint(Part):
    batch: int
    predicted: float
    measured: float | None
    diagnosis: Diagnosis


class Crossing(Part):
    """The batch sizes at which the curves fall through 1 for good; null: they do not, or that is not known."""

    predicted: float | None
    measured: float | None


class LedgerSetting(Part):
    setting: str
    main: str
    """The method whose sizes the curve against batch size has"""
    device: str
    engine: str
    held_out: bool
    """Whether the prediction is of other prompts than it was fitted on (false: one prompt only)"""
    prefix_tokens: float
    """Mean tokens in front of the nodes that were timed"""
    target: list[Cost]
    methods: list[LedgerMethod]
    curve: list[LedgerPoint] | None
    crossing: Crossing | None


class Ledger(Part):
    """The cost ledger (eagle/eval/ledger/ledger.py)."""

    settings: list[LedgerSetting]
    definitions: dict[str, str]


class Forecast(Part):
    speedup: float


class Candidate(Part):
    """A tree that decoded in earnest."""

    name: str
    tau: float | None
    tokens_per_second: float
    forecast: Forecast | None
    speedup: Estimate
    chosen: bool


class TunedCalibration(Part):
    """By bin of confidence."""

    confidence: list[float]
    accepted: list[float]
    calibrated: list[float]
    nodes: list[int]
    error: float


class TunedBatch(Part):
    setting: str
    batch: int
    candidates: list[Candidate]
    calibration: TunedCalibration


class TunedMeasurement(Part):
    batches: list[TunedBatch] = dataclasses.field(default_factory=list)


class Tuned(Part):
    """What eagle tune found for this head, machine, engine and dtype (the entry of its tuned.json)."""

    hardware: str
    engine: str
    dtype: str
    choices: list[dict[str, Any]]
    measured: TunedMeasurement


class Token(Part):
    text: str
    origin: Literal["plain", "drafted", "bonus", "correction"]
    step: int | None
    """The verify step that brought it; null of the prefill's"""


class Node(Part):
    """Node 0 is the root; parents come before children; parent -1: none."""

    text: str
    token: int
    parent: int
    depth: int
    confidence: float
    """Product of draft probabilities along the path"""
    accepted: bool


class Emitted(Part):
    """The bonus token, or the correction, behind node `parent`."""

    text: str
    token: int
    parent: int
    origin: str


class VerifyStep(Part):
    step: int
    nodes: list[Node]
    emitted: Emitted


class Bin(Part):
    """Drafted nodes of one bin of path confidence: how many, their mean confidence, the share accepted, and the fit's."""

    confidence: float
    nodes: int
    accepted: float
    calibrated: float | None = None


class RecordedAnswer(Part):
    """Real decode steps of one prompt (eagle/eval/record_steps.py)."""

    method: str
    rule: str
    setting: str
    question: str
    seed: int
    verify_steps: int
    accepted: list[int]
    """Accepted drafts of every verify step"""
    tokens: list[Token]
    steps: list[VerifyStep]
    """Some of them, with their trees"""
    calibration: list[Bin]
