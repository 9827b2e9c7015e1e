"""The soft cross-entropy kernel: values and gradients against the formula with all logits at once."""

from collections import Counter
from typing import Any

import pytest
import torch

from eagle.errors import EagleError
from eagle.kernels import dispatch
from eagle.kernels.draft_loss.op import draft_loss, soft_cross_entropy
from eagle.kernels.draft_loss.reference import draft_loss_reference, soft_cross_entropy_reference
from tests.kernels.poison import poisoned

__all__ = ["poisoned"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Relative to the largest entry. fp32: sums over the vocabulary in another order; else one rounding of the logits' dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    scale = float(expected.detach().float().abs().max().clamp_min(1e-3))
    torch.testing.assert_close(got.float() / scale, expected.float() / scale, rtol=0, atol=TOLERANCE[dtype])


def features(positions: int, hidden: int, vocab_size: int, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """student, teacher [T, H], head [V, H]."""
    generator = torch.Generator().manual_seed(positions * 1000 + vocab_size)
    shapes = ((positions, hidden), (positions, hidden), (vocab_size, hidden))
    student, teacher, head = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return [student.requires_grad_(), teacher, head * 0.5]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 63), (2, 4096), (2, 8195)])
def test_losses_and_slopes_of_logits(dtype: torch.dtype, rows: int, tokens: int) -> None:
    torch.manual_seed(tokens)
    rising = torch.linspace(0, 12, tokens)  # the best logits come last: what was summed before must shrink
    student_CD, teacher_CD = ((torch.randn(rows, tokens) * 2 + rising).to(DEVICE, dtype) for _ in range(2))
    expected_losses_C, expected_slopes_CD = soft_cross_entropy_reference(student_CD=student_CD, teacher_CD=teacher_CD)
    with dispatch.record() as paths:
        losses_C, slopes_CD = soft_cross_entropy(student_CD=student_CD, teacher_CD=teacher_CD, backend="triton")
    assert paths == Counter({("draft_loss", "triton"): 1})
    close(losses_C, expected_losses_C, torch.float32)
    close(slopes_CD, expected_slopes_CD, dtype)
    assert slopes_CD.data_ptr() == student_CD.data_ptr()  # no third [C, D]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("chunk_rows", [1, 5, None])
def test_the_loss_and_its_gradient_by_chunks(backend: Any, chunk_rows: int | None) -> None:
    student_TH, teacher_TH, head_VH = features(13, 24, 203)
    loss = draft_loss(
        student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, chunk_rows=chunk_rows, backend=backend
    )
    (gradient,) = torch.autograd.grad(3.0 * loss, student_TH)
    expected = draft_loss_reference(student_TH=student_TH, teacher_TH=teacher_TH, head_DH=head_VH)
    (expected_gradient,) = torch.autograd.grad(3.0 * expected, student_TH)
    close(loss, expected, torch.float32)
    close(gradient, expected_gradient, torch.float32)


@pytest.mark.slow
def test_odd_numbers_of_positions_and_of_a_real_vocabulary() -> None:
    student_TH, teacher_TH, head_VH = features(63, 8, 32003)
    loss = draft_loss(student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, chunk_rows=20, backend="triton")
    (gradient,) = torch.autograd.grad(loss, student_TH)
    expected = draft_loss_reference(student_TH=student_TH, teacher_TH=teacher_TH, head_DH=head_VH)
    (expected_gradient,) = torch.autograd.grad(expected, student_TH)
    close(loss, expected, torch.float32)
    close(gradient, expected_gradient, torch.float32)


def test_a_draft_vocabulary_restricts_both_distributions() -> None:
    student_TH, teacher_TH, head_VH = features(6, 8, 90)
    ids_D = torch.tensor([3, 4, 17, 60, 89], device=DEVICE)
    losses = [
        draft_loss(student_TH=student_TH, teacher_TH=teacher_TH, backend="triton", **head)
        for head in (dict(head_VH=head_VH, draft_ids_D=ids_D), dict(head_VH=head_VH[ids_D]))
    ]
    p_TD = (teacher_TH @ head_VH.T).softmax(-1)[:, ids_D]
    log_q_TD = (student_TH @ head_VH.T)[:, ids_D].log_softmax(-1)
    expected = -(p_TD / p_TD.sum(-1, keepdim=True) * log_q_TD).sum()
    for loss in losses:
        close(loss, expected, torch.float32)


def test_half_precision_features() -> None:
    student_TH, teacher_TH, head_VH = features(5, 32, 64, dtype=torch.bfloat16)
    loss = draft_loss(student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, backend="triton")
    (gradient,) = torch.autograd.grad(loss, student_TH)
    assert gradient.dtype == torch.bfloat16
    expected = draft_loss_reference(student_TH=student_TH, teacher_TH=teacher_TH, head_DH=head_VH)
    close(loss, expected, torch.float32)
    close(gradient, torch.autograd.grad(expected, student_TH)[0], torch.bfloat16)


def test_a_perfect_student_has_the_teachers_entropy_and_no_gradient() -> None:
    _, teacher_TH, head_VH = features(4, 8, 50)
    student_TH = teacher_TH.clone().requires_grad_()
    loss = draft_loss(student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, backend="triton")
    log_p_TV = (teacher_TH @ head_VH.T).log_softmax(-1)
    close(loss, -(log_p_TV.exp() * log_p_TV).sum(), torch.float32)
    assert float(torch.autograd.grad(loss, student_TH)[0].abs().max()) < 1e-6


def test_strided_logits_and_no_positions() -> None:
    wide = torch.full((3, 120), float("nan"), device=DEVICE)
    wide[:, :101] = torch.randn(3, 101, device=DEVICE)
    student_CD, teacher_CD = wide[:, :101].clone(), wide[:, :101]
    expected, _ = soft_cross_entropy_reference(student_CD=student_CD, teacher_CD=teacher_CD)
    close(
        soft_cross_entropy(student_CD=student_CD, teacher_CD=teacher_CD, backend="triton")[0], expected, torch.float32
    )
    student_TH, teacher_TH, head_VH = features(2, 8, 50)
    nothing = draft_loss(student_TH=student_TH[:0], teacher_TH=teacher_TH[:0], head_VH=head_VH)
    nothing.backward()
    assert float(nothing.detach()) == 0


def test_mistakes_are_named() -> None:
    student_TH, teacher_TH, head_VH = features(4, 8, 50)
    with pytest.raises(EagleError, match=r"student \(4, 8\), teacher \(3, 8\)"):
        draft_loss(student_TH=student_TH, teacher_TH=teacher_TH[1:], head_VH=head_VH)
    with pytest.raises(EagleError, match="chunk_rows is 0"):
        draft_loss(student_TH=student_TH, teacher_TH=teacher_TH, head_VH=head_VH, chunk_rows=0)
    logits = head_VH.double()
    with pytest.raises(EagleError, match=r"cannot run: logits are torch\.float64"):
        soft_cross_entropy(student_CD=logits, teacher_CD=logits, backend="triton")
