"""Engines: how the same forward is executed. Their results are equal up to float rounding; they differ in speed.

eager: PyTorch as it is. compiled (CPU, float32): linear layers by the product that is faster on this machine
(eagle/target/products.py), layers called on the same tensor as one, and attention whose result for a node does not depend on its
neighbours (eagle/kernels/tree_attention/steady.py). cudagraph (one CUDA device): forwards of fixed shapes, recorded once and
replayed (eagle/target/fixed_forward.py); the code that is recorded is tested without a GPU, the recording itself only on one.
auto: the fastest that can be had: cudagraph, compiled or eager.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Literal, TypeVar

import torch
from torch import nn

from eagle.errors import EagleError
from eagle.target.products import JointLinear, JointPart, PackedLinear, Product, choose

Engine = Literal["eager", "compiled", "cudagraph"]
"""What runs."""
EngineChoice = Literal["auto", "eager", "compiled", "cudagraph"]
"""What may be asked for."""

JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names that the families share of layers called on one tensor, in this order."""

M = TypeVar("M", bound=nn.Module)


def packed_copy(module: M, given: Mapping[str, Product] | None = None) -> M:
    """A copy of `module` whose linear layers are packed; other parameters are shared and `module` is left as it is.

    given: the products, where an earlier run chose them.

    Raises EagleError where packing does not exist (no oneDNN, not float32, not on a CPU).
    """
    require_packable(module)
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    copied: M = copy.deepcopy(module, shared)
    for parent in list(copied.modules()):
        for names in JOINT:
            layers = [layer for name in names if type(layer := getattr(parent, name, None)) is nn.Linear]
            if len(layers) == len(names) and _alike(layers):
                joint = JointLinear(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, JointPart(joint, index))
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    choose(packed_layers(copied), given)
    return copied


def packed_layers(module: nn.Module) -> Iterator[PackedLinear]:
    """The packed layers of a copy, each once."""
    return (each for each in module.modules() if isinstance(each, PackedLinear))


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


def _alike(layers: list[nn.Linear]) -> bool:
    """Whether one product can serve them: of one width, and all with a bias or none."""
    return len({layer.in_features for layer in layers}) == 1 and len({layer.bias is None for layer in layers}) == 1
