"""Writes a model as llama.cpp's converter would: names, permutations, offsets and metadata of each architecture."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.tiny import tiny_tokenizer

ARCHITECTURE = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def write_gguf(
    path: Path, model: PreTrainedModel, *, extra: dict[str, Any] | None = None, leave_out: tuple[str, ...] = ()
) -> Path:
    """extra: keys (the architecture's prefix is added to those without one known) and tensors besides the model's own."""
    config = model.config
    architecture = ARCHITECTURE.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    gpt2 = architecture == "gpt2"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size if gpt2 else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    norms = ("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("layer_norm_epsilon", "attention.layer_norm_epsilon")
    keys |= {
        key: getattr(config, name) for name, key in (*norms, ("norm_epsilon", norms[1][1])) if hasattr(config, name)
    }
    if not gpt2:
        keys |= {"attention.head_count_kv": config.num_key_value_heads, "rope.freq_base": rope["rope_theta"]}
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        keys |= {"rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1))}
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) is not None:
            keys["attention." * (name == "sliding_window") + name] = getattr(config, name)
    if architecture == "qwen3moe":
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
        keys |= {"expert_feed_forward_length": config.moe_intermediate_size}
    tensors = _tensors(model, architecture)
    tensors |= _scaling(config, rope, keys)
    for name, value in (extra or {}).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            keys[name] = value
    for name, value in keys.items():
        known = name.split(".")[0] in ("general", "tokenizer", "split", "adapter")
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name if known else f"{architecture}.{name}", value)
    _add_tokenizer(writer, config.vocab_size)
    for name, tensor in tensors.items():
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(tensor.detach().float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    made: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            made |= {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
            continue
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        if name.endswith("experts.down_proj"):
            mapped += ".weight"
        if architecture == "llama" and (".attn_q." in mapped or ".attn_k." in mapped):
            heads = config.num_attention_heads if ".attn_q." in mapped else config.num_key_value_heads
            shape = tensor.shape
            tensor = tensor.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if architecture.startswith("gemma") and mapped.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "gpt2" and tensor.ndim == 2 and "blk" in mapped:
            tensor = tensor.T
        made[mapped] = tensor
    return made


def _scaling(config: Any, rope: dict[str, Any], keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Adds RoPE's scaling to the keys; its tensors are returned."""
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
        keys["rope.scaling.attn_factor"] = float(rope["attention_factor"])
        return {f"rope_factors_{which}.weight": torch.tensor(rope[f"{which}_factor"]) for which in ("long", "short")}
    if kind == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float64) / len(scaled))
        return {"rope_freqs.weight": (plain / scaled).float()}
    return {}


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    tokenizer = tiny_tokenizer()
    by_id = {token: text for text, token in tokenizer.get_vocab().items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(token, f"[PAD{token}]") for token in range(vocab_size)])
    writer.add_token_types([3 if token < 3 else 1 for token in range(vocab_size)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
