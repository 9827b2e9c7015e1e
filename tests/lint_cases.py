"""Sound head folders for every runtime, written by hand from the runtimes' rules, and one defect per lint rule."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import eagle3_reference as e3
from tests.formats.folders import eagle1_state

H, MLP, V, D = e3.H, e3.MLP, e3.V, e3.D
TARGET_LAYERS = 8
DEFAULT_LAYERS = [2, 4, 5]
Values, State = dict[str, Any], dict[str, torch.Tensor]


def sound(version: str, runtime: str, embedding_VH: torch.Tensor) -> tuple[Values, State]:
    """config.json's values and the tensors of a head that the runtime loads and runs as it was trained."""
    layer = {
        "model_type": "llama", "hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": 1, "hidden_act": "silu",
        "num_attention_heads": e3.HEADS, "num_key_value_heads": e3.KV, "head_dim": e3.d, "rms_norm_eps": e3.EPS,
        "max_position_embeddings": 512, "vocab_size": V, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    }  # fmt: skip
    if version == "eagle1":
        state = eagle1_state()
        names = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "reference": "LlamaForCausalLM"}
        if runtime == "sglang":
            state["fc.bias"] = torch.zeros(H)
        return {**layer, "architectures": [names[runtime]], "bias": False, "torch_dtype": "float32"}, state
    state = e3.random_state()
    if runtime == "speculators":
        state = {key.replace("midlayer.", "layers.0."): value for key, value in state.items()}
        state["embed_tokens.weight"] = embedding_VH.clone()
        greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        return {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [greedy],
                "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            },
            "draft_vocab_size": D, "target_hidden_size": H, "embed_requires_grad": False, "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": DEFAULT_LAYERS, "transformer_layer_config": layer, "dtype": "float32",
        }, state  # fmt: skip
    values = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": D, "torch_dtype": "float32"}
    if runtime != "reference":
        values["eagle_aux_hidden_state_layer_ids"] = DEFAULT_LAYERS
    if runtime == "sglang":
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [c - 1 for c in DEFAULT_LAYERS]}
    return values, state


def write(folder: Path, values: Values, state: State) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors")
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defect:
    """What is done to a sound folder, and which rule must say so."""

    rule: str
    severity: str
    runtime: str
    version: str
    spoil: Callable[[Values, State], None]
    also: tuple[str, ...] = ()
    """Other rules that rightly have a word about it."""

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.runtime}-{self.version}"


def _set(**changes: Any) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        for key, value in changes.items():
            if value is None:
                del values[key]
            else:
                values[key] = value

    return spoil


def _put(**tensors: Callable[[State], torch.Tensor]) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        for key, make in tensors.items():
            state[key.replace("__", ".")] = make(state)

    return spoil


def _with(key: str, index: Any, value: float) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        state[key] = state[key].clone()
        state[key][index] = value

    return spoil


def _drop(key: str) -> Callable[[Values, State], None]:
    return lambda values, state: state.__delitem__(key)


def _rename(old: str, new: str) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        for key in [key for key in state if key.startswith(old)]:
            state[new + key.removeprefix(old)] = state.pop(key)

    return spoil


def _nested(ids: list[int], **top: Any) -> Callable[[Values, State], None]:
    return _set(eagle_config={"eagle_aux_hidden_state_layer_ids": ids}, **top)


def _equal_vocabularies(values: Values, state: State) -> None:
    values["draft_vocab_size"] = V
    state["lm_head.weight"] = torch.randn(V, H)
    state["d2t"], state["t2d"] = torch.zeros(V, dtype=torch.int64), torch.ones(V, dtype=torch.bool)


def _qwen2_without_biases(values: Values, state: State) -> None:
    values |= {"architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}


def _fused(layers: list[int]) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        values["eagle_aux_hidden_state_layer_ids"] = layers
        state["fc.weight"] = torch.randn(H, len(layers) * H)

    return spoil


def _theta_nowhere(values: Values, state: State) -> None:
    del values["rope_theta"], values["rope_parameters"]


def _window(**keys: Any) -> Callable[[Values, State], None]:
    return _set(sliding_window=6, **keys)


_SEES = {"layer_types": ["sliding_attention"]}


def _scaled(kind: str) -> Callable[[Values, State], None]:
    return _set(
        rope_scaling={"rope_type": kind, "factor": 2.0},
        rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0},
    )


