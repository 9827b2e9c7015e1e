"""A head of ours -> the files that another loader takes, or the reasons why it would not compute the same.

config.json and the tensors follow the format's tables (Format.limits); what the format cannot hold is in SIDECAR, which
`eagle import` reads back and runtimes ignore. H hidden, V vocabulary, D draft vocabulary, c layers applied.
"""

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle.environment import package_version
from eagle.errors import EagleError
from eagle.files import atomic_dir
from eagle.formats.format import EAGLE_CONFIG, LAYER_IDS, SIDECAR, VERSION_NAMES, Format, Limits
from eagle.formats.keys import LAYER_CONFIG
from eagle.formats.reference import REFERENCE
from eagle.formats.rope import write_rope
from eagle.formats.serve import options_file, serve_command
from eagle.formats.sglang import HOT_TOKENS, SGLANG
from eagle.formats.speculators import MODEL_TYPE, SPECULATORS, VERSION
from eagle.formats.target_facts import TargetFacts, settings_told
from eagle.formats.targets import unserved
from eagle.formats.trtllm import OPTIONS, TRTLLM
from eagle.formats.window import write_window
from eagle.heads.eagle1 import DraftHead, EagleHead
from eagle.heads.eagle3 import LOW_MID_HIGH, Eagle3Head
from eagle.heads.layer_ids import published_layers, sglang_default, sglang_ids

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "max_position_embeddings", "initializer_range"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """Everything an exported folder holds, in memory."""

    format: Format
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    sidecar: dict[str, Any]
    notes: tuple[str, ...]
    """What the format loses, or needs."""
    serve: str
    """How the runtime is started with it."""
    hot_tokens: list[int] | None = None
    """SGLang: EAGLE-1's draft tokens."""
    options: str | None = None
    """TensorRT-LLM: its YAML file."""

    @property
    def drops_vocabulary(self) -> bool:
        """Whether the runtime drafts over more tokens than the head does here."""
        return "draft_token_ids" in self.sidecar and self.hot_tokens is None


def export_head(
    head: DraftHead,
    format: Format,
    target: TargetFacts,
    *,
    folder: str,
    uploaded: bool = False,
    dtype: str = "bfloat16",
    verifier: str | None = None,
    tokens: int = 3,
) -> Export:
    """The files of a head (whose fit to the target was checked) in a format.

    folder: where they will lie; uploaded: it is a hub repository. dtype: of the weights. verifier: the target's name that files
    and command carry (default: the one it was loaded by). tokens: drafted per step, where files and command say it.
    Raises EagleError, every reason named, where the format's loader would not compute what the head computes.
    """
    limits, identity = format.limits.get(head.version), head.config.target_identity
    if verifier is None:
        verifier = target.name
    elif identity:  # files that carry the public name carry no other
        identity = {**identity, "model": verifier}
    if limits is None:
        raise EagleError(
            f"{VERSION_NAMES[head.version]} heads are not exported --to {format.name}: {format.unsupported[head.version]}"
        )
    reasons = refusals(head, limits, target)
    nested, family = None, (target.model_type, target.num_layers)
    if isinstance(head, Eagle3Head) and format is SGLANG and list(head.aux_layers) != sglang_default(*family):
        nested = sglang_ids(head.aux_layers, *family)
    if reasons:
        raise EagleError(f"{format.title} cannot take this head: {'; '.join(reasons)}")
    tensors = _tensors(head, format, limits, target, DTYPES[dtype])
    config = _config(head, format, limits, target, dtype=dtype, nested=nested)
    if format is SPECULATORS:
        config = _speculators_config(config, head, target, verifier=verifier, tokens=tokens)
    vocabulary = head.vocabulary
    ids = None if vocabulary is None else vocabulary.target_ids_D.tolist()
    dropped = ids if isinstance(head, EagleHead) else None
    sidecar = {
        "to": format.name,
        "version": head.version,
        "written_by": f"eagle-draft-toolkit {package_version()}",
        "draft_coverage": head.config.draft_coverage,
        "target_identity": identity,
        "target_settings": settings_told(target.settings) or None,
        "draft_token_ids": dropped,
    }
    return Export(
        format=format,
        config=config,
        tensors=tensors,
        sidecar={key: value for key, value in sidecar.items() if value is not None},
        notes=_notes(head, format, target, dropped=dropped is not None),
        serve=serve_command(
            format,
            head.version,
            folder,
            verifier,
            tokens=tokens,
            hot_tokens=format is SGLANG and dropped is not None,
            uploaded=uploaded,
            unspelled_rope=target.unspelled_rope if format is REFERENCE else {},
        ),
        hot_tokens=dropped if format is SGLANG else None,
        options=options_file(head, folder=folder, tokens=tokens)
        if format is TRTLLM and isinstance(head, Eagle3Head)
        else None,
    )


