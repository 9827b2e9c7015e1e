"""Draft-head folders as each project's own tools leave them, written by hand from their documented rules.

Nothing of eagle/ is used. EAGLE-3 tensors are those of tests/eagle3_reference.py; `judge` computes what they mean.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import eagle3_reference as reference

H, MLP, HEADS, KV, d, V, D = (getattr(reference, name) for name in ("H", "MLP", "HEADS", "KV", "d", "V", "D"))
State = dict[str, torch.Tensor]

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": d, "hidden_act": "silu", "rms_norm_eps": reference.EPS, "vocab_size": V,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], state: State, *, form: str = "safetensors") -> Path:
    """form: bin, safetensors, sharded-bin or sharded-safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    ending = form.removeprefix("sharded-")
    name, save = {
        "bin": ("pytorch_model", torch.save),
        "safetensors": ("model", save_file),
    }[ending]
    state = {key: value.contiguous() for key, value in state.items()}
    if not form.startswith("sharded-"):
        save(state, folder / f"{name}.{ending}")
        return folder
    weight_map = {key: f"{name}-0000{1 + i % 2}-of-00002.{ending}" for i, key in enumerate(sorted(state))}
    for shard in set(weight_map.values()):
        save({key: state[key] for key in state if weight_map[key] == shard}, folder / shard)
    (folder / f"{name}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def eagle1_state(*, seed: int = 0, fc_bias: bool = False, qkv_bias: bool = False) -> State:
    """The reference's EAGLE-1 tensors: fc and one layer without an input norm."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25

    layer = "layers.0."
    state = {
        "fc.weight": matrix(H, 2 * H),
        f"{layer}self_attn.q_proj.weight": matrix(HEADS * d, H),
        f"{layer}self_attn.k_proj.weight": matrix(KV * d, H),
        f"{layer}self_attn.v_proj.weight": matrix(KV * d, H),
        f"{layer}self_attn.o_proj.weight": matrix(H, HEADS * d),
        f"{layer}mlp.gate_proj.weight": matrix(MLP, H),
        f"{layer}mlp.up_proj.weight": matrix(MLP, H),
        f"{layer}mlp.down_proj.weight": matrix(H, MLP),
        f"{layer}post_attention_layernorm.weight": torch.rand(H, generator=generator) + 0.5,
    }
    if fc_bias:
        state["fc.bias"] = torch.randn(H, generator=generator)
    if qkv_bias:
        for name, rows in {"q": HEADS * d, "k": KV * d, "v": KV * d}.items():
            state[f"{layer}self_attn.{name}_proj.bias"] = torch.randn(rows, generator=generator)
    return state


def renamed(state: State, old: str, new: str) -> State:
    return {(new + key.removeprefix(old) if key.startswith(old) else key): value for key, value in state.items()}


def reference3(state: State) -> tuple[dict[str, Any], State]:
    """SafeAILab/EAGLE: no RoPE base, no layer ids."""
    return {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": _draft(state)}, state


def specforge(state: State) -> tuple[dict[str, Any], State]:
    """The published names; eagle_config's ids count from the layer before."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "draft_vocab_size": _draft(state),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5], "use_aux_hidden_state": True},
    }
    return config, state


def angelslim(state: State) -> tuple[dict[str, Any], State]:
    config = {
        **LLAMA,
        "architectures": ["Eagle3LlamaForCausalLM"],
        "rope_theta": 1000000,
        "rope_scaling": None,
        "draft_vocab_size": _draft(state),
        "aux_hidden_states_layer_ids": [0, 3, 5],
    }
    return config, state


def modelopt(state: State) -> tuple[dict[str, Any], State]:
    """layers.0, no t2d, switches."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": 1000000,
        "rope_scaling": None,
        "draft_vocab_size": _draft(state),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 5],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }
    return config, renamed({key: value for key, value in state.items() if key != "t2d"}, "midlayer.", "layers.0.")


def speculators(state: State, *, norm_before_residual: bool | None = True) -> tuple[dict[str, Any], State]:
    """The layer's config holds what differs from LlamaConfig's defaults (rms_norm_eps 1e-6, rope_theta 10000)."""
    layer = {
        key: LLAMA[key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "rms_norm_eps")
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": _draft(state),
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "embed_requires_grad": False,
        "norm_before_residual": norm_before_residual,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": ["y"]}},
        "transformer_layer_config": {
            "model_type": "llama", "num_hidden_layers": 1, "vocab_size": V, "num_key_value_heads": KV, **layer,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "max_position_embeddings": 512,
        },
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    if norm_before_residual is None:
        del config["norm_before_residual"]
    return config, renamed(state, "midlayer.", "layers.0.")


def speculators1(state: State) -> tuple[dict[str, Any], State]:
    """The older EAGLE-1 models: fusion_fc, transformer.*."""
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "fusion_bias": "fc.bias" in state,
        "layernorms": False,
        "speculators_config": {"algorithm": "eagle"},
        "transformer_layer_config": {key: value for key, value in LLAMA.items() if key != "torch_dtype"},
    }
    return config, renamed(renamed(state, "fc.", "fusion_fc."), "layers.0.", "transformer.")


def reference1(state: State) -> tuple[dict[str, Any], State]:
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in state}, state


EAGLE3: dict[str, Callable[[State], tuple[dict[str, Any], State]]] = {
    "reference": reference3,
    "specforge": specforge,
    "angelslim": angelslim,
    "modelopt": modelopt,
    "speculators": speculators,
}
EAGLE1 = {"reference": reference1, "speculators": speculators1}


def _draft(state: State) -> int:
    return state["lm_head.weight"].shape[0]
