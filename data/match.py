"""Is a feature store the recipe's? What can be told without loading the target, before a run learns from it.

Whether the weights are the same is told from samples of their files (eagle/data/target_files.py). Only where those speak
against it, or cannot be had while the target's name has changed, the target is loaded once and its weights' hash compared.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle.config import Recipe
from eagle.data.prepare import settings_of
from eagle.data.store import STAMP, FeatureStore, read_json, require_same
from eagle.data.target_files import weights_stamp
from eagle.errors import EagleError
from eagle.files import write_json
from eagle.progress import console
from eagle.target.loading import load_architecture, load_config, load_model, load_tokenizer, tokenizer_identity
from eagle.target.target import weights_hash

AGAIN = (
    "set it back, or run `eagle data prepare RECIPE` and `eagle features RECIPE` (another output_dir keeps this store)"
)


def require_match(store: FeatureStore, recipe: Recipe) -> None:
    """Raises EagleError when the store is of another target, tokenizer or chat template, or its data is not the recipe's.

    Data: the recipe's prepared data, where it is at hand (a store may be trained on without it), must be what the store
    was extracted from and prepared with these settings.
    """
    manifest, what = store.manifest, store.name
    facts = _target_facts(recipe)
    known = {key: value for key, value in facts.items() if key in (store.target_identity or {})}
    require_same(manifest, {"target": known}, what=f"{what} (target.model is {recipe.target.model})", remedy=AGAIN)
    if "tokenizer" in manifest:
        tokenizer = tokenizer_identity(load_tokenizer(recipe.target, recipe.data.chat_template))
        require_same(manifest, {"tokenizer": tokenizer}, what=what, remedy=AGAIN)
    prepared = recipe.data_dir / "manifest.json"
    if "data" in manifest and prepared.is_file():
        data = read_json(prepared)
        if data.get("fingerprint") != manifest["data"]:
            raise EagleError(
                f"{what} does not match: it was extracted from other prepared data (fingerprint {_short(manifest['data'])}) than "
                f"{recipe.data_dir} holds ({_short(data.get('fingerprint'))}); {AGAIN}"
            )
        settings = {key: value for key, value in settings_of(recipe.data).items() if key in data.get("inputs", {})}
        require_same(data["inputs"], settings, what=f"the prepared data {recipe.data_dir}", remedy=AGAIN)
    _require_weights(store, recipe)


def _require_weights(store: FeatureStore, recipe: Recipe) -> None:
    """Refuses a target of the same shape with other weights; that they are the same is noted in the store's manifest."""
    recorded, name = store.target_identity or {}, recipe.target.model
    if not recorded.get("weights_sha256"):
        return
    stamp, same_name = store.manifest.get(STAMP), recorded.get("model") == name
    if stamp is None and same_name:
        return  # extracted where the target had no files to stamp
    now = weights_stamp(recipe.target)
    if now == stamp or (now is None and same_name):
        return  # the same files, or none here to compare
    why = f"the files of {name} are not those" if same_name else f"target.model is {name}, not {recorded.get('model')}"
    console.print(
        f"features: {why} that {store.name} was extracted with; loading {name} once to compare the weights themselves",
        markup=False,
        soft_wrap=True,
    )
    try:
        digest = weights_hash(load_model(dataclasses.replace(recipe.target, device="cpu")))
    except EagleError as error:
        raise EagleError(
            f"{why} that {store.name} was extracted with, and whether its weights are the same cannot be told: {error}; put "
            "its weights there, or set target.model back"
        ) from error
    if digest != recorded["weights_sha256"]:
        raise EagleError(
            f"{store.name} does not match: it has features of {recorded.get('model')} (weights "
            f"{_short(recorded['weights_sha256'])}), but target.model is {name} (weights {_short(digest)} in target.dtype "
            f"{recipe.target.dtype}), of the same shape; "
            f"{AGAIN}"
        )
    if now is not None:
        store.manifest[STAMP] = now
        try:
            write_json(store.directory / "manifest.json", store.manifest)
        except OSError:
            return  # a store that may not be written to: the next start compares again


def _target_facts(recipe: Recipe) -> Mapping[str, Any]:
    """What its configuration alone tells of `Target.identity()`."""
    config = load_config(recipe.target)
    facts = {
        "architecture": load_architecture(recipe.target),
        "hidden_size": getattr(config, "hidden_size", None),
        "num_layers": getattr(config, "num_hidden_layers", None),
        "vocab_size": getattr(config, "vocab_size", None),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _short(fingerprint: object) -> str:
    return str(fingerprint)[:12]
