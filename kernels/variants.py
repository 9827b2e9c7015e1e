"""What a kernel folder's triton.py offers to the compile table: `variants()`, every version that its op can launch.

A variant is a Triton function with all its compile-time choices made: enough to compile it without a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Triton's names of the element types that kernels take."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled version of one kernel."""

    kernel: str
    """The folder's name."""
    name: str
    """Unique within the kernel: "d128 bf16 split"."""
    function: Any
    """The @triton.jit function (compiled, not interpreted)."""
    types: Mapping[str, str]
    """Triton type of every runtime argument: "*bf16", "*i64", "i32", "fp32"."""
    constants: Mapping[str, Any]
    """Value of every tl.constexpr argument."""
    divisible: frozenset[str] = frozenset()
    """Runtime arguments (pointers, strides) known to be multiples of 16 bytes (pointers) or 16 (integers)."""
    architectures: tuple[int, ...] = (80, 90, 100)
    """Compute capabilities it is launched on (A100, H100 / H200, B200)."""
    num_warps: int = 4
    num_stages: int = 2
    no_spills: bool = False
    """Whether spilled registers are a failure (head dims 64 and 128, and whatever else promises none)."""
    representative: bool = False
    """Whether continuous integration compiles it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of triton.compile."""
