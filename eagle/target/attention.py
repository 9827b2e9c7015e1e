"""How tree attention gets into a Hugging Face model: one registered attention function and the step it serves.

B rows, N query nodes, S cache slots, W = ceil(columns / 64). A `TreeStep` says which slots each node sees. While
`tree_attention(config, step)` is open, the model's attention layers call `_attend`, which finds the step in a context
variable: forward keywords do not reach the function in every family. Outside the block the model is untouched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig

from eagle.errors import EagleError
from eagle.kernels.dispatch import chosen, count
from eagle.kernels.placement import sent
from eagle.kernels.tree_attention import op
from eagle.kernels.tree_attention.reference import additive, masked_attention, own_bits, tree_mask
from eagle.kernels.tree_attention.steady import SLOTS, steady_attention

NAME = "eagle_tree"
WINDOW_BLOCK = 512
"""Queries of a windowed prompt that are scored at a time: no [T, T] mask is made."""


class TreeStep:
    """One forward over N nodes per row behind prefixes of lengths_B: a tree, or (ancestors None) a causal chunk.

    lengths_B: int64 [B], CPU; the others may lie anywhere. depths_BN: int64 [B, N]. ancestors_BNW: int64 bits over the tree's
    columns, of which `offset` were written by earlier steps (column_depths_BC tells the depths of all of them). slots: how
    many of the cache's the nodes may see, default: up to the last one in use. counts_B: of a causal chunk, each row's own
    nodes (the rest is padding), default: all; only a steady step asks.
    """

    def __init__(
        self,
        *,
        lengths_B: torch.Tensor,
        depths_BN: torch.Tensor,
        ancestors_BNW: torch.Tensor | None,
        column_depths_BC: torch.Tensor | None = None,
        offset: int = 0,
        slots: int | None = None,
        counts_B: torch.Tensor | None = None,
    ):
        self.counts_B = counts_B
        self.lengths_B, self.depths_BN, self.ancestors_BNW, self.offset = lengths_B, depths_BN, ancestors_BNW, offset
        self.column_depths_BC = depths_BN if column_depths_BC is None else column_depths_BC
        self.slots = int(lengths_B.max()) + offset + depths_BN.shape[1] if slots is None else slots
        self.steady = False
        self._positions_BN = depths_BN
        self.layers_served = 0
        self._biases: dict[tuple[int | None, int, torch.dtype, torch.device], torch.Tensor | None] = {}
        self._moved: dict[torch.device, dict[str, torch.Tensor]] = {}
        self._places: dict[torch.device, dict[str, torch.Tensor]] = {}

    def be_steady(self) -> None:
        """A node's result will not depend on its neighbours (eagle/kernels/tree_attention/steady.py). For float32 on a CPU."""
        self.steady, self.slots = True, -(-self.slots // SLOTS) * SLOTS
        self._positions_BN = self.positions_on(torch.device("cpu"))

    @property
    def starts_empty(self) -> bool:
        """A causal chunk with nothing before it: plain causal attention, no mask."""
        return self.ancestors_BNW is None and not bool(self.lengths_B.any())

    @property
    def sees_every_slot(self) -> bool:
        """Single nodes of rows of one length: no mask, unless for a window."""
        one = self.depths_BN.shape[1] == 1 and self.offset == 0
        return one and bool((self.lengths_B == self.lengths_B[0]).all())

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors that tell who sees what, on a layer's device: moved once per step."""
        if device not in self._moved:
            rows, nodes = self.depths_BN.shape
            ancestors_BNW = self.ancestors_BNW
            if ancestors_BNW is None:  # a causal chunk is a chain: node i has ancestors 0 .. i
                own_NW = own_bits(nodes, -(-nodes // 64))
                ancestors_BNW = own_NW.cumsum(0).expand(rows, -1, -1)
            self._moved[device] = {
                **self._placed(device),
                "ancestors_BNW": sent(ancestors_BNW, device),
                "column_depths_BC": sent(self.column_depths_BC, device),
            }
        return self._moved[device]

    def _placed(self, device: torch.device) -> dict[str, torch.Tensor]:
        """What positions need, alone: of a long causal chunk the bits, N * N / 64 words a row, may never be read."""
        if device not in self._places:
            self._places[device] = {
                "lengths_B": sent(self.lengths_B, device),
                "query_depths_BN": sent(self.depths_BN, device),
            }
        return self._places[device]

    def positions_on(self, device: torch.device) -> torch.Tensor:
        """int64 [B, N]: lengths + depths."""
        there = self._placed(device)
        return there["lengths_B"][:, None] + there["query_depths_BN"]

    def bias(self, *, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        """The additive mask for layers with this window, built once per step. None: every slot is seen."""
        if window is not None and window >= self.slots:
            window = None
        key = (window, groups, like.dtype, like.device)
        if key not in self._biases:
            self._biases[key] = self._build(window, groups, like)
        return self._biases[key]

    def _build(self, window: int | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
        if window is None and self.sees_every_slot and not self.steady:
            return None
        mask_BNS = tree_mask(**self.on(like.device), slots=self.slots, window=window)
        return additive(mask_BNS, groups=groups, dtype=like.dtype)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """[B, h, N, d] over keys and values [B, k, S, d] -> [B, h, N, d]."""
        self.layers_served += 1
        if self.steady and chosen(op.NAME, query.device) == "reference":
            return self._attend_steadily(query, key, value, scaling=scaling, window=window, softcap=softcap)
        if self.starts_empty and softcap is None:
            return causal_attention(query, key, value, scaling=scaling, window=window)
        tensors = self.on(query.device)
        return op.tree_attention(
            query,
            key,
            value,
            lengths_B=tensors["lengths_B"],
            ancestors_BNW=tensors["ancestors_BNW"],
            query_depths_BN=tensors["query_depths_BN"],
            column_depths_BC=tensors["column_depths_BC"],
            offset=self.offset,
            scaling=scaling,
            window=window,
            softcap=softcap,
            bias=lambda: self.bias(window=window, groups=query.shape[1] // key.shape[1], like=query),
        )

    def _attend_steadily(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if not self.starts_empty:
            count(op.NAME, "reference")
        if self.ancestors_BNW is None:
            return self._chunk_by_rows(query, key, value, scaling=scaling, window=window, softcap=softcap)
        bias = self.bias(window=window, groups=1, like=query)
        assert bias is not None
        return steady_attention(
            query, key, value, bias_BNS=bias[:, 0], positions_BN=self._positions_BN, scaling=scaling, softcap=softcap
        )

    def _chunk_by_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """A prompt, or a part of one: row by row, each in the shape it has alone, for library attention rounds by shape."""
        rows, heads, nodes, _ = query.shape
        out = query.new_zeros(rows, heads, nodes, value.shape[-1])
        counts = [nodes] * rows if self.counts_B is None else self.counts_B.tolist()
        for b, (before, own) in enumerate(zip(self.lengths_B.tolist(), counts)):
            if own == 0:
                continue
            end = before + own
            parts = query[b : b + 1, :, :own], key[b : b + 1, :, :end], value[b : b + 1, :, :end]
            if before == 0 and softcap is None:
                out[b, :, :own] = causal_attention(*parts, scaling=scaling, window=window)[0]
                continue
            query_N1, key_S = torch.arange(before, end)[:, None], torch.arange(end)
            seen_NS = (key_S <= query_N1) & (key_S > query_N1 - (end if window is None else window))
            bias = additive(seen_NS[None], groups=heads // key.shape[1], dtype=query.dtype)
            out[b, :, :own] = masked_attention(*parts, bias_BgNS=bias, scaling=scaling, softcap=softcap)[0]
        return out


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Of T tokens in a row, [B, h, T, d]; grouped query heads share their key/value head. window: a token sees itself and the
    window - 1 tokens before it; None: all before it."""
    tokens, grouped = query.shape[2], query.shape[1] != key.shape[1]
    if window is None or window >= tokens:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped
        )
    parts = []
    for start in range(0, tokens, WINDOW_BLOCK):
        first, end = max(0, start - window + 1), min(start + WINDOW_BLOCK, tokens)
        query_C1 = torch.arange(start, end, device=query.device)[:, None]
        key_S = torch.arange(first, end, device=query.device)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=(key_S <= query_C1) & (key_S > query_C1 - window),
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2)


_step: ContextVar[TreeStep] = ContextVar("eagle_tree_step")


@contextmanager
def tree_attention(config: PreTrainedConfig, step: TreeStep) -> Iterator[None]:
    """Within the block, every attention layer that reads `config` serves `step`."""
    before = config._attn_implementation
    token = _step.set(step)
    try:
        config._attn_implementation = NAME
        yield
    finally:
        config._attn_implementation = before
        _step.reset(token)


# Keywords that change nothing here: dropout is 0 in eval mode, positions and causality are the step's.
_HARMLESS = {"dropout", "position_ids", "is_causal", "use_cache", "output_attentions", "position_embeddings", "kwargs"}


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention function: [B, h, N, d] -> [B, N, h, d]."""
    for name, argument in kwargs.items():
        if isinstance(argument, torch.Tensor) and name not in _HARMLESS:
            raise EagleError(
                f"this model's attention passes '{name}', which tree attention does not know (attention sinks or position "
                "biases): such targets cannot be verified as a tree; use another target"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    step = _step.get(None)
    if step is None:
        raise EagleError(
            "this model is being run as a tree by another thread just now; run it by its Target, or within `with target.lock:`"
        )
    out = step.attend(query, key, value, scaling=scaling, window=sliding_window, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
