"""How far two right ways of computing one thing may lie apart in a test, and float64 copies for what a choice hangs on.

A processor's kernels, other shapes of a product and other threads round otherwise, and what rounding becomes on its way
through a model follows from the weights (eagle/eval/checks/rounding.py). Where the outcome is a choice (which tokens a tree
holds) or is made of many steps (the depths of a draft), both ways are computed in float64.
"""

import copy
from typing import TypeVar

import torch

from eagle.heads.eagle1 import DraftHead
from eagle.target.target import Target

Head = TypeVar("Head", bound=DraftHead)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Share of the largest value, by dtype, for states and logits of tiny random models of up to eight layers, and of a head at
depth 1 or 2. float32: any product moved at random by two units of the last place moves them by up to 1e-5, and by 3e-5 in a
target of 8 layers; a wrong position, mask or scale by 1e-2 and more. float64: the same of 2^-52, with room for the norms that
transformers computes in float32. bfloat16: results rounded once more on one side than on the other: 4 * 2^-8, with room."""

LOG_Q = 4e-5
"""How far a path's log confidence may lie from that of a reference when both see the same float64 logits: the drafter rounds
those of up to six levels to float32, 6 * 2^-24 * 50 for logits of up to 50, and the log-probabilities made of them."""


def apart(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest value: an error of a sum is one of its terms' size, whatever its own.
    Infinite for other shapes and for values that are not finite."""
    if got.shape != expected.shape:
        return float("inf")
    difference = (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30)
    return float(torch.nan_to_num(difference, nan=float("inf"), posinf=float("inf")))


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the rounding of the coarser dtype."""
    coarser = max((got.dtype, expected.dtype), key=lambda dtype: TOLERANCE[dtype])
    return apart(got, expected) < TOLERANCE[coarser]


def in_float64(target: Target) -> Target:
    """Its features, logits and forwards are float64; what draws from logits goes on in float32 (eagle/sample/sampling.py)."""
    return Target(copy.deepcopy(target.model).double(), target.tokenizer)


def head_in_float64(head: Head) -> Head:
    return copy.deepcopy(head).double()