def _nested_rope(values: Values, state: State) -> None:
    values["rope_parameters"] = {"full_attention": values["rope_parameters"]}


def _scaled_theta(values: Values, state: State) -> None:
    values["rope_scaling"], values["rope_theta"] = {"type": "linear", "factor": 2.0}, 500000.0
    del values["rope_parameters"]


def _biased_queries(values: Values, state: State) -> None:
    """As EAGLE-1's code would take it."""
    values["qkv_bias"] = True
    state |= {
        f"midlayer.self_attn.{name}_proj.bias": torch.ones(size) for name, size in (("q", 32), ("k", 16), ("v", 16))
    }


def _one_layer(values: Values, state: State) -> None:
    _nested([3], eagle_aux_hidden_state_layer_ids=[4])(values, state)
    state["fc.weight"] = torch.randn(H, H)


def _alone(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values, State], None]:
    """Another d2t, and no t2d that could tell."""

    def spoil(values: Values, state: State) -> None:
        state["d2t"] = change(state["d2t"])
        del state["t2d"]

    return spoil


def _ids(values: Values, state: State) -> None:
    state["d2t"] = state["d2t"] + torch.arange(D)


def _wide_heads(prefix: str, width: int) -> Callable[[Values, State], None]:
    """Heads of twice the size, which config.json tells."""

    def spoil(values: Values, state: State) -> None:
        values["head_dim"] = 2 * e3.d
        for name, heads in (("q", e3.HEADS), ("k", e3.KV), ("v", e3.KV)):
            state[f"{prefix}self_attn.{name}_proj.weight"] = torch.randn(heads * 2 * e3.d, width)
        state[f"{prefix}self_attn.o_proj.weight"] = torch.randn(H, e3.HEADS * 2 * e3.d)

    return spoil


def _layer(key: str, value: Any) -> Callable[[Values, State], None]:
    def spoil(values: Values, state: State) -> None:
        values["transformer_layer_config"][key] = value

    return spoil


