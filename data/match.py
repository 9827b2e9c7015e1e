"""Is a feature store the recipe's? What can be told without the target's weights, before a run learns from it.

The weights' hash is compared where the target is loaded anyway (eagle/data/features.py, eagle/train/selection.py).
"""

from collections.abc import Mapping
from typing import Any

from eagle.config import Recipe
from eagle.data.prepare import settings_of
from eagle.data.store import FeatureStore, read_json, require_same
from eagle.errors import EagleError
from eagle.loading import load_architecture, load_config, load_tokenizer, tokenizer_identity

AGAIN = (
    "set it back, or run `eagle data prepare RECIPE` and `eagle features RECIPE` (another output_dir keeps this store)"
)


def require_match(store: FeatureStore, recipe: Recipe) -> None:
    """Raises EagleError when the store is of another target, tokenizer or chat template, or its data is not the recipe's.

    Data: the recipe's prepared data, where it is at hand (a store may be trained on without it), must be what the store
    was extracted from and prepared with these settings.
    """
    manifest, what = store.manifest, f"the feature store {store.directory}"
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
