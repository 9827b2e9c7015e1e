"""float64 copies of what a test computes in two ways: there any processor's kernels agree, so that one bound serves all.

In float32 two right ways lie apart by what rounding becomes on its way through the layers and the depths of a draft: up to
1e-4 of the largest value in a tiny random model, and by the processor more or less (eagle/eval/rounding.py).
"""

import copy
from typing import TypeVar

import torch

from eagle.heads import DraftHead
from eagle.target import Target

Head = TypeVar("Head", bound=DraftHead)

EXACT = 1e-9
"""Share of the largest value that two ways may lie apart in float64: the same growth that makes 1e-4 of float32's 1e-7 makes
2e-13 of float64's 2e-16."""


def in_float64(target: Target) -> Target:
    """Its features, logits and forwards are float64; what draws from logits goes on in float32 (eagle/sampling.py)."""
    return Target(copy.deepcopy(target.model).double(), target.tokenizer)


def head_in_float64(head: Head) -> Head:
    return copy.deepcopy(head).double()


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value expected."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
