"""Matrix products inside kernels, the same compiled and interpreted."""

import torch
import triton
import triton.language as tl

from eagle.kernels.dispatch import interpreting


def precision(dtype: torch.dtype) -> str:
    """What `dot` is told for operands of this type.

    float32 operands are multiplied as such ("ieee": no TF32), so that fp32 decoding stays exact. Triton's interpreter
    multiplies bfloat16 by its bit patterns: there the operands are widened first, which changes no product.
    """
    if dtype == torch.bfloat16 and interpreting():
        return "widened"
    return "ieee"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, accumulated in float32. PRECISION: from `precision`."""
    if PRECISION == "widened":
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
