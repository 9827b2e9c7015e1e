"""The EAGLE authors' code (its configs.py, cnets1.py, cnets.py and ea_model.py), in PyTorch.

- rope_scaling, where there is one, must have exactly the two fields type (linear or dynamic) and factor (a float above 1); no
  base is passed on then, so theta is 10000. Without one it is rope_theta, or 10000. rope_parameters is never read.
- The command says which code runs (use_eagle3). Tensors are taken under their own names, strict=False: one without a parameter
  is passed over, a parameter that no tensor fills keeps what it was made with (NaN here, so that it shows), and a wrong shape
  raises. embed_tokens is filled from the target.
- The head dim is hidden_size // heads, whatever head_dim says (LlamaAttention of both files), and must divide without rest.
- EAGLE-1: fc has a bias unless `bias` is false; q, k and v have one where qkv_bias is true; the target's LM head is used.
- EAGLE-3: no biases at all; fc takes three states; layers [2, L//2, L-3] always; the residual is the feature as it came;
  draft_vocab_size is an attribute (missing raises); d2t and t2d exist where it is not vocab_size, target id = draft id + d2t.
"""

from pathlib import Path
from typing import Any

import torch

from tests.runtimes.arithmetic import attention, gated, numbers, rms
from tests.runtimes.loaded import Loaded, read, scatter


def load(folder: Path, *, eagle3: bool, target_layers: int, lm_head_VH: torch.Tensor) -> Loaded:
    values, state = read(folder)
    H, MLP, V, heads = (
        values[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    )
    config = numbers(values, theta=_theta(values))
    config["head_dim"] = H // heads
    if config["head_dim"] * heads != H:
        raise ValueError("hidden_size must be divisible by num_heads")
    assert values["num_hidden_layers"] == 1
    made = _shapes(values, H=H, MLP=MLP, heads=heads, kv=config["kv_heads"], d=config["head_dim"], eagle3=eagle3)
    buffers: dict[str, tuple[int, ...]] = {}
    if eagle3:
        draft = values["draft_vocab_size"]
        made |= {"norm.weight": (H,), "lm_head.weight": (draft, H)}
        buffers = {"d2t": (draft,), "t2d": (V,)} if draft != V else {}
    own = {"embed_tokens.weight": (V, H), **made, **buffers}
    for key, tensor in state.items():
        if key in own and tuple(tensor.shape) != own[key]:
            raise RuntimeError(f"size mismatch for {key}: {tuple(tensor.shape)} into {own[key]}")
    p = {key: state.get(key, torch.full(shape, float("nan"))) for key, shape in made.items()}
    layer_prefix, eps = ("midlayer." if eagle3 else "layers.0."), values["rms_norm_eps"]
    projections = {n: p[f"{layer_prefix}self_attn.{n}_proj.weight"] for n in "qkvo"}
    projections |= {
        f"{n}.bias": p[f"{layer_prefix}self_attn.{n}_proj.bias"]
        for n in "qkv"
        if f"{layer_prefix}self_attn.{n}_proj.bias" in p
    }
    mlp = [p[f"{layer_prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")]

    def rest(residual: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        hidden = residual + attention(inputs, projections, positions_T=torch.arange(len(inputs)), **config)
        return hidden + gated(rms(hidden, p[f"{layer_prefix}post_attention_layernorm.weight"], eps), *mlp)

    skipped = sorted(state.keys() - own.keys())
    unfilled = sorted((made.keys() | buffers.keys()) - state.keys())
    if not eagle3:
        bias = p.get("fc.bias", torch.zeros(H))
        return Loaded(
            fuse=lambda states: states,
            layer=lambda f, e: rest(x := torch.cat([e, f], -1) @ p["fc.weight"].T + bias, x),
            logits=lambda h: h @ lm_head_VH.T,
            layers=[],
            skipped=skipped,
            unfilled=unfilled,
        )

    def layer(features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        normed = rms(features, p["midlayer.hidden_norm.weight"], eps)
        return rest(features, torch.cat([rms(embeddings, p["midlayer.input_layernorm.weight"], eps), normed], -1))

    ids_D = torch.arange(len(p["lm_head.weight"])) + (state["d2t"] if "d2t" in buffers and "d2t" in state else 0)
    return Loaded(
        fuse=lambda states: states @ p["fc.weight"].T,
        layer=layer,
        logits=lambda h: scatter(rms(h, p["norm.weight"], eps) @ p["lm_head.weight"].T, ids_D, V),
        layers=[2, target_layers // 2, target_layers - 3],
        skipped=skipped,
        unfilled=unfilled,
    )


def _theta(values: dict[str, Any]) -> float:
    scaling = values.get("rope_scaling")
    if scaling is None:
        return float(values.get("rope_theta", 10000))
    if len(scaling) != 2 or scaling.get("type") not in ("linear", "dynamic"):
        raise ValueError("`rope_scaling` must be a dictionary with two fields")
    if not isinstance(scaling.get("factor"), float) or scaling["factor"] <= 1:
        raise ValueError("`rope_scaling`'s factor field must be a float > 1")
    raise NotImplementedError("scaled RoPE (with theta 10000) is not written here")


def _shapes(
    values: dict[str, Any], *, H: int, MLP: int, heads: int, kv: int, d: int, eagle3: bool
) -> dict[str, tuple[int, ...]]:
    width, prefix = (2 * H, "midlayer.") if eagle3 else (H, "layers.0.")
    made: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.q_proj.weight": (heads * d, width),
        f"{prefix}self_attn.k_proj.weight": (kv * d, width),
        f"{prefix}self_attn.v_proj.weight": (kv * d, width),
        f"{prefix}self_attn.o_proj.weight": (H, heads * d),
        f"{prefix}mlp.gate_proj.weight": (MLP, H),
        f"{prefix}mlp.up_proj.weight": (MLP, H),
        f"{prefix}mlp.down_proj.weight": (H, MLP),
        f"{prefix}post_attention_layernorm.weight": (H,),
        "fc.weight": (H, 3 * H if eagle3 else 2 * H),
    }
    if eagle3:
        return made | {f"{prefix}{norm}.weight": (H,) for norm in ("input_layernorm", "hidden_norm")}
    if values.get("bias", True):
        made["fc.bias"] = (H,)
    if values.get("qkv_bias", False):
        made |= {f"{prefix}self_attn.{n}_proj.bias": (count * d,) for n, count in (("q", heads), ("k", kv), ("v", kv))}
    return made
