"""What must be the same for earlier results, or answers, to stand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.checkpoint import head_hash
from eagle.config import Recipe, as_dict
from eagle.environment import hardware, package_version, versions
from eagle.eval.prompt import Prompt
from eagle.eval.prompt_set import prompts_sha256
from eagle.files import sha256_file
from eagle.tuning import FILE

ONLY_OF_RESULTS = ("batches", "check_rows", "ledger")
"""Keys of eval that no answer depends on."""


def evaluation_identity(recipe: Recipe, head: str | Path | None, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """What must be the same for earlier results to stand. Hardware is in it: times would not mix."""
    return {
        "version": package_version(),
        "target": as_dict(recipe.target),
        "chat_template": recipe.data.chat_template,
        "head_sha256": None if head is None else head_hash(head),
        **_tuned(head),
        "prompts_sha256": prompts_sha256(prompts),
        "eval": as_dict(recipe.eval),
        "decode": as_dict(recipe.decode),
        "hardware": hardware(),
        "libraries": {name: version for name, version in versions().items() if name in ("torch", "transformers")},
    }


def answers_identity(identity: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for earlier answers to stand; target: `Target.identity`."""
    settings = {key: value for key, value in identity["eval"].items() if key not in ONLY_OF_RESULTS}
    return {**identity, "eval": settings, "weights": dict(target)}


def _tuned(head: str | Path | None) -> dict[str, str]:
    """Trees tuned since then are other trees."""
    path = None if head is None else Path(head) / FILE
    return {"tuned_sha256": sha256_file(path)} if path is not None and path.is_file() else {}
