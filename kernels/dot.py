"""Matrix products inside kernels, the same compiled and interpreted."""

import torch
import triton
import triton.language as tl

from eagle.kernels.dispatch import interpreting


def precision(dtype: torch.dtype) -> str:
    """What `dot` is told for operands of this type.

    float32 operands are split into two TF32 numbers each and multiplied in three tensor-core products ("tf32x3"): what is
    dropped is below one rounding of float32, and the registers suffice where "ieee" spills. Half types multiply exactly.
    Triton's interpreter multiplies bfloat16 by its bit patterns: there the operands are widened first, to the same result.
    """
    if dtype == torch.bfloat16 and interpreting():
        return "widened"
    return "tf32x3" if dtype == torch.float32 else "ieee"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, accumulated in float32. PRECISION: from `precision`."""
    if PRECISION == "widened":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
