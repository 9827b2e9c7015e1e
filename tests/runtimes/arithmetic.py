"""The arithmetic that all runtimes' Llama layers share, plainly: RMS norm, half-split RoPE, causal attention, gated MLP.

T tokens, H hidden, h query heads, k key heads, d head size. Nothing of eagle/ is used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rope(x_Thd: torch.Tensor, positions_T: torch.Tensor, theta: float) -> torch.Tensor:
    half = x_Thd.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions_T.double()[:, None] * frequency)[:, None, :]
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x_Thd[..., :half], x_Thd[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(
    x_TX: torch.Tensor,
    w: Mapping[str, torch.Tensor],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    theta: float,
    positions_T: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """w: q, k, v, o and, where there are any, q.bias ... o.bias. window: keys that a token sees, its own included."""

    def project(name: str, count: int) -> torch.Tensor:
        y = x_TX @ w[name].T
        return (y + w[f"{name}.bias"] if f"{name}.bias" in w else y).view(len(x_TX), count, head_dim)

    q, k = rope(project("q", heads), positions_T, theta), rope(project("k", kv_heads), positions_T, theta)
    v = project("v", kv_heads)
    k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
    scores_hTT = torch.einsum("ihd,jhd->hij", q, k) / head_dim**0.5
    ahead_TT = torch.ones(len(x_TX), len(x_TX), dtype=torch.bool).triu(1)
    if window is not None:
        ahead_TT = ahead_TT | (positions_T <= positions_T[:, None] - window)
    weights = scores_hTT.masked_fill(ahead_TT, float("-inf")).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x_TX), -1)
    out = mixed @ w["o"].T
    return out + w["o.bias"] if "o.bias" in w else out


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def numbers(config: Mapping[str, Any], *, theta: float) -> dict[str, Any]:
    """What `attention` takes of a layer's config."""
    heads = config["num_attention_heads"]
    return {
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "theta": theta,
    }
