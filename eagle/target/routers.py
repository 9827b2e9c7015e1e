"""How close the routers of a mixture of experts were to another choice.

A router keeps the k experts of the largest logits. Where the k-th and the next one are closer than rounding, a forward of
another shape (a verification instead of a plain step) may take the other expert, and what follows differs by more than
rounding. T tokens, E experts, k of them kept.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROUTER_TIE_FLOAT32 = 1e-5
"""Relative to the router's largest logit (float32): forwards of other shapes differ by up to 2.4e-6 in three random layers, and
by more in deeper models. Half precision: two spacings, as for logits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterMargin:
    """A router's choice at one token."""

    router: str
    """The module's name"""
    position: int
    experts: tuple[int, int]
    """The last one kept, and the first one left out"""
    margin: float
    """By how much the former's logit is larger"""
    tie_below: float
    """Closer than this, rounding decides"""

    @property
    def tie(self) -> bool:
        return self.margin < self.tie_below

    def __str__(self) -> str:
        kept, left = self.experts
        return (
            f"{self.router}: experts {kept} and {left} are {self.margin:.2g} apart at position {self.position} of the text "
            f"(a tie below {self.tie_below:.2g})"
        )


@contextmanager
def routers_recorded(model: nn.Module) -> Iterator[dict[str, list[RouterMargin]]]:
    """Around one forward: margins of every router by its name, one per token, in order.

    A router is known by what it returns: the experts' numbers [T, k] beside logits [T, E]. Where they are not the largest of
    these logits (it chooses by groups, or adds biases) its list is empty: margins are not known.
    """
    found: dict[str, list[RouterMargin]] = {}

    def note(name: str, output: Any) -> None:
        parts = [part for part in output if isinstance(part, torch.Tensor)] if isinstance(output, tuple) else []
        chosen = [part for part in parts if part.dtype in (torch.int64, torch.int32) and part.dim() >= 2]
        wider = [part for part in parts if part.is_floating_point() and chosen and part.shape[-1] > chosen[0].shape[-1]]
        if len(chosen) == 1 and wider:
            found[name] = _margins(name, wider[0].flatten(0, -2).cpu(), chosen[0].flatten(0, -2).long().cpu())

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def closest(found: Mapping[str, list[RouterMargin]], *, start: int = 0) -> RouterMargin | None:
    """The smallest margin, relative to what is a tie there, from token `start` on; None: no router, or none that is known."""
    margins = [one for margins in found.values() for one in margins if one.position >= start]
    return min(margins, key=lambda one: one.margin / one.tie_below, default=None)


def _margins(name: str, logits_TE: torch.Tensor, chosen_Tk: torch.Tensor) -> list[RouterMargin]:
    if len(logits_TE) != len(chosen_Tk):
        return []
    relative = ROUTER_TIE_FLOAT32 if logits_TE.dtype == torch.float32 else 2.0 * torch.finfo(logits_TE.dtype).eps
    logits_TE = logits_TE.float()
    limits_T = relative * logits_TE.abs().amax(dim=-1).clamp_min(1.0)
    kept_T, last_T = logits_TE.gather(1, chosen_Tk).min(dim=-1)
    left_T, next_T = logits_TE.scatter(1, chosen_Tk, float("-inf")).max(dim=-1)
    margins_T = kept_T - left_T
    if bool((margins_T < -limits_T).any()):
        return []  # it does not choose by these logits alone
    last_T = chosen_Tk.gather(1, last_T[:, None])[:, 0]
    rows = zip(margins_T.tolist(), limits_T.tolist(), last_T.tolist(), next_T.tolist())
    return [
        RouterMargin(router=name, position=position, experts=(kept, left), margin=max(0.0, margin), tie_below=limit)
        for position, (margin, limit, kept, left) in enumerate(rows)
    ]
