"""The EAGLE-3 head written a second time, from its description alone: functions of a state dict, one position at a time.

Nothing of eagle/ is used. `random_state` makes a head's tensors under the published names, `write_reference` a folder as
the reference implementation ships it. T tokens, H hidden, X = layers * H, V and D the target's and the draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

H, MLP, HEADS, KV, d, V, D, EPS = 32, 48, 4, 2, 8, 384, 90, 1e-5

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": MLP,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": d, "rms_norm_eps": EPS,
    "max_position_embeddings": 512, "vocab_size": V, "draft_vocab_size": D, "torch_dtype": "float16", "bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def random_state(
    *, seed: int = 0, layers: int = 3, kv: int = KV, head_dim: int = d, qkv_bias: bool = False, draft: int = D
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.25

    def scales() -> torch.Tensor:
        return torch.rand(H, generator=generator) + 0.5

    state = {
        "fc.weight": matrix(H, layers * H),
        "midlayer.input_layernorm.weight": scales(),
        "midlayer.hidden_norm.weight": scales(),
        "midlayer.post_attention_layernorm.weight": scales(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * head_dim, 2 * H),
        "midlayer.self_attn.k_proj.weight": matrix(kv * head_dim, 2 * H),
        "midlayer.self_attn.v_proj.weight": matrix(kv * head_dim, 2 * H),
        "midlayer.self_attn.o_proj.weight": matrix(H, HEADS * head_dim),
        "midlayer.mlp.gate_proj.weight": matrix(MLP, H),
        "midlayer.mlp.up_proj.weight": matrix(MLP, H),
        "midlayer.mlp.down_proj.weight": matrix(H, MLP),
        "norm.weight": scales(),
        "lm_head.weight": matrix(draft, H),
    }
    if qkv_bias:
        for name, rows in {"q": HEADS * head_dim, "k": kv * head_dim, "v": kv * head_dim}.items():
            state[f"midlayer.self_attn.{name}_proj.bias"] = torch.randn(rows, generator=generator)
    if draft != V:
        ids_D = torch.randperm(V, generator=generator)[:draft].sort().values
        state["d2t"] = ids_D - torch.arange(draft)
        state["t2d"] = torch.isin(torch.arange(V), ids_D)
    return state


def write_reference(folder: Path, state: dict[str, torch.Tensor], *, form: str = "safetensors", **config: Any) -> Path:
    """form: bin, safetensors or sharded. config: keys of config.json to add or replace; None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        weight_map = {key: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, key in enumerate(state)}
        for shard in set(weight_map.values()):
            torch.save({key: state[key] for key in state if weight_map[key] == shard}, folder / shard)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def fuse(state: dict[str, torch.Tensor], low_mid_high_TX: torch.Tensor) -> torch.Tensor:
    return low_mid_high_TX @ state["fc.weight"].T


def logits(state: dict[str, torch.Tensor], hidden: torch.Tensor, *, eps: float = EPS) -> torch.Tensor:
    return _rms(hidden, state["norm.weight"], eps) @ state["lm_head.weight"].T


def forward(
    state: dict[str, torch.Tensor],
    features_TH: torch.Tensor,
    embeddings_TH: torch.Tensor,
    *,
    theta: float = 10000.0,
    norm_before_residual: bool = False,
    window: int | None = None,
    eps: float = EPS,
) -> torch.Tensor:
    """The recursive feature [T, H]: the layer's output before `norm`. window: position i sees i - window + 1 .. i."""
    w = {key.removeprefix("midlayer."): value for key, value in state.items()}
    head_dim = w["self_attn.q_proj.weight"].shape[0] // HEADS
    kv = w["self_attn.k_proj.weight"].shape[0] // head_dim

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        y = w[f"self_attn.{name}_proj.weight"] @ x
        return (y + w.get(f"self_attn.{name}_proj.bias", torch.zeros_like(y))).view(-1, head_dim)

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:
        half = head_dim // 2
        angle = position / theta ** (torch.arange(half) * 2 / head_dim)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    out = []
    keys, values = [], []
    for i, (feature_H, embedding_H) in enumerate(zip(features_TH, embeddings_TH, strict=True)):
        normed_H = _rms(feature_H, w["hidden_norm.weight"], eps)
        x = torch.cat([_rms(embedding_H, w["input_layernorm.weight"], eps), normed_H])  # embedding first
        keys.append(rope(project("k", x), i))
        values.append(project("v", x))
        query = rope(project("q", x), i)
        mixed = []
        for h in range(HEADS):
            shared = h * kv // HEADS
            keys_Td = torch.stack([key[shared] for key in keys[-(window or len(keys)) :]])
            values_Td = torch.stack([value[shared] for value in values[-(window or len(values)) :]])
            mixed.append((keys_Td @ query[h] / head_dim**0.5).softmax(0) @ values_Td)
        residual_H = normed_H if norm_before_residual else feature_H
        hidden_H = residual_H + w["self_attn.o_proj.weight"] @ torch.cat(mixed)
        y = _rms(hidden_H, w["post_attention_layernorm.weight"], eps)
        gated = functional.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y)
        out.append(hidden_H + w["mlp.down_proj.weight"] @ gated)
    return torch.stack(out)


def draft_chain(
    state: dict[str, torch.Tensor],
    low_mid_high_TX: torch.Tensor,
    next_tokens_T: list[int],
    embedding_VH: torch.Tensor,
    *,
    depth: int,
    window: int | None = None,
) -> list[int]:
    """The greedy draft of `depth` target ids behind next_tokens_T's last: every step recomputes everything before it."""
    features_TH, tokens = fuse(state, low_mid_high_TX), list(next_tokens_T)
    drafted = []
    for _ in range(depth):
        predicted_H = forward(state, features_TH, embedding_VH[tokens], window=window)[-1]
        draft_id = int(logits(state, predicted_H).argmax())
        drafted.append(draft_id + int(state["d2t"][draft_id]) if "d2t" in state else draft_id)
        features_TH = torch.cat([features_TH, predicted_H[None]])
        tokens.append(drafted[-1])
    return drafted


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
