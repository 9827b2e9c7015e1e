"""`eagle data prepare`: sources of conversations -> a folder of token ids with loss masks.

The folder holds `manifest.json`, the resolved `recipe.yaml`, `skipped.jsonl` (rows not used, with origin and reason)
and `dataset/`, an Arrow data set of `datasets` with one row per sample:
id, input_ids (int32 list), loss_mask (bool list), length, split (train | validation), origin (file:line), source.
It is written under a temporary name and renamed at the end, so it is whole or not there.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import yaml
from datasets.arrow_writer import ArrowWriter

from eagle.config import DataConfig, Recipe, TargetConfig, as_dict
from eagle.data.conversations import read_conversation
from eagle.data.render import Renderer
from eagle.data.sources import Rejected, Source, count_rows, read_rows, resolve, source_sha256
from eagle.data.tally import Tally
from eagle.errors import EagleError
from eagle.files import atomic_dir, clear_leftovers, sha256_text, write_json
from eagle.progress import ProgressBar, console
from eagle.target.loading import load_config, load_tokenizer, tokenizer_identity

FORMAT = 2
FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "length": datasets.Value("int32"),
        "split": datasets.Value("string"),
        "origin": datasets.Value("string"),
        "source": datasets.Value("string"),
    }
)
_WRITE_EVERY = 100
"""Samples held in memory before they go to disk."""


def prepare(recipe: Recipe) -> dict[str, Any]:
    """Prepares `recipe.data` into `recipe.data_dir`, unless it is there and matches, and returns the manifest.

    Raises EagleError for sources that are missing or empty, too many rows that cannot be used (`data.allow_skipped`),
    nothing left to train on, or a folder in the way that is not prepared data.
    """
    _check(recipe)
    sources = [source for name in recipe.data.sources for source in resolve(name, split=recipe.data.split)]
    tokenizer = load_tokenizer(recipe.target, recipe.data.chat_template)
    vocab_size = _vocab_size(recipe.target)
    renderer = Renderer(tokenizer, max_len=recipe.data.max_len, vocab_size=vocab_size)
    inputs = {
        **_inputs(recipe, sources, tokenizer_identity(tokenizer), rendering=renderer.version),
        "vocab_size": vocab_size,
    }
    fingerprint = sha256_text(json.dumps(inputs, sort_keys=True))
    directory = recipe.data_dir
    clear_leftovers(directory.parent, directory.name)
    found = _found_manifest(directory)
    if found is not None and found.get("fingerprint") == fingerprint and (directory / "dataset").is_dir():
        counts = found["counts"]
        _check_skipped(recipe, rows=counts["rows"], skipped=sum(counts["skipped"].values()), reasons=_counted(counts))
        console.print(f"data: {directory} is complete and matches the recipe; nothing to do", markup=False)
        return found
    if found is not None:
        why = "; ".join(_differences(found.get("inputs", {}), inputs)) or "its data set is missing"
        console.print(f"data: {directory} is rebuilt: {why}", markup=False)
    tally = Tally()
    with atomic_dir(directory) as temporary:
        _write_samples(recipe, sources, renderer, tally, temporary)
        _check_skipped(recipe, rows=tally.rows, skipped=tally.skipped_rows, reasons=tally.reasons())
        if not tally.split_samples["train"]:
            raise EagleError(
                f"none of the {tally.rows} rows is left to train on (data.validation_fraction = "
                f"{recipe.data.validation_fraction} holds out {tally.samples}); give more conversations or lower it"
            )
        manifest = {
            "format": FORMAT,
            "tokenizer": inputs["tokenizer"],
            "sources": inputs["sources"],
            "max_len": recipe.data.max_len,
            "counts": tally.as_dict(),
            "inputs": inputs,
            "fingerprint": fingerprint,
        }
        (temporary / "recipe.yaml").write_text(yaml.safe_dump(as_dict(recipe), sort_keys=False), encoding="utf-8")
        write_json(temporary / "manifest.json", manifest)
    console.print(tally.table(title=f"data: {directory}"))
    return manifest


def load_prepared(directory: Path | str) -> tuple[datasets.Dataset, dict[str, Any]]:
    """The samples (memory-mapped) and the manifest of a folder that `prepare` made.

    Raises EagleError when it is not there, incomplete, or of another format.
    """
    directory = Path(directory)
    manifest = _found_manifest(directory)
    if manifest is None:
        raise EagleError(f"there is no prepared data in {directory}; make it with `eagle data prepare RECIPE`")
    if manifest.get("format") != FORMAT:
        raise EagleError(
            f"{directory} has data format {manifest.get('format')}, this version reads {FORMAT}; "
            "rebuild it with `eagle data prepare RECIPE`"
        )
    try:
        data = datasets.load_from_disk(str(directory / "dataset"))
    except (OSError, ValueError) as error:
        raise EagleError(
            f"the prepared data in {directory} is damaged ({error}); remove the folder and "
            "run `eagle data prepare RECIPE`"
        ) from error
    assert isinstance(data, datasets.Dataset)
    return data, manifest


def split_of(prompt: str, *, seed: int, validation_fraction: float) -> str:
    """train or validation, by a hash of (seed, prompt): a conversation keeps its side when data is added, and whatever it is
    called; all answers to a prompt (`Conversation.prompt`) are on one side."""
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2**64 else "train"


def _write_samples(recipe: Recipe, sources: list[Source], renderer: Renderer, tally: Tally, directory: Path) -> None:
    cache = directory / "samples.arrow"
    with open(directory / "skipped.jsonl", "w", encoding="utf-8") as skipped:
        writer = ArrowWriter(path=str(cache), features=FEATURES, writer_batch_size=_WRITE_EVERY)
        try:
            for item in _samples(recipe, sources, renderer, tally):
                if isinstance(item, Rejected):
                    row = {"origin": item.origin, "reason": item.reason, "detail": item.detail}
                    skipped.write(json.dumps(row, ensure_ascii=False) + "\n")
                else:
                    writer.write(item)
        finally:
            writer.finalize(close_stream=True)
    if not tally.samples:
        return
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(cache)).save_to_disk(str(directory / "dataset"))
    finally:
        if bars:
            datasets.enable_progress_bars()
    cache.unlink()


def _samples(
    recipe: Recipe, sources: list[Source], renderer: Renderer, tally: Tally
) -> Iterator[dict[str, Any] | Rejected]:
    """Rows to write and rows that are not used, in the order of the sources, up to the limits."""
    config = recipe.data
    total = sum(count_rows(source) for source in sources)
    if config.max_samples is not None:
        total = min(total, config.max_samples)
    with ProgressBar("prepare", total=total, unit="rows") as bar:
        for source in sources:
            for row in read_rows(source):
                tally.rows += 1
                bar.advance(1)
                conversation = row if isinstance(row, Rejected) else read_conversation(row)
                if isinstance(conversation, Rejected):
                    rendered: Any = conversation
                else:
                    rendered = renderer.render(conversation)
                if isinstance(rendered, Rejected):
                    tally.reject(rendered)
                    yield rendered
                    continue
                assert not isinstance(conversation, Rejected)
                tally.keep(rendered)
                split = split_of(conversation.prompt, seed=config.seed, validation_fraction=config.validation_fraction)
                for number, sample in enumerate(rendered.samples):
                    tally.add(sample, split=split)
                    yield {
                        "id": conversation.id if len(rendered.samples) == 1 else f"{conversation.id}#{number}",
                        "input_ids": sample.input_ids,
                        "loss_mask": sample.loss_mask,
                        "length": len(sample.input_ids),
                        "split": split,
                        "origin": conversation.origin,
                        "source": conversation.source,
                    }
                if _limit_reached(recipe, tally):
                    return


def _limit_reached(recipe: Recipe, tally: Tally) -> bool:
    samples, tokens = recipe.data.max_samples, recipe.data.max_supervised_tokens
    return (samples is not None and tally.conversations >= samples) or (
        tokens is not None and tally.supervised_tokens >= tokens
    )


def _check(recipe: Recipe) -> None:
    config = recipe.data
    if not config.sources:
        raise EagleError("data.sources is empty; give files, hub ids or shipped:NAME, e.g. [shipped:smollm2_responses]")
    if not 0 <= config.validation_fraction < 1:
        raise EagleError(f"data.validation_fraction is {config.validation_fraction}, expected 0 <= fraction < 1")
    if not 0 <= config.allow_skipped <= 1:
        raise EagleError(f"data.allow_skipped is {config.allow_skipped}, expected a share between 0 and 1")
    for name in ("max_samples", "max_supervised_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise EagleError(f"data.{name} is {value}, expected at least 1 (or leave it out)")


def _check_skipped(recipe: Recipe, *, rows: int, skipped: int, reasons: str) -> None:
    allowed = recipe.data.allow_skipped
    if skipped > allowed * rows:
        raise EagleError(
            f"{skipped} of {rows} rows ({skipped / rows:.1%}) cannot be used, "
            f"data.allow_skipped permits {allowed:.1%}:\n{reasons}\nmend these rows, or raise data.allow_skipped"
        )


def _inputs(recipe: Recipe, sources: list[Source], tokenizer: dict[str, str], *, rendering: int) -> dict[str, Any]:
    """Everything that the result depends on."""
    return {
        "format": FORMAT,
        "render": rendering,
        "tokenizer": tokenizer,
        "sources": [{"source": source.name, "sha256": source_sha256(source)} for source in sources],
        **settings_of(recipe.data),
    }


def _vocab_size(target: TargetConfig) -> int | None:
    """Rows of the target's embedding; None where only its tokenizer is at hand (extraction asks the model itself)."""
    try:
        return getattr(load_config(target), "vocab_size", None)
    except EagleError:
        return None


