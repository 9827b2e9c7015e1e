"""The `data` and `features` sections of a recipe (eagle/config.py)."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """`eagle data regenerate`: the target answers prompts, so that the head learns what the target itself would say."""

    prompts: tuple[str, ...] = ()
    """Sources of prompts (as data.sources); the first user turn (after any system turn) of each row is answered."""
    output: str | None = None
    """The JSONL file to write; default: OUTPUT_DIR/regenerated.jsonl."""
    limit: int | None = None
    """At most this many prompts."""
    max_prompt_tokens: int = 224
    """Prompts that render to more tokens are passed over (counted)."""
    max_new_tokens: int = 256
    """Longest answer, in tokens."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Row i is answered at temperatures[i % len]; 0 is greedy."""
    batch_size: int = 32
    """Rows decoded together; a row that ends makes room for the next. More rows are faster while their cache fits."""
    samples_per_prompt: int = 1
    """Answers per prompt, each with its own noise; the n-th of row i is answered at temperatures[(i + n) % len]."""
    seed: int = 0
    """An answer draws from a generator seeded by (seed, its id): it does not depend on its batch mates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Conversations, and how they become token ids with a loss mask."""

    sources: tuple[str, ...] = ()
    """JSONL / JSON / Parquet files (.gz too), hub ids, or `shipped:NAME` for a file that comes with this package."""
    split: str = "train"
    """Split of hub data sets."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""
    max_len: int = 2048
    """Longest sample in tokens; longer ones are cut (counted)."""
    max_samples: int | None = None
    """Stop after this many conversations."""
    max_supervised_tokens: int | None = None
    """Stop after this many supervised tokens."""
    validation_fraction: float = 0.05
    """Share of the prompts held out, chosen by a hash of (seed, prompt): stable when data is added, and all answers to a prompt
    are on one side."""
    allow_skipped: float = 0.05
    """Share of broken rows above which preparation fails."""
    seed: int = 0
    """Seed of the validation split."""
    report_documents: int | None = 256
    """`eagle data report`: documents whose answers the target scores, shared out evenly over the sources; null: all."""
    regenerate: RegenerateConfig = dataclasses.field(default_factory=RegenerateConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """Extraction of the target's features into a store of shards."""

    dtype: Literal["bfloat16", "float32", "float8"] = "bfloat16"
    """How features are stored. float8: e4m3 with a float32 scale per token (and aux layer), half of bfloat16's bytes."""
    aux_layers: tuple[int, ...] | None = None
    """Also store the hidden states after this many layers (Hugging Face's hidden_states index), one block each; null: those
    that the head reads (none for eagle1)."""
    batch_tokens: int = 4096
    """Padded tokens per target forward."""
    shard_tokens: int = 32768
    """Tokens per shard: what a kill can lose, and what one process holds in memory."""
    more_stores: tuple[str, ...] = ()
    """Feature stores (`features` folders of other runs over the same target) that training reads besides the recipe's own; a
    document that an earlier one holds too is read once."""
