"""The EAGLE-1 / EAGLE-2 draft head: one decoder layer that predicts the target's next feature.

Index i takes the feature f_i and the embedding of token t_{i+1} and predicts f_{i+1}; the target's own LM head turns
that into the distribution of t_{i+2} (arXiv 2401.15077, section 3.1). RoPE position of index i is i.
B rows, T tokens, H hidden, h query heads, k key/value heads, d head dim. Parameter names are the reference's, so its
files load as they are. What the reference's layer has and has not: no input norm, no final norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from eagle.vocab import DraftVocabulary

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(query [B, h, T, d], key [B, k, T, d], value [B, k, T, d]) -> [B, h, T, d]."""


class EagleHeadConfig(LlamaConfig):
    """Shape of the head's layer (LlamaConfig's fields) plus what is the head's own."""

    model_type = "eagle_head"

    fc_bias: bool = False
    """Bias of the fusing projection (the reference's `bias`)."""
    draft_vocab_size: int | None = None
    """Tokens of the reduced draft vocabulary; None: all of the target's."""
    draft_coverage: float = 1.0
    """Share of the training tokens that are in it (eagle.vocab.DraftVocabulary.coverage)."""
    target_identity: dict[str, Any] | None = None
    """The target it was trained for, as `Target.identity()` tells it."""

    @classmethod
    def for_target(
        cls, target: PreTrainedConfig, *, fc_bias: bool = False, draft_vocab_size: int | None = None, **overrides: Any
    ) -> "EagleHeadConfig":
        """The layer shape of a target's family: heads, head dim, MLP width, norm epsilon, RoPE and positions."""

        def first(*names: str, default: Any) -> Any:
            return next((value for name in names if (value := getattr(target, name, None)) is not None), default)

        hidden, heads = int(target.hidden_size), int(target.num_attention_heads)
        values: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": first("intermediate_size", "n_inner", default=4 * hidden),
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": first("num_key_value_heads", default=heads),
            "head_dim": first("head_dim", default=hidden // heads),
            "rms_norm_eps": first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-6),
            "max_position_embeddings": first("max_position_embeddings", default=2048),
            "rope_parameters": _rope_of(target),
            "bos_token_id": None,
            "eos_token_id": None,
            "fc_bias": fc_bias,
            "draft_vocab_size": draft_vocab_size,
        }
        return cls(**{**values, **overrides})


def _rope_of(target: PreTrainedConfig) -> dict[str, Any]:
    rope = dict(getattr(target, "rope_parameters", None) or {})
    if isinstance(rope.get("full_attention"), dict):  # one per layer type (Gemma 3): the head's layer is a full one
        rope = dict(rope["full_attention"])
    rope.pop("partial_rotary_factor", None)  # the head rotates its whole head dim, as published heads do
    return {"rope_type": "default", "rope_theta": 10000.0, **rope}


class EagleHead(PreTrainedModel):
    """fc: 2H -> H over [embedding, feature] (embedding first), then one decoder layer without an input norm."""

    config_class = EagleHeadConfig
    base_model_prefix = ""
    config: EagleHeadConfig
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: EagleHeadConfig):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_DecoderLayer(config)])
        self.rotary = LlamaRotaryEmbedding(config)
        if config.draft_vocab_size is not None:  # filled by set_vocabulary or from a file
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.embed_tokens_VH: torch.Tensor | None = None  # what a reference file carried; see checkpoint.check_fits
        self.post_init()

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The reduced draft vocabulary; None: all of the target's tokens. Raises EagleError when the buffers hold none."""
        if self.config.draft_vocab_size is None:
            return None
        coverage = self.config.draft_coverage
        return DraftVocabulary.from_tensors(self.d2t, self.t2d, coverage=coverage, where="the head's d2t and t2d")

    def set_vocabulary(self, vocabulary: DraftVocabulary) -> None:
        """Fills the buffers of a head whose config says draft_vocab_size."""
        assert (self.config.draft_vocab_size, self.config.vocab_size) == (vocabulary.size, vocabulary.target_size)
        self.d2t.copy_(vocabulary.d2t)
        self.t2d.copy_(vocabulary.t2d)
        self.config.draft_coverage = vocabulary.coverage

    def forward(
        self,
        features_BTH: torch.Tensor,
        embeddings_BTH: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """Predicted features [B, T, H]; index i of the result predicts f_{i+1}.

        features_BTH: f_i (the target's, or the head's own further down a draft). embeddings_BTH: e_{i+1}.
        positions_BT: RoPE positions, default 0 .. T-1. attend: default plain causal attention over the T inputs.
        """
        if positions_BT is None:
            positions_BT = torch.arange(features_BTH.shape[1], device=features_BTH.device)[None]
        hidden_BTH = self.fc(torch.cat([embeddings_BTH, features_BTH], dim=-1))
        cos_BTd, sin_BTd = self.rotary(hidden_BTH, positions_BT)
        hidden: torch.Tensor = self.layers[0](hidden_BTH, cos_BTd, sin_BTd, attend or causal_attention)
        return hidden


class _DecoderLayer(nn.Module):
    def __init__(self, config: EagleHeadConfig):
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _GatedMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        hidden = hidden + self.self_attn(hidden, cos, sin, attend)
        normed: torch.Tensor = self.post_attention_layernorm(hidden)
        return hidden + self.mlp(normed)


class _Attention(nn.Module):
    def __init__(self, config: EagleHeadConfig):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_BTH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        rows, tokens, _ = hidden_BTH.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.head_dim).transpose(1, 2)

        query = _rotate(heads(self.q_proj(hidden_BTH)), cos, sin)
        key = _rotate(heads(self.k_proj(hidden_BTH)), cos, sin)
        out_BhTd = attend(query, key, heads(self.v_proj(hidden_BTH)))
        out: torch.Tensor = self.o_proj(out_BhTd.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class _GatedMLP(nn.Module):
    def __init__(self, config: EagleHeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Plain causal attention; grouped query heads share their key/value head."""
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


def _rotate(states_BhTd: torch.Tensor, cos_BTd: torch.Tensor, sin_BTd: torch.Tensor) -> torch.Tensor:
    """RoPE, half-split: the pair of component c is c + d/2."""
    cos, sin = cos_BTd[:, None], sin_BTd[:, None]
    first, second = states_BhTd.chunk(2, dim=-1)
    return states_BhTd * cos + torch.cat([-second, first], dim=-1) * sin