def settings_of(config: DataConfig) -> dict[str, Any]:
    """The settings, besides its sources, that prepared data depends on."""
    return {
        "max_len": config.max_len,
        "max_samples": config.max_samples,
        "max_supervised_tokens": config.max_supervised_tokens,
        "validation_fraction": config.validation_fraction,
        "seed": config.seed,
    }


def _found_manifest(directory: Path) -> dict[str, Any] | None:
    path = directory / "manifest.json"
    if not path.is_file():
        if directory.is_dir() and any(directory.iterdir()):
            raise EagleError(f"{directory} holds files but no prepared data; move them away or change output_dir")
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EagleError(f"{path} is not valid JSON ({error}); remove {directory} and prepare again") from error
    assert isinstance(manifest, dict)
    return manifest


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What changed between two `_inputs`, in words."""
    for key, value in new.items():
        before = old.get(key)
        if before == value:
            continue
        if key == "sources":
            names = {item["source"]: item["sha256"] for item in before or []}
            changed = [item["source"] for item in value if names.get(item["source"]) != item["sha256"]]
            gone = sorted(names.keys() - {item["source"] for item in value})
            words = [f"changed or new {', '.join(changed)}"] * bool(changed) + [f"gone {', '.join(gone)}"] * bool(gone)
            yield "sources: " + ("; ".join(words) or "another order")
        elif key == "tokenizer":
            changed = [part for part, sha256 in value.items() if (before or {}).get(part) != sha256]
            yield f"another {' and '.join(part.removesuffix('_sha256').replace('_', ' ') for part in changed)}"
        else:
            yield f"{key} was {before}, is {value}"


def _counted(counts: dict[str, Any]) -> str:
    return "\n".join(f"  {count} x {reason}" for reason, count in counts["skipped"].items())
