"""vLLM 0.33's rules for plain EAGLE folders (its llama_eagle.py and llama_eagle3.py), in PyTorch.

- A config of architecture A is looked up as EagleA (method eagle) or Eagle3A, unless A says so already.
- Every tensor's name gets the prefix `model.`, but lm_head's and d2t's; `midlayer.` becomes `layers.0.`; t2d is dropped; a name
  that is no parameter RAISES. EAGLE-1 has neither fc.bias nor lm_head; embed_tokens may be there, the target's is used.
- q/k/v biases exist where the config says attention_bias (EAGLE-1: or bias; qkv_bias overrides).
- EAGLE-3: aux layers from the top level's key, c layers applied, else [2, L//2, L-3]; fc takes num_aux_hidden_states of them,
  else as many as eagle_config has ids, else 3 (the top level's are not counted); norm_before_residual is read, default false;
  draft_vocab_size defaults to vocab_size; target id = draft id + d2t.
- A Llama layer whose entry of layer_types is sliding_attention has the window sliding_window; without layer_types it has none.
- Nothing checks that every parameter was filled.
"""

from pathlib import Path
from typing import Any

import torch

from tests.runtimes.arithmetic import attention, gated, numbers, rms
from tests.runtimes.loaded import Loaded, read, scatter

EAGLE1 = ("EagleLlamaForCausalLM",)
EAGLE3 = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")


def load(folder: Path, *, method: str, target_layers: int, lm_head_VH: torch.Tensor) -> Loaded:
    """method: eagle or eagle3, as given on the command line. Raises KeyError and ValueError where vLLM would."""
    values, state = read(folder)
    if values["model_type"] != "llama":
        raise ValueError(f"transformers knows no model type {values['model_type']}")
    (name,) = values["architectures"]
    if method == "eagle":
        name = name if name.startswith("Eagle") else f"Eagle{name}"
    else:
        name = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
    if name not in (EAGLE1 if method == "eagle" else EAGLE3):
        raise ValueError(f"no architecture {name}")
    theta = _theta(values)
    return build(
        values, state, theta=theta, target_layers=target_layers, lm_head_VH=lm_head_VH, eagle3=method == "eagle3"
    )


def _theta(values: dict[str, Any]) -> float:
    """transformers 5: rope_parameters, else the old spelling, else 10000."""
    rope = values.get("rope_parameters") or {}
    assert rope.get("rope_type", "default") == "default"
    return float(rope.get("rope_theta", values.get("rope_theta", 10000.0)))


def build(
    values: dict[str, Any],
    state: dict[str, torch.Tensor],
    *,
    theta: float,
    target_layers: int,
    lm_head_VH: torch.Tensor,
    eagle3: bool,
) -> Loaded:
    H, MLP, vocab = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    config = numbers(values, theta=theta)
    if (values.get("layer_types") or [None])[0] == "sliding_attention":
        config["window"] = values["sliding_window"]
    heads, kv, d = config["heads"], config["kv_heads"], config["head_dim"]
    attention_bias = bool(values.get("attention_bias"))
    width = 2 * H if eagle3 else H
    if not eagle3:
        attention_bias = attention_bias or bool(values.get("bias"))
    qkv_bias = attention_bias if eagle3 else bool(values.get("qkv_bias", attention_bias))
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    states = values.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (heads * d, width),
        "model.layers.0.self_attn.k_proj.weight": (kv * d, width),
        "model.layers.0.self_attn.v_proj.weight": (kv * d, width),
        "model.layers.0.self_attn.o_proj.weight": (H, heads * d),
        "model.layers.0.mlp.gate_proj.weight": (MLP, H),
        "model.layers.0.mlp.up_proj.weight": (MLP, H),
        "model.layers.0.mlp.down_proj.weight": (H, MLP),
        "model.layers.0.post_attention_layernorm.weight": (H,),
        "model.fc.weight": (H, states * H if eagle3 else 2 * H),
        "model.embed_tokens.weight": (vocab, H),
    }
    if qkv_bias:
        shapes |= {f"model.layers.0.self_attn.{n}_proj.bias": (c * d,) for n, c in (("q", heads), ("k", kv), ("v", kv))}
    if attention_bias:
        shapes["model.layers.0.self_attn.o_proj.bias"] = (H,)
    draft = values.get("draft_vocab_size") or vocab
    if eagle3:
        shapes |= {
            "model.layers.0.input_layernorm.weight": (H,),
            "model.layers.0.hidden_norm.weight": (H,),
            "model.norm.weight": (H,),
            "lm_head.weight": (draft, H),
            "draft_id_to_target_id": (draft,),
        }
    parameters: dict[str, torch.Tensor] = {}
    skipped = []
    for name, tensor in state.items():
        if eagle3 and "t2d" in name:
            skipped.append(name)
            continue
        if eagle3 and "d2t" in name:
            name = "draft_id_to_target_id"
        elif "lm_head" not in name:
            name = f"model.{name}"
        if eagle3:
            name = name.replace("midlayer.", "layers.0.")
        if name not in shapes:
            raise ValueError(f"There is no module or parameter named {name!r}")
        assert tuple(tensor.shape) == shapes[name], (name, tuple(tensor.shape), shapes[name])
        parameters[name] = tensor
    shared = {"model.embed_tokens.weight"} | (set() if "d2t" in state else {"draft_id_to_target_id"})
    unfilled = sorted(shapes.keys() - parameters.keys() - shared)

    def p(name: str) -> torch.Tensor:
        return parameters[f"model.layers.0.{name}"]

    projections = {n: p(f"self_attn.{n}_proj.weight") for n in "qkvo"}
    projections |= {
        f"{n}.bias": p(f"self_attn.{n}_proj.bias")
        for n in "qkvo"
        if f"model.layers.0.self_attn.{n}_proj.bias" in parameters
    }
    eps = values["rms_norm_eps"]

    def rest(residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        hidden = residual + attention(inputs, projections, positions_T=torch.arange(len(inputs)), **config)
        normed = rms(hidden, p("post_attention_layernorm.weight"), eps)
        return hidden + gated(normed, p("mlp.gate_proj.weight"), p("mlp.up_proj.weight"), p("mlp.down_proj.weight"))

    fc = parameters["model.fc.weight"]
    if not eagle3:
        return Loaded(
            fuse=lambda states: states,
            layer=lambda f, e: rest(x := torch.cat([e, f], -1) @ fc.T, x),
            logits=lambda h: h @ lm_head_VH.T,
            layers=[],
            skipped=skipped,
            unfilled=unfilled,
        )

    def layer(features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        normed = rms(features, p("hidden_norm.weight"), eps)
        inputs = torch.cat([rms(embeddings, p("input_layernorm.weight"), eps), normed], -1)
        return rest(normed if values.get("norm_before_residual", False) else features, inputs)

    offsets = parameters.get("draft_id_to_target_id", torch.zeros(draft, dtype=torch.int64))

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        own = rms(hidden, parameters["model.norm.weight"], eps) @ parameters["lm_head.weight"].T
        return scatter(own, torch.arange(draft) + offsets, vocab)

    ids = values.get("eagle_aux_hidden_state_layer_ids")
    return Loaded(
        fuse=lambda states: states @ fc.T,
        layer=layer,
        logits=logits,
        layers=list(ids) if ids else [2, target_layers // 2, target_layers - 3],
        skipped=skipped,
        unfilled=unfilled,
    )
