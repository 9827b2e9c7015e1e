"""`eagle data inspect`: what is about to be trained on, before any hour is spent on it.

Shows a few samples with the supervised tokens highlighted, lengths, duplicates, tokens by source, and what the feature
store will take in disk and, when asked (--measure loads the target), in time. Nothing is written.
"""

import hashlib
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eagle.config import Recipe
from eagle.data.conversations import same_words
from eagle.data.documents import spread
from eagle.data.layers import layers_to_store, readable_size, token_bytes
from eagle.data.online import TargetDocuments
from eagle.data.prepare import load_prepared
from eagle.errors import EagleError
from eagle.target.loading import load_config, load_tokenizer, tokenizer_identity
from eagle.target.target import Target

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)
SUPERVISED, CONTEXT = "black on green", "dim"
_BINS, _BAR = 10, 40
_PREVIEW_CHARACTERS = 6000
_BATCH = 1000
_MEASURED = 16
"""Documents that extraction is timed with."""


def inspect(
    recipe: Recipe, samples: int = 3, tokens_per_second: float | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Prints the inspection of a recipe's prepared data and returns its figures.

    samples: how many are shown with their mask, spread over the data set.
    tokens_per_second: an extraction rate (`measured_rate`); with it the time is estimated too.
    Raises EagleError when the data is not prepared, or was prepared with another tokenizer or chat template.
    """
    console = console or Console(highlight=False)
    data, manifest = load_prepared(recipe.data_dir)
    tokenizer = load_tokenizer(recipe.target, recipe.data.chat_template)
    if tokenizer_identity(tokenizer) != manifest["tokenizer"]:
        raise EagleError(
            f"{recipe.data_dir} was prepared with another tokenizer or chat template than {recipe.target.model} has; "
            "run `eagle data prepare RECIPE` again"
        )
    for i in spread(len(data), samples):
        _show_sample(console, data[i], tokenizer)
    figures = count_samples(data, tokenizer)
    figures |= _estimate(recipe, tokens=figures["tokens"], tokens_per_second=tokens_per_second)
    _show_lengths(console, np.asarray(data["length"], dtype=np.int64))
    console.print(_table(figures, manifest["counts"]))
    return figures


def measured_rate(recipe: Recipe) -> float:
    """Tokens per second of the target over a few documents of the prepared data, run once before to warm up.

    Raises EagleError when the data is not prepared, or the target does not fit it.
    """
    target = Target.from_config(recipe.target, recipe.data.chat_template)
    documents = TargetDocuments(recipe, target).for_layers(layers_to_store(recipe, target.num_layers))
    numbers = spread(len(documents), _MEASURED)
    documents.read(numbers)
    _wait(target)
    start = time.monotonic()
    documents.read(numbers)
    _wait(target)
    return float(documents.lengths[numbers].sum()) / (time.monotonic() - start)


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def mask_preview(ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> Text:
    """The sample's text, supervised runs of tokens highlighted; markup and control characters in it stay plain text."""
    text = Text()
    for supervised, run in groupby(zip(ids, loss_mask, strict=True), key=lambda pair: bool(pair[1])):
        piece = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        text.append(printable(piece), style=SUPERVISED if supervised else CONTEXT)
    return text


def _show_sample(console: Console, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    supervised = sum(row["loss_mask"])
    console.rule(Text(printable(f"{row['id']}  {row['origin']}  {row['split']}")), style="dim", align="left")
    preview = mask_preview(row["input_ids"], row["loss_mask"], tokenizer)
    if len(preview) > _PREVIEW_CHARACTERS:
        preview.truncate(_PREVIEW_CHARACTERS)
        preview.append(" ... (the rest is not shown)", style=CONTEXT)
    console.print(preview, soft_wrap=True)
    console.print(Text.assemble(f"{row['length']} tokens, ", (f"{supervised} supervised", SUPERVISED)))


def printable(text: str) -> str:
    """Control characters as the pictures Unicode has for them, so that a text cannot steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: chr(0x2400 + ord(m[0])) if m[0] < " " else "\u2421", text)


def count_samples(data: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Tokens, duplicates and sources, in one pass; memory grows by a few bytes per sample."""
    tokens, supervised = 0, 0
    by_source: Counter[str] = Counter()
    documents: set[bytes] = set()
    prompts: dict[str, set[bytes]] = {"train": set(), "validation": set()}
    exact = same_prompt = 0
    for batch in data.iter(batch_size=_BATCH):
        heads = []
        for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
            tokens, supervised = tokens + len(ids), supervised + sum(mask)
            digest = _digest(np.asarray(ids, dtype=np.int32).tobytes())
            exact += digest in documents
            documents.add(digest)
            heads.append(ids[: mask.index(True)])
        texts = tokenizer.batch_decode(heads, skip_special_tokens=True)
        for text, split, source, length in zip(texts, batch["split"], batch["source"], batch["length"], strict=True):
            digest = _digest((same_words(text) or text).encode())
            same_prompt += any(digest in known for known in prompts.values())
            prompts[split].add(digest)
            by_source[source] += length
    return {
        "samples": len(data),
        "tokens": tokens,
        "supervised_tokens": supervised,
        "exact_duplicates": exact,
        "same_prompts": same_prompt,
        "prompts_in_both_splits": len(prompts["train"] & prompts["validation"]),
        "tokens_by_source": dict(by_source.most_common()),
    }


def _digest(value: bytes) -> bytes:
    return hashlib.blake2b(value, digest_size=8).digest()


def _estimate(recipe: Recipe, *, tokens: int, tokens_per_second: float | None) -> dict[str, Any]:
    config = load_config(recipe.target)
    hidden = int(config.hidden_size)
    blocks = 1 + len(layers_to_store(recipe, int(config.num_hidden_layers)))
    size = tokens * token_bytes(hidden, blocks, recipe.features.dtype)
    seconds = None if tokens_per_second is None else tokens / tokens_per_second
    free = shutil.disk_usage(recipe.data_dir).free
    return {
        "hidden_size": hidden,
        "blocks": blocks,
        "dtype": recipe.features.dtype,
        "store_bytes": 0 if recipe.train.features == "online" else size,
        "free_bytes": free,
        "extraction_seconds": seconds,
    }


def _show_lengths(console: Console, lengths: np.ndarray) -> None:
    counts, edges = np.histogram(lengths, bins=min(_BINS, max(1, int(np.ptp(lengths)))))
    table = Table(title="length of samples in tokens", title_justify="left", show_header=False, box=None)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(_BAR * count / counts.max())
        table.add_row(f"{low:,.0f} - {high:,.0f}", Text(bar, style="green"), f"{count:,}")
    console.print(table)
    quantiles = zip(QUANTILES, np.quantile(lengths, QUANTILES), strict=True)
    named = ", ".join(f"{q:.0%} {value:,.0f}" for q, value in quantiles)
    console.print(f"quantiles: {named}")


def _table(figures: dict[str, Any], counts: dict[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    tokens = figures["tokens"]
    table.add_row("samples", f"{figures['samples']:,}")
    table.add_row("tokens", f"{tokens:,}")
    table.add_row("supervised", f"{figures['supervised_tokens']:,} ({figures['supervised_tokens'] / tokens:.0%})")
    table.add_row("rows skipped in preparation", f"{sum(counts['skipped'].values()):,} of {counts['rows']:,}")
    table.add_row("cut at max_len", f"{counts['cut']:,}")
    table.add_row("exact duplicates", f"{figures['exact_duplicates']:,}")
    table.add_row("samples whose prompt occurred before (case and punctuation aside)", f"{figures['same_prompts']:,}")
    table.add_row("prompts in both train and validation", f"{figures['prompts_in_both_splits']:,}")
    table.add_section()
    size, free = figures["store_bytes"], figures["free_bytes"]
    shape = f"H = {figures['hidden_size']} x {figures['blocks']}, {figures['dtype']}"
    table.add_row(f"feature store ({shape})", readable_size(size) if size else "none: train.features is online")
    fits = "" if size <= free else " - TOO LITTLE for the store"
    table.add_row("free disk", Text(readable_size(free) + fits, style="" if not fits else "red"))
    seconds = figures["extraction_seconds"]
    table.add_row(
        "extraction time",
        "not measured: add --measure" if seconds is None else _duration(seconds),
    )
    table.add_section()
    for source, count in figures["tokens_by_source"].items():
        table.add_row(Text(printable(source)), f"{count:,} tokens ({count / tokens:.0%})")
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d} (h:mm:ss)"