def write_export(
    export: Export, folder: str | Path, *, finish: Callable[[Path], Mapping[str, str]] | None = None
) -> None:
    """Writes the folder atomically. finish: called with the written files' folder, returns more files (README.md), by name;
    what it raises leaves nothing behind."""
    with atomic_dir(Path(folder)) as temporary:
        save_file(export.tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        _write_object(temporary / "config.json", export.config)
        _write_object(temporary / SIDECAR, export.sidecar)
        if export.hot_tokens is not None:
            packed = io.BytesIO()
            torch.save(export.hot_tokens, packed)
            (temporary / HOT_TOKENS).write_bytes(packed.getvalue())  # torch.save to a full disk raises no OSError
        if export.options is not None:
            (temporary / OPTIONS).write_text(export.options, encoding="utf-8")
        for name, text in ({} if finish is None else finish(temporary)).items():
            (temporary / name).write_text(text, encoding="utf-8")


def drop_idle_bias(head: DraftHead) -> None:
    """Takes an fc bias that is all zero out of the head, in place: it computes the same, and every format takes it."""
    bias = head.fc.bias
    if isinstance(head, EagleHead) and bias is not None and not bool(bias.any()):
        head.fc.register_parameter("bias", None)
        head.config.fc_bias = False


def refusals(head: DraftHead, limits: Limits, target: TargetFacts) -> list[str]:
    """Why a loader of these limits would not compute what the head computes, each with its remedy; [] when it would."""
    config, found = head.config, []
    if getattr(config, "fc_bias", False) and limits.fc_bias == "no":
        found.append("it has no fc.bias (train with head.fc_bias false, or export it --to reference or sglang)")
    if config.attention_bias and limits.attention_bias == "no":
        found.append("it has no q/k/v biases (export it --to vllm)")
    if config.mlp_bias and not limits.mlp_bias:
        found.append("it has no biases in the MLP (export it --to vllm)")
    kind = config.rope_parameters["rope_type"]
    if kind not in limits.rope_types:
        found.append(f"it reads no RoPE scaling {kind}, only {', '.join(limits.rope_types)} (export it --to vllm)")
    if head.window is not None and not limits.sliding_window:
        found.append(
            f"it reads no attention window from config.json, and this head's is {head.window} positions: behind longer texts it "
            "would draft otherwise (export it --to vllm or speculators)"
        )
    width = config.hidden_size // config.num_attention_heads
    if limits.fixed_head_dim and config.head_dim != width:
        found.append(
            f"its head dim is hidden size / heads = {width}, this head's {config.head_dim} (export it --to vllm or sglang)"
        )
    if isinstance(head, Eagle3Head):
        if head.config.norm_before_residual and not limits.norm_before_residual:
            found.append("its residual is never the normed feature (export it --to vllm or speculators)")
        if len(head.aux_layers) < limits.min_layers:
            found.append("it makes an fc for two layers of the target or more, this head fuses one (train with more)")
        elif 0 in head.aux_layers and not limits.embedding_layer:
            found.append(
                f"it cannot look at the embeddings, this head does (0 of {list(head.aux_layers)}; export it --to vllm)"
            )
        elif limits.default_layers and list(head.aux_layers) != published_layers(target.num_layers):
            found.append(
                f"it always looks at [2, L//2, L-3], this head at {list(head.aux_layers)} (export it --to sglang or vllm)"
            )
    return found


def _is_whole(head: DraftHead) -> bool:
    """Whether the draft vocabulary is the target's, in its order."""
    vocabulary = head.vocabulary
    return vocabulary is None or (vocabulary.size == vocabulary.target_size and not bool(vocabulary.d2t.any()))


def _tensors(
    head: DraftHead, format: Format, limits: Limits, target: TargetFacts, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    state = dict(head.state_dict())
    if "d2t" in state and (isinstance(head, EagleHead) or _is_whole(head)):
        del state["d2t"], state["t2d"]
    width, layer = head.config.hidden_size, "layers.0" if isinstance(head, EagleHead) else "midlayer"
    if limits.fc_bias == "always":
        state.setdefault("fc.bias", torch.zeros(width))
    if head.config.attention_bias and limits.attention_bias == "qkvo":
        state[f"{layer}.self_attn.o_proj.bias"] = torch.zeros(width)
    if limits.embed_tokens:
        state["embed_tokens.weight"] = target.tokens.embedding_VH
    return {
        format.theirs(name, head.version): (value if name in ("d2t", "t2d") else value.to(dtype)).cpu().contiguous()
        for name, value in state.items()
    }


def _config(
    head: DraftHead, format: Format, limits: Limits, target: TargetFacts, *, dtype: str, nested: list[int] | None
) -> dict[str, Any]:
    """config.json in the Llama dialect that all loaders share."""
    config = head.config
    out: dict[str, Any] = {"architectures": [limits.architecture], "model_type": "llama"}
    if config.attention_bias and limits.biased_architecture is not None:
        out = {"architectures": [limits.biased_architecture], "model_type": "qwen2"}
    out |= {key: getattr(config, key) for key in _SHAPE}
    out |= {
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "attention_bias": config.attention_bias and limits.attention_bias == "qkvo",
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": dtype,
        **{key: getattr(target.config, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **write_rope(config.rope_parameters),
        **write_window(head.window),
    }
    if config.attention_bias and limits.attention_bias == "qkv":
        out["qkv_bias"] = True
    if isinstance(head, EagleHead):
        if limits.fc_bias == "optional":
            out["bias"] = head.config.fc_bias
        return out
    assert isinstance(head, Eagle3Head)
    out["draft_vocab_size"] = head.lm_head.out_features
    out[LAYER_IDS] = list(head.aux_layers)
    if len(head.aux_layers) != LOW_MID_HIGH:
        out["num_aux_hidden_states"] = len(head.aux_layers)
    if limits.norm_before_residual:
        out["norm_before_residual"] = head.config.norm_before_residual
    if nested is not None:
        out[EAGLE_CONFIG] = {"use_aux_hidden_state": True, LAYER_IDS: nested}
    return out


def _speculators_config(
    flat: dict[str, Any], head: DraftHead, target: TargetFacts, *, verifier: str, tokens: int
) -> dict[str, Any]:
    """The Llama dialect, nested as speculators nests it: no model_type on top."""
    beside = ("architectures", "draft_vocab_size", LAYER_IDS, "norm_before_residual")
    layer = {key: value for key, value in flat.items() if key not in (*beside, "torch_dtype")}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **{key: flat[key] for key in beside},
        MODEL_TYPE: "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": [target.architecture]},
        },
        "target_hidden_size": head.config.hidden_size,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": flat["torch_dtype"],
        LAYER_CONFIG: layer,
    }


def _notes(head: DraftHead, format: Format, target: TargetFacts, *, dropped: bool) -> tuple[str, ...]:
    found = list(format.notes)
    if dropped and format is SGLANG:
        found.append(
            f"the draft vocabulary of {head.config.draft_vocab_size} tokens is in {HOT_TOKENS}: SGLang drafts with it when "
            "started with --speculative-token-map"
        )
    elif dropped:
        found.append(
            f"the draft vocabulary of {head.config.draft_vocab_size} tokens is dropped (kept for eagle import in {SIDECAR}): "
            f"{format.title} drafts EAGLE-1 with the target's whole LM head, the same head over all {target.vocab_size} "
            "tokens, which makes drafting dearer"
        )
    limit = unserved(format.name, head.version, target.model_type)
    if limit is not None:
        found.append(f"for {target.model_type} targets: {limit.effect}; {limit.remedy}")
    scale = 1.0
    if target.model_type in SCALED_EMBEDDINGS:
        scale = target.tokens.embedding_scale
    if scale != 1.0:
        found.append(
            f"the target multiplies its embeddings by {scale:g} and the head was trained on them so; {format.title}'s draft "
            "layer may not: compare its acceptance with this project's"
        )
    return tuple(found)


SCALED_EMBEDDINGS = ("gemma", "gemma2", "gemma3", "gemma3_text", "granite", "granitemoe")
"""Families that scale the embedding's output."""


def _write_object(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
