"""The `eval` and `tune` sections of a recipe."""

import dataclasses
from typing import Literal

from eagle.errors import EagleError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """`eagle eval`: acceptance and speed on prompts, against Hugging Face generate and our own plain loop."""

    prompts: tuple[str, ...] = ("shipped:mt_bench",)
    """`suite:NAME` (spec-bench-open, mt-bench, humaneval, gsm8k, alpacaeval-open, mbpp), prompt files (question_id / category /
    turns, or any conversation shape; Spec-Bench's own question.jsonl is recognised), hub ids or `shipped:NAME`."""
    split: str = "train"
    """Split of hub data sets."""
    tasks: tuple[str, ...] | None = None
    """Only these tasks or categories of the prompts; null: all."""
    limit: int | None = None
    """Prompts per task of a suite, per source of anything else, spread evenly over its categories."""
    methods: tuple[str, ...] = ("hf", "plain", "eagle2", "chain")
    """What is compared, in one interleaved run. hf: Hugging Face generate; hf-lookup: its prompt lookup; hf-assisted: its
    assisted decoding with eval.draft_model; plain: our loop without drafting (always needed); eagle2, static, chain, ngram,
    model: our drafters, each also as DRAFTER@RULE, such as eagle2@rejection: decode.drafter where it is of that kind, else its
    kind's own defaults (eagle2: what was published); tuned: eagle2 with the tree of eagle tune; default: eagle2 with nothing
    said of its tree."""
    draft_model: str | None = None
    """The small model of the methods hf-assisted and model: a folder, hub id or .gguf file with the target's tokenizer; null:
    decode.drafter's own, where that is one."""
    sampling: tuple[str, ...] = ("T=0",)
    """Settings every method answers under: "T=0", "T=0.7", "T=1 top_p=0.9" (top_k and min_p likewise)."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    warmup_prompts: int = 1
    """Prompts run through every method first and not counted."""
    chain_depth: int = 5
    """Length of the draft chain that measures n-alpha."""
    check_rows: int = 1600
    """`--check distribution`: continuations drawn per rule and setting; with fewer, mild faults are not told apart."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes: with more than [1], throughput against batch size is measured too, plain and drafted (decode.drafter)
    alternately."""
    ledger: Literal["on", "off"] = "on"
    """The cost ledger: after the requests, the parts of a cycle are timed by nodes (and by eval.batches), the speed-up is
    predicted from them and held against the measured one, and what holds it back is named. Up to minutes per setting on a CPU,
    more with every size of eval.batches."""
    seed: int = 0
    """Seed of the requests' noise and of the bootstrap intervals."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_new_tokens", 1),
            ("warmup_prompts", 0),
            ("chain_depth", 1),
            ("check_rows", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None or value < least:
                raise EagleError(f"eval.{name} is {value}, expected {least} or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """`eagle tune`: the fastest draft tree for the head on this machine, kept beside the head (see decode)."""

    prompts: tuple[str, ...] = ()
    """Prompts to tune with, as eval.prompts; none: those of the held-out conversations, or, without prepared data, what
    eval.limit leaves of eval.prompts."""
    count: int = 24
    """That many of them: the first half of them chooses, the second confirms."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    sampling: tuple[str, ...] = ("T=0",)
    """Settings, as eval.sampling; decoding takes the tree of the nearest temperature."""
    batches: tuple[int, ...] = (1,)
    """Batch sizes, a tree for each; decoding takes that of the nearest size."""
    confirm: int = 3
    """Best forecasts that are decoded with in earnest, beside the published trees, a chain and plain decoding."""
