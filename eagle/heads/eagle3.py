"""The EAGLE-3 draft head: features of three layers fused, one decoder layer, an LM head of its own (arXiv 2503.01840).

Index i takes a feature and the embedding of token t_{i+1}, as in EAGLE-1 (eagle/heads/eagle1.py). The feature is `fuse` of the
target's hidden states at token i, or, further down a draft, the head's own prediction: the layer's output BEFORE `norm`.
B rows, T tokens, H hidden, X = layers * H, D draft vocabulary. Parameter names are the reference's.
"""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle.config import HeadConfig
from eagle.errors import EagleError
from eagle.heads.eagle1 import Attend, DraftHead, DraftHeadConfig, GatedMLP, HeadAttention
from eagle.heads.layer_ids import sglang_applied
from eagle.heads.vocabulary import DraftTokens
from eagle.target.token_layers import TokenLayers

LOW_MID_HIGH = 3
"""Layers that a published head looks at."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The published choice, as numbers of layers applied: [2, L//2, L-3]. Raises EagleError where they would collide."""
    if num_layers < 7:
        raise EagleError(
            f"the target has {num_layers} layers, too few for EAGLE-3's default layers [2, L//2, L-3]: they need 7 or more "
            f"to be three different ones; name some of 0 .. {num_layers - 1} in head.aux_layers"
        )
    return 2, num_layers // 2, num_layers - 3


def aux_layers_of(config: HeadConfig, num_layers: int) -> tuple[int, ...]:
    """The layers that a recipe's head looks at: () for EAGLE-1. Raises EagleError when the target has not got them."""
    if config.version == "eagle1":
        if config.aux_layers is not None:
            raise EagleError(
                f"head.aux_layers is {list(config.aux_layers)}, but head.version eagle1 looks at the last feature alone; "
                "leave it out, or set head.version to eagle3"
            )
        return ()
    layers = default_aux_layers(num_layers) if config.aux_layers is None else config.aux_layers
    check_aux_layers(layers, num_layers, where="head.aux_layers")
    return layers


def check_aux_layers(layers: tuple[int, ...], num_layers: int, *, where: str) -> None:
    """Raises EagleError unless they are sorted, different and hidden states that the target has."""
    if list(layers) != sorted(set(layers)) or not layers:
        raise EagleError(
            f"{where} is {list(layers)}, expected different numbers of layers, ascending, such as [2, 15, 27]"
        )
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise EagleError(
            f"{where} is {list(layers)}, but the target has hidden states 0 .. {num_layers - 1} (number of layers applied, "
            "0 being the embeddings)"
        )


class Eagle3HeadConfig(DraftHeadConfig):
    """The EAGLE-3 head's."""

    model_type = "eagle3_head"

    aux_layers: tuple[int, ...] | list[int] | None = None
    """Hidden states it looks at, as numbers of layers applied (Hugging Face's hidden_states index), ascending. None: the
    published choice, which `bind` fills in when the target is known."""
    norm_before_residual: bool = False
    """The residual is the normed feature instead of the feature: heads made by `speculators`."""

    @property
    def layers(self) -> int:
        """How many layers it looks at."""
        return LOW_MID_HIGH if self.aux_layers is None else len(self.aux_layers)


class Eagle3Head(DraftHead):
    """fc: X -> H over the target's states; midlayer over [normed embedding, normed feature]; norm and lm_head."""

    config_class = Eagle3HeadConfig
    version = "eagle3"
    config: Eagle3HeadConfig

    def __init__(self, config: Eagle3HeadConfig):
        super().__init__(config)
        size, rows = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.fc = nn.Linear(config.layers * size, size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(size, rows, bias=False)
        self.sglang_ids: list[int] | None = None
        """Layer ids of a file that only SGLang's rule for the target's family turns into layers: `bind` does."""
        self.post_init()

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Raises EagleError when the head's config names none and `bind` was not called."""
        if self.config.aux_layers is None:
            raise EagleError("the head's config names no aux layers; bind it to its target first (Eagle3Head.bind)")
        return tuple(self.config.aux_layers)

    def bind(self, num_layers: int, *, family: str = "llama") -> None:
        """Settles the layers it looks at, for a target of num_layers and that model_type.

        Raises EagleError when it has not got them.
        """
        if self.sglang_ids is not None:
            self.config.aux_layers, self.sglang_ids = sglang_applied(self.sglang_ids, family, num_layers), None
        if self.config.aux_layers is None:
            self.config.aux_layers = list(default_aux_layers(num_layers))
        check_aux_layers(self.aux_layers, num_layers, where="the head's aux_layers")

    def fuse(self, states_BTX: torch.Tensor) -> torch.Tensor:
        """Fuses the TARGET's hidden states after `aux_layers`, concatenated in that order."""
        fused: torch.Tensor = self.fc(states_BTX)
        return fused

    def logits(self, predictions: torch.Tensor, tokens: DraftTokens) -> torch.Tensor:
        """By its own LM head; `tokens` is not needed."""
        logits: torch.Tensor = self.lm_head(self.norm(predictions))
        return logits

    def logit_parameters(self) -> list[nn.Parameter]:
        """Of `norm` and `lm_head`."""
        return [*self.norm.parameters(), *self.lm_head.parameters()]

    @torch.no_grad()
    def copy_lm_head(self, tokens: TokenLayers) -> None:
        """Starts `lm_head` from the target's rows of the draft vocabulary: next-token logits from the first step on."""
        rows_DH: torch.Tensor = tokens.lm_head_VH
        if self.vocabulary is not None:
            rows_DH = rows_DH[self.vocabulary.target_ids_D.to(rows_DH.device)]
        self.lm_head.weight.copy_(rows_DH * tokens.logit_scale)

    def _layer(
        self, features: torch.Tensor, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.midlayer(features, embeddings, cos, sin, attend)
        return hidden


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3HeadConfig):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = HeadAttention(config, width=2 * config.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        normed: torch.Tensor = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        inputs = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = residual + self.self_attn(inputs, cos, sin, attend)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
