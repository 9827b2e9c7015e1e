"""Draft-head files in and out, strictly: a missing or stray key is named, never skipped.

A head is a folder (or hub id) with config.json and model.safetensors / pytorch_model.bin (also sharded), in this project's
form or another's: which one, and what each leaves unsaid, is eagle/formats/.
"""

import json
from pathlib import Path
from typing import Any

import torch

from eagle.errors import EagleError
from eagle.files import atomic_dir, sha256_file, sha256_text
from eagle.formats.files import head_folder
from eagle.formats.read import read_head
from eagle.heads.eagle1 import DraftHead
from eagle.heads.eagle3 import Eagle3Head


def load_head(path: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Reads a head of either version and any format. `embed_tokens.weight`, when the file carries it, is left on
    `head.embed_tokens_VH` for the check against the target (`check_fits`); it is not a parameter.

    Raises EagleError: no such head, a damaged file, keys missing or stray (each named), shapes that disagree with config.
    """
    read = read_head(path, revision=revision)
    if read.unknown:
        raise EagleError(
            f"head {path}: its config.json says {', '.join(read.unknown)}, and whether a head computes otherwise for that is not "
            "known here; remove what changes nothing, or import the head first (eagle import), which takes it and says so"
        )
    if "lm_head.weight" in read.carried:
        raise EagleError(
            f"head {path} carries an lm_head.weight, which an EAGLE-1 head has not got: it uses its target's; "
            "`eagle import` compares the two and leaves it out"
        )
    read.head.embed_tokens_VH, read.head.folder = read.carried.get("embed_tokens.weight"), read.files.folder
    return read.head.to(dtype)


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    extra: dict[str, Any] | None = None,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Writes config.json and model.safetensors (and `extra` as training.json) as one atomic folder.

    weights: the state dict to write instead of the head's own, which may be spread over processes.
    """
    with atomic_dir(Path(folder)) as temporary:
        head.save_pretrained(temporary, state_dict=weights)
        if extra is not None:
            (temporary / "training.json").write_text(json.dumps(extra, indent=2) + "\n", encoding="utf-8")


def head_hash(path: str | Path) -> str:
    """SHA-256 over a local head's config and weight files: results record it."""
    folder = head_folder(path)
    files = sorted(
        file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json"
    )
    return sha256_text("".join(f"{file.name}{sha256_file(file)}" for file in files))


def check_fits(head: DraftHead, target: Any) -> None:
    """Raises EagleError when the head was made for another target (`target`: an eagle.target.target.Target).

    Widths and vocabularies must agree, and so must the layers that an EAGLE-3 head looks at, which are settled here when its
    config names none; embeddings that came with the head must be the target's; a recorded identity must match.
    """
    if head.config.hidden_size != target.hidden_size:
        raise EagleError(
            f"the head is for features of width {head.config.hidden_size}, target {target.name} has {target.hidden_size}; "
            "use the head's own target, or train one for this target"
        )
    size = head.config.vocab_size
    if size != target.vocab_size:
        what = "LM head has" if isinstance(head, Eagle3Head) else "vocabulary has"
        if head.config.draft_vocab_size is not None:
            what = "draft vocabulary is a part of"
        raise EagleError(
            f"the head's {what} {size} tokens, target {target.name} has {target.vocab_size}; use the head's own target, or "
            "train one for this target"
        )
    if isinstance(head, Eagle3Head):
        head.bind(target.num_layers, family=target.model_type)
    embeddings, head.embed_tokens_VH = head.embed_tokens_VH, None
    if embeddings is not None:
        own = target.tokens.embedding_VH
        same_shape = embeddings.shape == own.shape
        if not same_shape or not torch.allclose(embeddings.float(), own.detach().cpu().float(), rtol=1e-2, atol=1e-3):
            raise EagleError(
                f"the head's embed_tokens.weight {tuple(embeddings.shape)} is not that of target {target.name} "
                f"{tuple(own.shape)}: it was trained for another model (use that one), or has trained embeddings of its own, "
                "which heads here have not got"
            )
    recorded = head.config.target_identity
    if recorded:
        identity = target.identity()
        for field in ("architecture", "vocab_size", "weights_sha256"):
            if recorded.get(field) not in (None, identity[field]):
                raise EagleError(
                    f"the head was trained for {recorded.get('model')} ({field} {recorded[field]}), the target is "
                    f"{target.name} ({field} {identity[field]}); use the head's own target, or train one for this target"
                )
