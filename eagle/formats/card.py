"""The README.md of an exported head: what it is, how it was made and measured, how it is served."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from eagle.formats.format import VERSION_NAMES, Format, Version
from eagle.train_config import GLOBAL_BATCH

_TRAIN = (
    *("epochs", "max_steps", "lr", "schedule", "warmup_steps", "batch_size", "gradient_accumulation", "precision"),
    *("unroll_steps", "distill_weight", "divergence", "features"),
)
_HEAD = ("version", "draft_vocab_size", "aux_layers", "fc_bias", "init_from")
_FOLDERS = re.compile(r"(?<![\w.:/])~?/(?:[\w.+@-]+/)+(?=[\w.+@-])")
"""The folders before the last part of an absolute path, wherever one stands in a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """What a card tells."""

    version: Version
    format: Format
    weights: int
    dtype: str
    target: str
    """Its public name."""
    target_identity: Mapping[str, Any]
    """As Target.identity, as far as it is known."""
    target_revision: str | None
    training: Mapping[str, Any]
    """The head's training.json; {}: none."""
    sources: Sequence[str] | None = None
    """Where the conversations came from, of every store that was trained on; None: what training.json says of the first."""
    results: str | None
    """Markdown of what was measured, hardware included; None: nothing was."""
    license: str | None
    verified: Sequence[str]
    """What was checked, a sentence each."""
    notes: Sequence[str]
    serve: str
    needs: str | None = None
    """What must be installed for that, a sentence."""
    advice: str | None = None
    """What else a user of `serve` should know, a paragraph."""
    draft_tokens: int | None
    """Of a reduced vocabulary."""
    aux_layers: Sequence[int]


def model_card(card: Card) -> str:
    """Markdown with a YAML front matter, as the hub reads it."""
    sources = _sources(card)
    datasets = _hub_datasets(sources)
    kind = "eagle3" if card.version == "eagle3" else "eagle"
    front = {
        "license": card.license or "other",
        **({} if card.license else {"license_name": "unknown"}),
        "base_model": card.target,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(("speculative-decoding", "draft-head", kind, card.format.name))),
        **({"datasets": datasets} if datasets else {}),
    }
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["bullets"] = lambda lines: "\n".join(f"- {line}" for line in lines)
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        card=card,
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        name=VERSION_NAMES[card.version],
        own=card.format.name == "eagle",
        target=_target(card),
        data=_data(card),
        recipe=_recipe(card.training),
        shipped=any(str(source).startswith("shipped:") for source in sources),
    )


def _target(card: Card) -> list[str]:
    identity = card.target_identity
    found = [f"model: {card.target}", f"revision: {card.target_revision or 'not recorded'}"]
    found += [
        f"{key}: {identity[key]}"
        for key in ("architecture", "num_layers", "hidden_size", "vocab_size")
        if key in identity
    ]
    loaded = public(str(identity.get("model") or card.target))
    if loaded != card.target:
        dtype = section(card.training, "target").get("dtype")
        kept = "float32" if dtype in (None, "auto") else dtype
        own = (
            f": that file's weights, dequantised to {kept}, not those of {card.target}"
            if loaded.endswith(".gguf")
            else ""
        )
        found.insert(1, f"loaded as {loaded}{own}")
    digest = identity.get("weights_sha256")
    return [*found, f"weights (hash over samples of every tensor): {digest or 'not recorded'}"]


def _data(card: Card) -> list[str]:
    training = card.training
    if "imported_from" in training:
        return [f"imported from {_last(training['imported_from'])} ({training.get('format')}): see there"]
    data = section(training, "data")
    if not data:
        return ["not recorded"]
    found = [f"sources: {', '.join(map(_last, _sources(card))) or 'not recorded'}"]
    more = section(training, "features").get("more_stores")
    if card.sources is None and isinstance(more, (list, tuple)) and more:
        found += [f"and those of {len(more)} more feature stores, which are not recorded here"]
    counts = training.get("learnt_from")
    if isinstance(counts, Mapping):
        found += [
            f"trained on {counts['documents']:,} documents of {counts['tokens']:,} tokens, {counts['supervised_tokens']:,} of "
            "them supervised (the assistant's)"
        ]
    found += [
        f"{key}: {data[key]}"
        for key in ("max_len", "max_samples", "max_supervised_tokens")
        if data.get(key) is not None
    ]
    return found


def _recipe(training: Mapping[str, Any]) -> list[str]:
    if "imported_from" in training:
        return ["of the project it was imported from"]
    train, head = section(training, "train"), section(training, "head")
    if not train:
        return ["not recorded"]
    found = [f"{key}: {train[key]}" for key in _TRAIN if train.get(key) is not None]
    identity = training.get("identity")
    if isinstance(identity, Mapping) and GLOBAL_BATCH in identity:
        found += [f"documents a step: {identity[GLOBAL_BATCH]} (batch_size x gradient_accumulation x processes)"]
    found += [f"head.{key}: {_last(head[key])}" for key in _HEAD if head.get(key) not in (None, False)]
    metrics = training.get("metrics")
    if isinstance(metrics, Mapping):
        found += [f"steps: {training.get('step')}"]
        depths = metrics.get("val_agreement")
        drafts = f"{len(depths)} drafts" if isinstance(depths, list) else "drafts"
        words = {
            "val_top1_agreement": "val_top1_agreement",
            "val_tau": f"estimated tau of a chain of {drafts}, on held-out conversations of the training mixture",
        }
        found += [f"{words[key]}: {metrics[key]:.3f}" for key in words if isinstance(metrics.get(key), float)]
    return found


def section(training: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of the recipe in a training.json; {} where there is none."""
    recipe = training.get("recipe")
    found = recipe.get(name) if isinstance(recipe, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def public(value: Any) -> Any:
    """A text, or all texts of a JSON value, without the folders of the machine it was made on."""
    if isinstance(value, Mapping):
        return {public(key): public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public(item) for item in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _sources(card: Card) -> Sequence[Any]:
    if card.sources is not None:
        return card.sources
    found = section(card.training, "data").get("sources")
    return found if isinstance(found, (list, tuple)) else ()


def _last(source: Any) -> str:
    """A path's last part; any other source as it is."""
    text = str(source)
    return PurePath(text).name if text.startswith(("/", "~", ".")) else text


def _hub_datasets(sources: Sequence[Any]) -> list[str]:
    """Sources that are ids of the hub."""
    return [
        text
        for text in dict.fromkeys(map(str, sources))
        if text.count("/") == 1
        and ":" not in text
        and not text.startswith((".", "/", "~"))
        and not PurePath(text).suffix
    ]
