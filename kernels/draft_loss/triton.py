"""The soft cross-entropy of two chunks of logits in Triton: losses and slopes, nothing else of size [C, D].

C rows, D tokens, K of the teacher's likeliest; one program a row. First sweep over the row: both log-sum-exps and
sum_x p(x) z(x), online; second sweep: the slopes w (q - p), which may take the place of the student's logits. The top-k term
-sum_{x in top k} p log q needs K logits of each row more, and its slopes v (q sum_{top k} p - p 1[x in top k]) go into the
same sweep: q's factor is then w + v sum_{top k} p, and K entries are overwritten at the end.

The matrix products around it stay with the vendor's library: three of them for a chunk of positions (both logits, and
slopes times head). One sweep over tiles of D that never holds [C, D] would need a fourth and two float32 accumulators
[T, H], rescaled at every tile, because p and q have denominators of their own: more time, and not less memory.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from eagle.kernels.variants import TYPES, Variant

BLOCK, WARPS = 4096, 8
TOPS = (0, 16, 64)
"""Sizes that the top-k term's K is padded to; 0: without the term."""


@triton.jit(do_not_specialize=["count"])
def _soft_cross_entropy(
    Student, Teacher, Losses, TopLosses, Slopes, TopIds, weight, top_weight,
    tokens, count, student_stride, teacher_stride, slope_stride,
    BLOCK: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """weight, top_weight: w, v. count: K, at most TOP; TopIds [C, K] and TopLosses are untouched where TOP is 0."""
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
    loss = student_lse - both / teacher_total
    tl.store(Losses + row, tl.where(loss < 0, 0.0, loss))  # below 0 by rounding alone; NaN stays NaN
    drawn = weight  # q's factor in the slopes
    if TOP > 0:
        k = tl.arange(0, TOP)
        kept = k < count
        top = tl.load(TopIds + row * count + k, mask=kept, other=0)
        top_student = tl.load(Student + top, mask=kept, other=0.0).to(tl.float32)
        top_teacher = tl.load(Teacher + top, mask=kept, other=never).to(tl.float32)
        top_p = tl.exp(top_teacher - teacher_lse)
        top_loss = tl.sum(top_p * (student_lse - top_student), 0)
        tl.store(TopLosses + row, tl.where(top_loss < 0, 0.0, top_loss))
        drawn = weight + top_weight * tl.sum(top_p, 0)
        tl.debug_barrier()  # every thread has its top logits before another writes slopes over them
    for start in range(0, tokens, BLOCK):
        there = start + lane < tokens
        student = tl.load(Student + start + lane, mask=there, other=never).to(tl.float32)
        teacher = tl.load(Teacher + start + lane, mask=there, other=never).to(tl.float32)
        slope = drawn * tl.exp(student - student_lse) - weight * tl.exp(teacher - teacher_lse)
        tl.store(Slopes + start + lane, slope.to(Slopes.dtype.element_ty), mask=there)
    if TOP > 0:
        slope = drawn * tl.exp(top_student - student_lse) - (weight + top_weight) * top_p
        tl.debug_barrier()  # another thread has written there
        tl.store(Slopes + top, slope.to(Slopes.dtype.element_ty), mask=kept)


def launch(
    *,
    student_CD: torch.Tensor,
    teacher_CD: torch.Tensor,
    slopes_CD: torch.Tensor,
    weight: float,
    top_ids_CK: torch.Tensor | None,
    top_weight: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See op.soft_cross_entropy, which has checked the arguments. slopes_CD: written; may be student_CD."""
    rows, tokens = student_CD.shape
    losses_C = torch.empty(rows, dtype=torch.float32, device=student_CD.device)
    top_losses_C = None if top_ids_CK is None else torch.empty_like(losses_C)
    count = 0 if top_ids_CK is None else top_ids_CK.shape[1]
    _soft_cross_entropy[(rows,)](
        student_CD, teacher_CD, losses_C, losses_C if top_losses_C is None else top_losses_C, slopes_CD,
        losses_C if top_ids_CK is None else top_ids_CK, weight, top_weight,
        tokens, count, student_CD.stride(0), teacher_CD.stride(0), slopes_CD.stride(0),
        BLOCK=BLOCK, TOP=next(size for size in TOPS if count <= size), num_warps=WARPS,
    )  # fmt: skip
    return losses_C, top_losses_C, slopes_CD


def variants() -> Iterator[Variant]:
    """Every version that `launch` can choose: per dtype of the logits, aligned rows or not, without the top-k term or with."""
    strides = ("tokens", "student_stride", "teacher_stride", "slope_stride")
    pointers = ("Student", "Teacher", "Losses", "TopLosses", "Slopes", "TopIds")
    for (dtype, element), aligned, top in product(TYPES.items(), (True, False), TOPS):
        yield Variant(
            kernel="draft_loss",
            name=f"{element}{'' if aligned else ' unaligned'}{f' top{top}' if top else ''}",
            function=_soft_cross_entropy,
            types={
                **dict.fromkeys(("Student", "Teacher", "Slopes"), f"*{element}"),
                **dict.fromkeys(("Losses", "TopLosses"), "*fp32"),
                **dict.fromkeys(("weight", "top_weight"), "fp32"),
                "TopIds": "*i64" if top else "*fp32",
                **dict.fromkeys((*strides, "count"), "i32"),
            },
            constants={"BLOCK": BLOCK, "TOP": top},
            divisible=frozenset([*pointers, *(strides if aligned else ())]),
            num_warps=WARPS,
            no_spills=True,
            representative=dtype == torch.bfloat16 and not aligned and top in (0, 16),
        )
