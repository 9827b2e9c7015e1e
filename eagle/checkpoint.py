"""Draft-head files in and out, strictly: a missing or stray key is named, never skipped.

A head is a folder (or hub id) with config.json and model.safetensors / pytorch_model.bin (also sharded). Two dialects
of config.json are read: this project's (`model_type: eagle_head`, `eagle3_head`) and the reference's (a Llama config with
one layer). The version is told by the model type, else by the tensors (`midlayer.*`: EAGLE-3), and so are biases, because
published configs do not always tell them (`fc.bias`, Qwen2-style q/k/v biases).

An EAGLE-3 config may say which layers its head looks at, c = number of layers applied: `aux_layers` here; published ones
have `eagle_aux_hidden_state_layer_ids`, c at the top level (vLLM, speculators), c - 1 inside `eagle_config` (SGLang,
SpecForge). One that says nothing means the published choice for its target (Eagle3Head.bind, called by `check_fits`).
"""

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import load_file

from eagle.eagle3_head import Eagle3Head, Eagle3HeadConfig
from eagle.errors import EagleError
from eagle.files import atomic_dir, sha256_file, sha256_text
from eagle.heads import DraftHead, EagleHead, EagleHeadConfig
from eagle.reading import BROKEN, read_object, reason, shard_names
from eagle.vocab import DraftVocabulary

