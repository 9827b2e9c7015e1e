"""The soft cross-entropy of two chunks of logits in Triton: losses and slopes, nothing else of size [C, D].

C rows, D tokens; one program a row. First sweep over the row: both log-sum-exps and sum_x p(x) z(x), online; second sweep:
the slopes q - p, which may take the place of the student's logits.

The matrix products around it stay with the vendor's library: three of them for a chunk of positions (both logits, and
slopes times head). One sweep over tiles of D that never holds [C, D] would need a fourth and two float32 accumulators
[T, H], rescaled at every tile, because p and q have denominators of their own: more time, and not less memory.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from eagle.kernels.variants import TYPES, Variant

BLOCK, WARPS = 4096, 8


@triton.jit
def _soft_cross_entropy(
    Student, Teacher, Losses, Slopes, tokens, student_stride, teacher_stride, slope_stride, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    Student += row * student_stride
    Teacher += row * teacher_stride
    Slopes += row * slope_stride
    lane = tl.arange(0, BLOCK)
    never = float("-inf")
    student_peak, teacher_peak = tl.full([], never, tl.float32), tl.full([], never, tl.float32)
    student_total, teacher_total = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    both = tl.full([], 0.0, tl.float32)  # sum of exp(teacher - its peak) * student
    for start in range(0, tokens, BLOCK):
        there = start + lane < tokens
        student = tl.load(Student + start + lane, mask=there, other=never).to(tl.float32)
        teacher = tl.load(Teacher + start + lane, mask=there, other=never).to(tl.float32)
        peak = tl.maximum(student_peak, tl.max(student, 0))
        student_total = student_total * tl.exp(student_peak - peak) + tl.sum(tl.exp(student - peak), 0)
        student_peak = peak
        peak = tl.maximum(teacher_peak, tl.max(teacher, 0))
        weights = tl.exp(teacher - peak)
        shrink = tl.exp(teacher_peak - peak)
        teacher_total = teacher_total * shrink + tl.sum(weights, 0)
        both = both * shrink + tl.sum(weights * tl.where(there, student, 0.0), 0)
        teacher_peak = peak
    student_lse = student_peak + tl.log(student_total)
    teacher_lse = teacher_peak + tl.log(teacher_total)
    tl.store(Losses + row, student_lse - both / teacher_total)
    for start in range(0, tokens, BLOCK):
        there = start + lane < tokens
        student = tl.load(Student + start + lane, mask=there, other=never).to(tl.float32)
        teacher = tl.load(Teacher + start + lane, mask=there, other=never).to(tl.float32)
        slope = tl.exp(student - student_lse) - tl.exp(teacher - teacher_lse)
        tl.store(Slopes + start + lane, slope.to(Slopes.dtype.element_ty), mask=there)


def launch(
    *, student_CD: torch.Tensor, teacher_CD: torch.Tensor, slopes_CD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See op.soft_cross_entropy, which has checked the arguments. slopes_CD: written; may be student_CD."""
    rows, tokens = student_CD.shape
    losses_C = torch.empty(rows, dtype=torch.float32, device=student_CD.device)
    _soft_cross_entropy[(rows,)](
        student_CD, teacher_CD, losses_C, slopes_CD,
        tokens, student_CD.stride(0), teacher_CD.stride(0), slopes_CD.stride(0), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses_C, slopes_CD


def variants() -> Iterator[Variant]:
    """Every version that `launch` can choose: one per dtype of the logits, aligned rows or not."""
    strides = ("tokens", "student_stride", "teacher_stride", "slope_stride")
    for dtype, element in TYPES.items():
        for aligned in (True, False):
            yield Variant(
                kernel="draft_loss",
                name=f"{element}{'' if aligned else ' unaligned'}",
                function=_soft_cross_entropy,
                types={
                    **dict.fromkeys(("Student", "Teacher", "Slopes"), f"*{element}"),
                    "Losses": "*fp32",
                    **dict.fromkeys(strides, "i32"),
                },
                constants={"BLOCK": BLOCK},
                divisible=frozenset(["Student", "Teacher", "Slopes", "Losses", *(strides if aligned else ())]),
                num_warps=WARPS,
                no_spills=True,
                representative=dtype == torch.bfloat16 and not aligned,
            )
