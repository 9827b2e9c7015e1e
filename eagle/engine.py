"""Engines: how the same forward is executed. Their results are equal up to float rounding; they differ in speed.

eager: PyTorch as it is. compiled (CPU, float32): large linear layers' weights are kept a second time in oneDNN's blocked
layout, so that verifying n tokens costs less per token; a handful of rows still takes the plain matrix-vector product,
which is faster there. cudagraph (one CUDA device): forwards of fixed shapes, recorded once and replayed
(eagle/static_forward.py); the code that is recorded is tested without a GPU, the recording itself only on one.
"""

import copy
from typing import Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional

from eagle.errors import EagleError

Engine = Literal["eager", "compiled", "cudagraph"]

FEW_ROWS = 4
"""Below this many rows the plain product is faster than the blocked one (measured on AVX-512)."""
BLOCK_ROWS = 8
"""The number of rows the blocked layout is chosen for."""
PACK_FROM = 2**22
"""Weights of fewer elements stay as they are: they gain nothing (measured with 2 cores: 576 x 1536 loses, 2048 x 2048 and
49152 x 576 gain a third and more from 4 rows on)."""

M = TypeVar("M", bound=nn.Module)


class PackedLinear(nn.Module):
    """nn.Linear with a second copy of its weight in oneDNN's blocked layout. float32 on a CPU, inference only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias  # shared, for the few-rows path
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), BLOCK_ROWS)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if inputs.numel() < FEW_ROWS * self.in_features:
            return functional.linear(inputs, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return out


def packed_copy(module: M) -> M:
    """A copy of `module` whose large linear layers are packed; parameters are shared and `module` is left as it is.

    Raises EagleError where packing does not exist (no oneDNN, not float32, not on a CPU).
    """
    require_packable(module)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied: M = copy.deepcopy(module, shared)
    for parent in list(copied.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.numel() >= PACK_FROM:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return copied


def require_packable(module: nn.Module) -> None:
    """Raises EagleError, with the reason, where `module` cannot be packed."""
    reason = why_not_packed(module)
    if reason:
        raise EagleError(f'engine "compiled" is not possible here: {reason}; use engine "eager"')


def why_not_packed(module: nn.Module) -> str | None:
    """The reason why `module` cannot be packed; None when it can."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this PyTorch has no packed linear operator"
    for parameter in module.parameters():
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            return f"weights are {parameter.dtype} on {parameter.device}, packing is for float32 on a CPU"
    return None
