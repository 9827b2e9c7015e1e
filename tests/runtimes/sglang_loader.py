"""SGLang 0.5.23's rules (its llama_eagle.py and llama_eagle3.py), in PyTorch.

- The architecture is looked up as it is: LlamaForCausalLMEagle, LlamaForCausalLMEagle3, Qwen2ForCausalLMEagle.
- A tensor is taken under its name, or that name behind `model.`; anything else is passed over without a word, and a parameter
  that no tensor fills keeps what it was made with (NaN here, so that it shows).
- rope_theta and rope_scaling are read at the top level, never rope_parameters.
- EAGLE-1: fc ALWAYS has a bias; the Qwen2 class's q/k/v always have one too, its o never.
  lm_head is passed over: the target's is used.
- EAGLE-3: `midlayer` in a name is read as `layers.0`; q/k/v have no bias; layer ids only inside eagle_config, plus one (Llama and
  most others), else [2, L//2, L-3]; fc takes num_aux_hidden_states of them, else as many as those ids, else 3, and is passed
  over where the states are as wide as the embeddings; norm_before_residual does not exist; target id = draft id + d2t;
  tie_word_embeddings makes the embedding the LM head.
"""

from pathlib import Path

import torch

from tests.runtimes.arithmetic import attention, gated, numbers, rms
from tests.runtimes.loaded import Loaded, read, scatter


def load(folder: Path, *, target_layers: int, lm_head_VH: torch.Tensor) -> Loaded:
    values, state = read(folder)
    (name,) = values["architectures"]
    qwen2 = name == "Qwen2ForCausalLMEagle"
    if values["model_type"] != ("qwen2" if qwen2 else "llama"):
        raise ValueError(f"transformers knows no model type {values['model_type']}")
    if name not in ("LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Qwen2ForCausalLMEagle"):
        raise ValueError(f"Model architectures {name} are not supported")
    eagle3 = name.endswith("3")
    if values.get("rope_scaling"):
        raise NotImplementedError("scaled RoPE is not written here")
    config = numbers(values, theta=float(values.get("rope_theta", 10000)))
    H, MLP, V = values["hidden_size"], values["intermediate_size"], values["vocab_size"]
    heads, kv, d = config["heads"], config["kv_heads"], config["head_dim"]
    width, prefix = 2 * H if eagle3 else H, "model.layers.0."
    nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    states = values.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    made = {
        f"{prefix}self_attn.q_proj.weight": (heads * d, width),
        f"{prefix}self_attn.k_proj.weight": (kv * d, width),
        f"{prefix}self_attn.v_proj.weight": (kv * d, width),
        f"{prefix}self_attn.o_proj.weight": (H, heads * d),
        f"{prefix}mlp.gate_proj.weight": (MLP, H),
        f"{prefix}mlp.up_proj.weight": (MLP, H),
        f"{prefix}mlp.down_proj.weight": (H, MLP),
        f"{prefix}post_attention_layernorm.weight": (H,),
        "model.fc.weight": (H, states * H if eagle3 else 2 * H),
    }
    if qwen2:
        made |= {f"{prefix}self_attn.{n}_proj.bias": (c * d,) for n, c in (("q", heads), ("k", kv), ("v", kv))}
    if not eagle3:
        made["model.fc.bias"] = (H,)
    else:
        draft = values["draft_vocab_size"]  # an attribute: missing raises
        made |= {f"{prefix}{norm}.weight": (H,) for norm in ("input_layernorm", "hidden_norm")}
        made |= {"model.norm.weight": (H,), "lm_head.weight": (draft, H)}
    parameters = {key: torch.full(shape, float("nan")) for key, shape in made.items()}
    filled, skipped, hot_token_id = set(), [], None
    for key, tensor in state.items():
        if eagle3 and "d2t" in key:
            hot_token_id = tensor + torch.arange(len(tensor))
            continue
        own = key.replace("midlayer", "layers.0") if eagle3 else key
        own = own if own in made else f"model.{own}"
        if own not in made or (not eagle3 and "lm_head" in key):
            skipped.append(key)
            continue
        assert tuple(tensor.shape) == made[own], (key, tuple(tensor.shape), made[own])
        parameters[own] = tensor
        filled.add(own)
    p = {key.removeprefix(prefix): tensor for key, tensor in parameters.items()}
    projections = {n: p[f"self_attn.{n}_proj.weight"] for n in "qkvo"}
    projections |= {f"{n}.bias": p[f"self_attn.{n}_proj.bias"] for n in "qkv" if qwen2}
    eps, fc = values["rms_norm_eps"], parameters["model.fc.weight"]

    def rest(residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        hidden = residual + attention(inputs, projections, positions_T=torch.arange(len(inputs)), **config)
        normed = rms(hidden, p["post_attention_layernorm.weight"], eps)
        return hidden + gated(normed, p["mlp.gate_proj.weight"], p["mlp.up_proj.weight"], p["mlp.down_proj.weight"])

    unfilled = sorted(made.keys() - filled)
    if not eagle3:
        bias = parameters["model.fc.bias"]
        return Loaded(
            fuse=lambda states: states,
            layer=lambda f, e: rest(x := torch.cat([e, f], -1) @ fc.T + bias, x),
            logits=lambda h: h @ lm_head_VH.T,
            layers=[],
            skipped=skipped,
            unfilled=unfilled,
        )

    def layer(features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        normed = rms(features, p["hidden_norm.weight"], eps)
        return rest(features, torch.cat([rms(embeddings, p["input_layernorm.weight"], eps), normed], -1))

    lm_head = parameters["lm_head.weight"]
    ids_D = torch.arange(len(lm_head)) if hot_token_id is None else hot_token_id
    return Loaded(
        fuse=lambda states: states if states.shape[-1] == H else states @ fc.T,
        layer=layer,
        logits=lambda h: scatter(rms(h, parameters["model.norm.weight"], eps) @ lm_head.T, ids_D, V),
        layers=[2, target_layers // 2, target_layers - 3] if nested is None else [v + 1 for v in nested],
        skipped=skipped,
        unfilled=unfilled,
    )
