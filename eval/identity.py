"""What must be the same for earlier results, or answers, to stand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.config import Recipe, as_dict
from eagle.draft.tuning import FILE
from eagle.environment import hardware, package_version, versions
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.prompt_set import prompts_sha256
from eagle.files import sha256_file, stamp
from eagle.formats.checkpoint import head_hash
from eagle.formats.files import head_folder
from eagle.target.loading import tokenizer_identity
from eagle.target.target import Target

ONLY_OF_RESULTS = ("batches", "check_rows", "ledger")
"""Keys of eval that no answer depends on."""
CHOOSES_PROMPTS = ("prompts", "limit", "tasks", "split")
"""Keys of eval that say which prompts are answered, not how: answers to prompts that are still asked stand."""


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
        **_files(recipe),
        "hardware": hardware(),
        "libraries": {name: version for name, version in versions().items() if name in ("torch", "transformers")},
    }


def text_identity(target: Target) -> dict[str, Any]:
    """What the target's text depends on: its weights, its tokenizer with the chat template, and the ids that end an answer.

    To be asked before the tokenizer is used: how it pads and truncates is part of its hash, and changes with its calls.
    """
    tokenizer = {} if target.tokenizer is None else tokenizer_identity(target.tokenizer)
    return {**target.identity(), **tokenizer, "eos_token_ids": list(target.eos_token_ids)}


def answers_identity(identity: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for earlier answers to stand; target: `text_identity`, which knows its files' contents."""
    left_out = (*ONLY_OF_RESULTS, *CHOOSES_PROMPTS)
    settings = {key: value for key, value in identity["eval"].items() if key not in left_out}
    kept = {key: value for key, value in identity.items() if key not in ("prompts_sha256", "target_files")}
    return {**kept, "eval": settings, "weights": dict(target)}


def _tuned(head: str | Path | None) -> dict[str, str]:
    """Trees tuned since then are other trees."""
    path = None if head is None else head_folder(head) / FILE
    return {"tuned_sha256": sha256_file(path)} if path is not None and path.is_file() else {}


def _files(recipe: Recipe) -> dict[str, str]:
    """What local files that the recipe names hold, beyond the head's: they may have been written anew under the same name."""
    drafter = recipe.decode.drafter
    small = {"tree_file": getattr(drafter, "tree_file", None), "chat_template": recipe.data.chat_template}
    large = {
        "target": recipe.target.model,
        "draft_model": recipe.eval.draft_model or getattr(drafter, "model", None),
    }
    found = {f"{key}_sha256": sha256_file(Path(path)) for key, path in small.items() if path and Path(path).is_file()}
    return found | {f"{key}_files": stamp(Path(path)) for key, path in large.items() if path and Path(path).exists()}
