"""How many floating-point operations a target's forward takes, counted from its weights.

A multiply-add is two operations. Counted: every matrix of the decoder once per node (of experts, those that a token goes
through), attention over the prefix, and the LM head apart, which runs on some nodes only. Norms and softmax are left out.
"""

import dataclasses
from typing import Any

from torch import nn

from eagle.target.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetFlops:
    """Operations of one target."""

    node: float
    """Per node, without attention and LM head"""
    node_and_key: float
    """Attention, per node and per token that it looks at"""
    logits: float
    """LM head, per position"""

    def per_node(self, prefix: float) -> float:
        """Of a node behind so many tokens, without the LM head."""
        return self.node + self.node_and_key * prefix


def target_flops(target: Target) -> TargetFlops:
    config: Any = target.config
    tables = {id(p) for m in target.decoder.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    experts = next((n for key in ("num_local_experts", "num_experts") if (n := getattr(config, key, None))), None)
    share = getattr(config, "num_experts_per_tok", 1) / experts if experts else 1.0
    node = 0.0
    for parameter in target.decoder.parameters():
        if id(parameter) not in tables and parameter.dim() >= 2:
            node += 2 * parameter.numel() * (share if parameter.dim() == 3 else 1.0)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or target.hidden_size // heads)
    return TargetFlops(
        node=node,
        node_and_key=4.0 * target.num_layers * heads * head_dim,
        logits=2.0 * target.hidden_size * target.vocab_size,
    )
