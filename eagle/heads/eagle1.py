"""What draft heads share, and the EAGLE-1 / EAGLE-2 head: one decoder layer that predicts the target's next feature.

Index i takes the feature f_i and the embedding of token t_{i+1} and predicts f_{i+1}; the target's own LM head turns
that into the distribution of t_{i+2} (arXiv 2401.15077, section 3.1). RoPE position of index i is i.
B rows, T tokens, H hidden, h query heads, k key/value heads, d head dim. Parameter names are the reference's, so its
files load as they are. What the reference's layer has and has not: no input norm, no final norm.
The EAGLE-3 head is in eagle/heads/eagle3.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from eagle.errors import EagleError
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.reading import BROKEN, reason
from eagle.target.attention import causal_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(query [B, h, T, d], key [B, k, T, d], value [B, k, T, d]) -> [B, h, T, d]."""


class DraftHeadConfig(LlamaConfig):
    """Shape of the head's layer (LlamaConfig's fields) plus what every head has."""

    draft_vocab_size: int | None = None
    """Tokens of the reduced draft vocabulary; None: all of the target's."""
    draft_coverage: float = 1.0
    """Share of the training tokens that are in it (eagle.heads.vocabulary.DraftVocabulary.coverage)."""
    target_identity: dict[str, Any] | None = None
    """The target it was trained for, as `Target.identity()` tells it."""
    sliding_window: int | None = None
    """Positions that its attention sees, a token's own included; None: all before it too."""

    @classmethod
    def for_target(cls, target: PreTrainedConfig, **overrides: Any) -> Self:
        """The layer shape of a target's family: heads, head dim, MLP width, norm epsilon, RoPE and positions.

        Where a target's layers differ, its last full-attention layer's. Raises EagleError, with the reason, when no head's
        shape follows from the target's configuration.
        """
        first = partial(_of_last_full_layer, target)
        hidden, heads = first("hidden_size"), first("num_attention_heads")
        wholes = {"hidden_size": hidden, "num_attention_heads": heads, "vocab_size": first("vocab_size")}
        wrong = [f"{name} {value!r}" for name, value in wholes.items() if type(value) is not int or value < 1]
        if wrong:
            raise EagleError(
                f"the target's configuration ({type(target).__name__}) has {', '.join(wrong)}, expected whole numbers above 0: "
                "no draft head's shape follows from it; use another target"
            )
        head_dim = first("head_dim", default=hidden // heads)
        values: dict[str, Any] = {
            **wholes,
            "intermediate_size": first("intermediate_size", "n_inner", default=4 * hidden),
            "num_hidden_layers": 1,
            "num_key_value_heads": first("num_key_value_heads", default=heads),
            "head_dim": head_dim,
            "rms_norm_eps": first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", default=1e-6),
            "max_position_embeddings": first("max_position_embeddings", default=2048),
            "rope_parameters": _rope_of(target, head_dim=head_dim),
            "bos_token_id": None,
            "eos_token_id": None,
        }
        try:
            config = cls(**{**values, **overrides})
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            if kv_heads < 1 or heads % kv_heads or config.head_dim % 2:
                raise ValueError(f"{heads} heads, {kv_heads} key/value heads, head dim {config.head_dim}")
            HeadRotaryEmbedding(config)
        except BROKEN as error:
            raise EagleError(
                f"no draft head can be given the shape of the target's layers ({type(target).__name__}: {reason(error)}); use "
                "another target"
            ) from error
        return config


def _of_last_full_layer(target: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """The first of these settings that the target has, as its last full-attention layer (else its last) has it."""
    kinds = list(getattr(target, "layer_types", None) or ())
    place = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=-1)
    owner = target
    if getattr(target, "is_heterogeneous", False):  # Gemma 4: layers have configurations of their own
        owner = target.per_layer_config[place]
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[place]
        if value is not None:
            return value
    return default


_SCALINGS = ("linear", "llama3", "yarn")
"""RoPE's scalings that are defined for any number of rotated dimensions. (`dynamic` depends on the text's length.)"""


def _rope_of(target: PreTrainedConfig, *, head_dim: int) -> dict[str, Any]:
    """The target's base, and its scaling where that is one of the whole head dim: published heads rotate all of it."""
    rope = dict(getattr(target, "rope_parameters", None) or {})
    nested = {kind: inner for kind, inner in rope.items() if isinstance(inner, dict)}
    if nested:  # one per layer type (Gemma 3): the head's layer is a full one
        rope = dict(nested.get("full_attention", next(iter(nested.values()))))
    rope.pop("partial_rotary_factor", None)
    kind = rope.get("rope_type", "default")
    factors = rope.get("short_factor") or ()
    if kind not in _SCALINGS and not (kind == "longrope" and len(factors) == head_dim // 2):
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta")}
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = 10000.0
    return {"rope_type": "default", **rope}


class EagleHeadConfig(DraftHeadConfig):
    """The EAGLE-1 / EAGLE-2 head's."""

    model_type = "eagle_head"

    fc_bias: bool = False
    """Bias of the fusing projection (the reference's `bias`)."""


class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """Its frequencies stay float32 whatever the head is cast to: rounded to bfloat16 they are off by up to 0.4%, which turns
    position 1000 by radians. (The target's are kept in float32 too.)"""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class DraftHead(PreTrainedModel):
    """What training and drafting know of a head: `fuse`, `forward`, `logits`, and its draft vocabulary.

    A subclass names its `version`, defines `fuse`, `logits` and `_layer`, and ends its __init__ with `post_init()`.
    """

    base_model_prefix = ""
    version: ClassVar[Literal["eagle1", "eagle3"]]
    config: DraftHeadConfig
    fc: nn.Linear
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: DraftHeadConfig):
        super().__init__(config)
        self.rotary = HeadRotaryEmbedding(config)
        if config.draft_vocab_size is not None:  # filled by set_vocabulary or from a file
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.folder: Path | None = None  # where it was read from: tuned trees lie there
        self.embed_tokens_VH: torch.Tensor | None = None  # what a reference file carried; see checkpoint.check_fits

    def get_input_embeddings(self) -> None:
        """None: embeddings are the target's (transformers would raise, and FSDP asks)."""
        return

    def get_output_embeddings(self) -> None:
        """None: nothing is tied or resized, and FSDP keeps the whole head together."""
        return

    @property
    def window(self) -> int | None:
        """config.sliding_window: every `attend` that is handed to `forward` keeps it."""
        return self.config.sliding_window

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers (their number of layers applied) whose hidden states `fuse` takes; (): the target's features."""
        return ()

    def fuse(self, states_BTX: torch.Tensor) -> torch.Tensor:
        """What the target tells at each token, [B, T, X] -> the feature [B, T, H] that `forward` takes there."""
        raise NotImplementedError

    def logits(self, predictions: torch.Tensor, tokens: DraftTokens) -> torch.Tensor:
        """[..., H] -> [..., D] over the draft tokens. tokens: the target's layers and this head's vocabulary."""
        raise NotImplementedError

    def logit_parameters(self) -> list[nn.Parameter]:
        """Parameters of the head's own that `logits` computes with: none where the target's LM head does it."""
        return []

    def _layer(
        self, features: torch.Tensor, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        raise NotImplementedError

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

        features_BTH: f_i (`fuse` of the target's states, or the head's own predictions further down a draft).
        embeddings_BTH: e_{i+1}.
        positions_BT: RoPE positions, default 0 .. T-1. attend: default causal attention over the T inputs, within the window.
        """
        if positions_BT is None:
            positions_BT = torch.arange(features_BTH.shape[1], device=features_BTH.device)[None]
        cos_BTd, sin_BTd = self.rotary(features_BTH, positions_BT)
        attend = attend or partial(causal_attention, window=self.window)
        return self._layer(features_BTH, embeddings_BTH, cos_BTd, sin_BTd, attend)


class EagleHead(DraftHead):
    """fc: 2H -> H over [embedding, feature] (embedding first), then one decoder layer without an input norm."""

    config_class = EagleHeadConfig
    version = "eagle1"
    config: EagleHeadConfig

    def __init__(self, config: EagleHeadConfig):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_DecoderLayer(config)])
        self.post_init()

    def fuse(self, states_BTX: torch.Tensor) -> torch.Tensor:
        """The target's features as they are."""
        return states_BTX

    def logits(self, predictions: torch.Tensor, tokens: DraftTokens) -> torch.Tensor:
        """By the target's LM head, restricted to the draft vocabulary."""
        return tokens.logits(predictions)

    def _layer(
        self, features: torch.Tensor, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[0](self.fc(torch.cat([embeddings, features], dim=-1)), cos, sin, attend)
        return hidden


class _DecoderLayer(nn.Module):
    def __init__(self, config: DraftHeadConfig):
        super().__init__()
        self.self_attn = HeadAttention(config, width=config.hidden_size)
        self.mlp = GatedMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        hidden = hidden + self.self_attn(hidden, cos, sin, attend)
        normed: torch.Tensor = self.post_attention_layernorm(hidden)
        return hidden + self.mlp(normed)


class HeadAttention(nn.Module):
    """Self-attention over inputs of any width; its output is H wide."""

    def __init__(self, config: DraftHeadConfig, *, width: int):
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_BTX: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        rows, tokens, _ = hidden_BTX.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(rows, tokens, -1, self.head_dim).transpose(1, 2)

        query = _rotate(heads(self.q_proj(hidden_BTX)), cos, sin)
        key = _rotate(heads(self.k_proj(hidden_BTX)), cos, sin)
        out_BhTd = attend(query, key, heads(self.v_proj(hidden_BTX)))
        out: torch.Tensor = self.o_proj(out_BhTd.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DraftHeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


def _rotate(states_BhTd: torch.Tensor, cos_BTd: torch.Tensor, sin_BTd: torch.Tensor) -> torch.Tensor:
    """RoPE, half-split: the pair of component c is c + d/2. In the angles' dtype; the result in the states'."""
    cos, sin = cos_BTd[:, None], sin_BTd[:, None]
    first, second = states_BhTd.chunk(2, dim=-1)
    return (states_BhTd * cos + torch.cat([-second, first], dim=-1) * sin).to(states_BhTd.dtype)
