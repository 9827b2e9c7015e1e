"""Draft-head files in and out, strictly: a missing or stray key is named, never skipped.

A head is a folder (or hub id) with config.json and model.safetensors / pytorch_model.bin (also sharded). Two dialects
of config.json are read: this project's (`model_type: eagle_head`) and the reference's (a Llama config with one layer and
`bias`). Biases are inferred from the tensors, because published configs do not always tell (facts: `fc.bias`, Qwen2-style
q/k/v biases).
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file

from eagle.errors import EagleError
from eagle.files import atomic_dir, sha256_file, sha256_text
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.vocab import DraftVocabulary

_IGNORED = ("rotary.inv_freq", "rotary.original_inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def load_head(path: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> EagleHead:
    """Reads a head. `embed_tokens.weight`, when the file carries it, is left on `head.embed_tokens_VH` for the check
    against the target (`check_fits`); it is not a parameter.

    Raises EagleError: no such head, a damaged file, keys missing or stray (each named), shapes that disagree with config.
    """
    folder = _folder(path, revision)
    config = _read_config(folder)
    state = {key: value for key, value in _read_weights(folder).items() if key not in _IGNORED}
    embeddings = state.pop("embed_tokens.weight", None)
    config.fc_bias = "fc.bias" in state
    config.attention_bias = "layers.0.self_attn.q_proj.bias" in state
    config.mlp_bias = "layers.0.mlp.gate_proj.bias" in state
    head = EagleHead(config)
    expected = head.state_dict()
    missing, stray = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or stray:
        raise EagleError(
            f"head {path} is not an EAGLE-1/2 head: missing keys: {', '.join(missing) or 'none'}; "
            f"stray keys: {', '.join(stray) or 'none'}; expected exactly {', '.join(sorted(expected))} "
            "(embed_tokens.weight, fc.bias and q/k/v biases are optional; d2t and t2d are there exactly when config.json says "
            "draft_vocab_size)"
        )
    wrong = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(expected[key].shape)}"
        for key in expected
        if state[key].shape != expected[key].shape
    ]
    if wrong:
        raise EagleError(
            f"head {path}: its tensors disagree with its config.json: {'; '.join(wrong)}; take both from one source"
        )
    if config.draft_vocab_size is not None:
        DraftVocabulary.from_tensors(state["d2t"], state["t2d"], where=f"head {path}")
    head.load_state_dict(state)
    head.embed_tokens_VH = embeddings
    return head.to(dtype).eval()


def save_head(head: EagleHead, folder: str | Path, *, extra: dict[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors (and `extra` as training.json) as one atomic folder."""
    with atomic_dir(Path(folder)) as temporary:
        head.save_pretrained(temporary)
        if extra is not None:
            (temporary / "training.json").write_text(json.dumps(extra, indent=2) + "\n", encoding="utf-8")


def head_hash(path: str | Path) -> str:
    """SHA-256 over a local head's config and weight files: results record it."""
    folder = _folder(path, None)
    files = sorted(
        file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json"
    )
    return sha256_text("".join(f"{file.name}{sha256_file(file)}" for file in files))


def check_fits(head: EagleHead, target: Any) -> None:
    """Raises EagleError when the head was made for another target (`target`: an eagle.target.Target).

    Widths must agree, and so must the vocabulary that a reduced one is a part of; embeddings that came with the head must
    be the target's; a recorded identity must match.
    """
    if head.config.hidden_size != target.hidden_size:
        raise EagleError(
            f"the head is for features of width {head.config.hidden_size}, target {target.name} has {target.hidden_size}; "
            "use the head's own target, or train one for this target"
        )
    if head.vocabulary is not None and head.vocabulary.target_size != target.vocab_size:
        raise EagleError(
            f"the head's draft vocabulary is a part of {head.vocabulary.target_size} tokens, target {target.name} has "
            f"{target.vocab_size}; use the head's own target, or train one for this target"
        )
    embeddings, head.embed_tokens_VH = head.embed_tokens_VH, None
    if embeddings is not None:
        own = target.tokens.embedding_VH
        same_shape = embeddings.shape == own.shape
        if not same_shape or not torch.allclose(embeddings.float(), own.detach().cpu().float(), rtol=1e-2, atol=1e-3):
            raise EagleError(
                f"the head's embed_tokens.weight {tuple(embeddings.shape)} is not that of target {target.name} "
                f"{tuple(own.shape)}: it was trained for another model; use that one"
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


def _folder(path: str | Path, revision: str | None) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    try:
        return Path(
            snapshot_download(str(path), revision=revision, allow_patterns=["*.json", "*.safetensors", "*.bin"])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise EagleError(f"head {path}: no such folder, and no such hub id can be reached; give either") from error


def _read_config(folder: Path) -> EagleHeadConfig:
    file = folder / "config.json"
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise EagleError(f"head {folder} has no config.json; expected a folder with config.json and weights") from error
    except json.JSONDecodeError as error:
        raise EagleError(f"{file} is not valid JSON ({error}); fetch or save the head again") from error
    if values.get("model_type") != EagleHeadConfig.model_type:  # the reference's Llama config
        # The reference rotates with theta 10000 when its config names none, whatever the target does.
        values.setdefault("rope_theta", 10000.0)
    for key in ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "bias"):
        values.pop(key, None)
    layers = values.get("num_hidden_layers", 1)
    if layers != 1:
        raise EagleError(
            f"{file}: num_hidden_layers is {layers}, an EAGLE head has 1; is this the target's own folder?"
        )
    try:
        return EagleHeadConfig(**values)
    except (TypeError, ValueError) as error:
        raise EagleError(f"{file}: {str(error).strip().splitlines()[0]}") from error


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return {key: value for shard in shards for key, value in _read_tensors(folder / shard).items()}
        if (folder / name).is_file():
            return _read_tensors(folder / name)
    raise EagleError(f"head {folder} has no weights; expected {' or '.join(_WEIGHTS)} (or their sharded form)")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise EagleError(
            f"{file} cannot be read ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}): "
            "it is damaged or cut short; fetch or save the head again"
        ) from error