_IGNORED = ("rotary.inv_freq", "rotary.original_inv_freq")
_IGNORED_ENDING = ".rotary_emb.inv_freq"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NAMES = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3"}
_REMEDY = "fetch or save the head again"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def load_head(path: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> DraftHead:
    """Reads a head of either version. `embed_tokens.weight`, when the file carries it, is left on `head.embed_tokens_VH`
    for the check against the target (`check_fits`); it is not a parameter.

    Raises EagleError: no such head, a damaged file, keys missing or stray (each named), shapes that disagree with config.
    """
    folder = _folder(path, revision)
    values = _read_values(folder)
    state = {
        key: value
        for key, value in _read_weights(folder).items()
        if key not in _IGNORED and not key.endswith(_IGNORED_ENDING)
    }
    embeddings = state.pop("embed_tokens.weight", None)
    head = _blank_head(values, state, folder / "config.json")
    expected = head.state_dict()
    missing, stray = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or stray:
        raise EagleError(
            f"head {path} is not an {_NAMES[head.version]} head: missing keys: {', '.join(missing) or 'none'}; "
            f"stray keys: {', '.join(stray) or 'none'}; expected exactly {', '.join(sorted(expected))} "
            "(embed_tokens.weight, fc.bias (EAGLE-1) and q/k/v biases are optional; d2t and t2d are there exactly when "
            "config.json has a draft_vocab_size below its vocab_size)"
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
    if head.config.draft_vocab_size is not None:
        DraftVocabulary.from_tensors(state["d2t"], state["t2d"], where=f"head {path}")
    head.load_state_dict(state)
    head.embed_tokens_VH = embeddings
    return head.to(dtype).eval()


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
    folder = _folder(path, None)
    files = sorted(
        file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin") or file.name == "config.json"
    )
    return sha256_text("".join(f"{file.name}{sha256_file(file)}" for file in files))


def check_fits(head: DraftHead, target: Any) -> None:
    """Raises EagleError when the head was made for another target (`target`: an eagle.target.Target).

    Widths must agree, and so must the vocabulary that a reduced one is a part of (an EAGLE-3 head's LM head, when it has
    all tokens) and the layers that an EAGLE-3 head looks at, which are settled here when its config names none; embeddings
    that came with the head must be the target's; a recorded identity must match.
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
    if isinstance(head, Eagle3Head):
        if head.vocabulary is None and head.lm_head.out_features != target.vocab_size:
            raise EagleError(
                f"the head's LM head has {head.lm_head.out_features} tokens, target {target.name} has {target.vocab_size}; "
                "use the head's own target, or train one for this target"
            )
        head.bind(target.num_layers)
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


def _read_values(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise EagleError(f"head {folder} has no config.json; expected a folder with config.json and weights")
    values = read_object(file, remedy=_REMEDY)
    layers = values.get("num_hidden_layers", 1)
    if layers != 1:
        raise EagleError(
            f"{file}: num_hidden_layers is {layers}, an EAGLE head has 1; is this the target's own folder?"
        )
    return values


def _blank_head(values: dict[str, Any], state: dict[str, torch.Tensor], file: Path) -> DraftHead:
    """A head of the version and shape that config.json's values and the tensors tell, its weights not yet loaded."""
    kind = values.get("model_type")
    is_eagle3 = kind == Eagle3HeadConfig.model_type
    if kind not in (EagleHeadConfig.model_type, Eagle3HeadConfig.model_type):  # the reference's Llama config
        is_eagle3 = any(key.startswith("midlayer.") for key in state)
        # The reference rotates with theta 10000 when its config names none, whatever the target does.
        values.setdefault("rope_theta", 10000.0)
    for key in ("model_type", "architectures", "transformers_version", "torch_dtype", "dtype", "bias"):
        values.pop(key, None)
    values["tie_word_embeddings"] = False
    layer = "midlayer" if is_eagle3 else "layers.0"
    values["attention_bias"] = f"{layer}.self_attn.q_proj.bias" in state
    values["mlp_bias"] = f"{layer}.mlp.gate_proj.bias" in state
    if is_eagle3:
        values["aux_layers"] = _aux_layers(values, file)
        if values.get("draft_vocab_size") == values.get("vocab_size") and "d2t" not in state:
            values["draft_vocab_size"] = None
        width = values.pop("target_hidden_size", None)
        if width not in (None, values.get("hidden_size")):
            raise EagleError(
                f"{file}: target_hidden_size is {width}, hidden_size {values.get('hidden_size')}; heads narrower or wider "
                "than their target's features are not supported"
            )
    else:
        values["fc_bias"] = "fc.bias" in state
    try:
        return Eagle3Head(Eagle3HeadConfig(**values)) if is_eagle3 else EagleHead(EagleHeadConfig(**values))
    except EagleError as error:
        raise EagleError(f"{file}: {error}") from error
    except BROKEN as error:
        raise EagleError(f"{file} describes no head ({reason(error)}); mend that value, or {_REMEDY}") from error


def _aux_layers(values: dict[str, Any], file: Path) -> list[int] | None:
    """Takes the layer ids out of config.json's values: numbers of layers applied, or None when it names none."""
    nested = values.pop("eagle_config", None)
    below = nested.get(_LAYER_IDS) if isinstance(nested, dict) else None
    top, own = values.pop(_LAYER_IDS, None), values.pop("aux_layers", None)
    for ids in (own, top, below):
        if ids is not None and (not isinstance(ids, list) or not all(type(c) is int for c in ids) or not ids):
            raise EagleError(f"{file}: {ids!r} are no layer ids, expected a list of whole numbers such as [2, 16, 29]")
    if own is not None or top is not None:
        return own if own is not None else top
    return None if below is None else [c + 1 for c in below]


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            shards = shard_names(index, remedy=_REMEDY)
            return {key: value for shard in shards for key, value in _read_tensors(folder / shard).items()}
        if (folder / name).is_file():
            return _read_tensors(folder / name)
    raise EagleError(f"head {folder} has no weights; expected {' or '.join(_WEIGHTS)} (or their sharded form)")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except BROKEN as error:
        raise EagleError(f"{file} cannot be read ({reason(error)}): it is damaged or cut short; {_REMEDY}") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise EagleError(
            f"{file} holds a {type(state).__name__}, expected a dict of tensors (a module's state_dict); {_REMEDY}"
        )
    return dict(state)