_IDS = "eagle_aux_hidden_state_layer_ids"
_TOP = {"vllm": "eagle3"}
_LM = "lm_head.weight"
DEFECTS = [
    Defect(rule=rule, severity=severity, runtime=runtime, version=version, spoil=spoil, also=tuple(also))
    for rule, severity, runtime, version, spoil, *also in (
        ("architectures", "breaks", "vllm", "eagle1", _set(architectures=["LlamaForCausalLMEagle"])),
        ("architectures", "breaks", "sglang", "eagle1", _set(architectures=["LlamaForCausalLM"])),
        ("architectures", "breaks", "sglang", "eagle3", _set(architectures=["EagleHead"])),
        ("architectures", "breaks", "speculators", "eagle3", _set(architectures=["LlamaForCausalLMEagle3"])),
        ("model-type", "breaks", "vllm", "eagle3", _set(model_type="eagle3_head")),
        ("top-level-model-type", "warning", "speculators", "eagle3", _set(model_type="llama")),
        ("speculators-config", "breaks", "speculators", "eagle3", _set(speculators_config={})),
        ("norm-before-residual", "silently wrong", "speculators", "eagle3", _set(norm_before_residual=None)),
        ("norm-before-residual", "silently wrong", "sglang", "eagle3", _set(norm_before_residual=True)),
        ("norm-before-residual", "silently wrong", "reference", "eagle3", _set(norm_before_residual=True)),
        ("tie-word-embeddings", "silently wrong", "sglang", "eagle3", _set(tie_word_embeddings=True)),
        ("layers", "silently wrong", "vllm", "eagle1", _set(num_hidden_layers=32)),
        ("rope-theta", "warning", "vllm", "eagle3", _theta_nowhere),
        ("rope-spelling", "silently wrong", "sglang", "eagle3", _set(rope_theta=500000.0)),
        ("rope-spelling", "silently wrong", "sglang", "eagle1", _set(rope_theta=None, rope_parameters={"rope_theta": 5e5})),
        ("rope-spelling", "silently wrong", "vllm", "eagle3", _set(rope_scaling={"rope_type": "linear", "factor": 2.0})),
        ("rope-scaling", "breaks", "reference", "eagle3", _set(rope_scaling={"rope_type": "linear", "factor": 2.0}),
         "rope-spelling"),
        ("rope-scaling", "silently wrong", "reference", "eagle1", _scaled_theta),
        ("rope-spelling", "silently wrong", "vllm", "eagle3", _nested_rope),
        ("rotation", "silently wrong", "vllm", "eagle3", _scaled("dynamic")),
        ("rotation", "silently wrong", "sglang", "eagle1", _scaled("dynamic")),
        ("rotation", "warning", "vllm", "eagle1", _set(partial_rotary_factor=0.5)),
        ("window", "silently wrong", "sglang", "eagle3", _window(**_SEES)),
        ("window", "silently wrong", "reference", "eagle1", _window(**_SEES)),
        ("window", "silently wrong", "vllm", "eagle1", _window(model_type="mistral")),
        ("window", "silently wrong", "vllm", "eagle3", _window(use_sliding_window=True)),
        ("window", "silently wrong", "speculators", "eagle3", _layer("layer_types", ["sliding_attention"])),
        ("positions", "warning", "vllm", "eagle1", _set(max_position_embeddings=64)),
        ("config-bias", "silently wrong", "vllm", "eagle1", _set(bias=True)),
        ("layer-ids", "breaks", "vllm", "eagle3", _set(**{_IDS: [2, 4, 8]})),
        ("layer-ids", "breaks", "vllm", "eagle3", _set(**{_IDS: [2, 2, 5]})),
        ("layer-ids", "silently wrong", "vllm", "eagle3", _set(**{_IDS: [5, 4, 2]})),
        ("layer-ids", "breaks", "vllm", "eagle3", _set(**{_IDS: "2,4,5"})),
        ("layer-count", "breaks", "vllm", "eagle3", _set(**{_IDS: [1, 2, 4, 5]})),
        ("layer-count", "breaks", "vllm", "eagle3", _fused([1, 2, 4, 5])),
        ("layer-count", "breaks", "speculators", "eagle3", _fused([2, 4])),
        ("layer-count", "silently wrong", "sglang", "eagle3", _one_layer),
        ("layer-convention", "silently wrong", "vllm", "eagle3", _nested([0, 3, 5], **{_IDS: None})),
        ("layer-convention", "silently wrong", "sglang", "eagle3", _set(**{_IDS: [1, 4, 6]}, eagle_config=None)),
        ("layer-convention", "silently wrong", "sglang", "eagle3", _nested([1, 4, 6], **{_IDS: [1, 4, 6]})),
        ("layer-convention", "silently wrong", "reference", "eagle3", _set(**{_IDS: [1, 4, 6]})),
        ("layer-ids-missing", "warning", "vllm", "eagle3", _set(**{_IDS: None})),
        ("layer-ids-missing", "warning", "sglang", "eagle3", _set(**{_IDS: None}, eagle_config=None)),
        ("layer-ids-missing", "warning", "speculators", "eagle3", _set(**{_IDS: None})),
        ("vocab-size", "breaks", "speculators", "eagle3", _layer("vocab_size", D), "t2d", "d2t-range", "d2t-idle"),
        ("draft-vocab-size", "breaks", "sglang", "eagle3", _set(draft_vocab_size=None)),
        ("draft-vocab-size", "breaks", "vllm", "eagle3", _set(draft_vocab_size=D - 1)),
        ("d2t-missing", "silently wrong", "vllm", "eagle3", _drop("d2t"), "t2d"),
        ("d2t-dtype", "silently wrong", "sglang", "eagle3", lambda v, s: s.update(d2t=s["d2t"].half())),
        ("d2t-zero", "silently wrong", "vllm", "eagle3", lambda v, s: s.update(d2t=torch.zeros_like(s["d2t"])), "t2d"),
        ("d2t-zero", "silently wrong", "sglang", "eagle3", _alone(torch.zeros_like)),
        ("d2t-ids", "silently wrong", "vllm", "eagle3", _alone(lambda d2t: torch.arange(len(d2t)))),
        ("d2t-ids", "silently wrong", "sglang", "eagle3", _alone(lambda d2t: 2 * torch.arange(len(d2t)))),
        ("d2t-ids", "silently wrong", "vllm", "eagle3", _ids, "t2d", "d2t-range", "d2t-duplicate"),
        ("d2t-range", "breaks", "sglang", "eagle3", _with("d2t", -1, V)),
        ("d2t-duplicate", "silently wrong", "vllm", "eagle3",
         lambda v, s: s.update(d2t=torch.cat([s["d2t"][1:2] + 1, s["d2t"][1:]])), "t2d"),
        ("d2t-idle", "warning", "vllm", "eagle3", _equal_vocabularies),
        ("t2d", "silently wrong", "reference", "eagle3", lambda v, s: s.update(t2d=~s["t2d"])),
        ("t2d", "warning", "speculators", "eagle3", _drop("t2d")),
        ("t2d", "warning", "speculators", "eagle3", lambda v, s: s.update(t2d=s["t2d"].long())),
        ("missing-keys", "silently wrong", "sglang", "eagle3", _drop("norm.weight")),
        ("missing-keys", "silently wrong", "vllm", "eagle3", _drop(_LM)),
        ("missing-keys", "silently wrong", "reference", "eagle3", _rename("midlayer.", "layers.0."), "stray-keys"),
        ("stray-keys", "breaks", "vllm", "eagle1", _put(layers__0__input_layernorm__weight=lambda s: torch.ones(H))),
        ("stray-keys", "warning", "sglang", "eagle3", _put(midlayer__self_attn__q_norm__weight=lambda s: torch.ones(8))),
        ("stray-keys", "breaks", "vllm", "eagle1", _put(d2t=lambda s: torch.arange(4), t2d=lambda s: torch.ones(V) > 0)),
        ("fc-bias", "breaks", "vllm", "eagle1", _put(fc__bias=lambda s: torch.ones(H))),
        ("fc-bias", "silently wrong", "sglang", "eagle1", _drop("fc.bias")),
        ("fc-bias", "silently wrong", "reference", "eagle1", _set(bias=None)),
        ("attention-bias", "breaks", "vllm", "eagle3", _put(midlayer__self_attn__q_proj__bias=lambda s: torch.ones(32))),
        ("attention-bias", "silently wrong", "sglang", "eagle3",
         _put(midlayer__self_attn__k_proj__bias=lambda s: torch.ones(16))),
        ("attention-bias", "silently wrong", "vllm", "eagle1", _set(attention_bias=True)),
        ("attention-bias", "silently wrong", "reference", "eagle3", _biased_queries),
        ("attention-bias", "silently wrong", "sglang", "eagle1", _qwen2_without_biases),
        ("lm-head", "breaks", "vllm", "eagle1", _put(lm_head__weight=lambda s: torch.ones(V, H))),
        ("lm-head", "warning", "sglang", "eagle1", _put(lm_head__weight=lambda s: torch.ones(V, H))),
        ("embed-tokens", "silently wrong", "sglang", "eagle1", _put(embed_tokens__weight=lambda s: torch.ones(V, H))),
        ("embed-tokens", "warning", "speculators", "eagle3", _drop("embed_tokens.weight")),
        ("embed-tokens", "warning", "vllm", "eagle3", _put(embed_tokens__weight=lambda s: torch.ones(V, H))),
        ("embed-tokens", "silently wrong", "vllm", "eagle3", _put(embed_tokens__weight=lambda s: torch.ones(V + 1, H))),
        ("shapes", "breaks", "sglang", "eagle3", _set(num_key_value_heads=4)),
        ("shapes", "breaks", "vllm", "eagle1", _set(head_dim=16)),
        ("shapes", "breaks", "reference", "eagle1", _wide_heads("layers.0.", H)),
        ("shapes", "breaks", "reference", "eagle3", _wide_heads("midlayer.", 2 * H)),
        ("config-numbers", "breaks", "vllm", "eagle1", _set(intermediate_size=None)),
        ("hidden-size", "breaks", "vllm", "eagle3", _set(target_hidden_size=64), "shapes", "layer-count"),
        ("values", "silently wrong", "vllm", "eagle1", _with("fc.weight", (0, 0), float("nan"))),
        ("values", "silently wrong", "sglang", "eagle3", _with(_LM, slice(None), 0.0)),
        ("dtype", "warning", "vllm", "eagle1", lambda v, s: s.update({"fc.weight": s["fc.weight"].half()})),
        ("dtype", "warning", "vllm", "eagle3", _set(torch_dtype="bfloat16")),
    )
]  # fmt: skip
