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
    expected = soft_cross_entropy_reference(student_CD=student_CD, teacher_CD=teacher_CD)
    with dispatch.record() as paths:
        judged = soft_cross_entropy(student_CD=student_CD, teacher_CD=teacher_CD, backend="triton")
    assert paths == Counter({("draft_loss", "triton"): 1})
    close(judged.losses_C, expected.losses_C, torch.float32)
    close(judged.slopes_CD, expected.slopes_CD, dtype)
    assert judged.top_losses_C is None
    assert judged.slopes_CD.data_ptr() == student_CD.data_ptr()  # no third [C, D]


def with_a_top_k_term(student_CD: torch.Tensor, teacher_CD: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Losses, top losses and slopes of 0.3 * losses + 0.7 * top losses, by autograd in float64; the top ids."""
    z_CD = student_CD.double().requires_grad_()
    terms_CD = -teacher_CD.double().softmax(-1) * z_CD.log_softmax(-1)
    ids_CK = teacher_CD.topk(count, dim=-1).indices
    losses_C, top_losses_C = terms_CD.sum(-1), terms_CD.gather(-1, ids_CK).sum(-1)
    (slopes_CD,) = torch.autograd.grad((0.3 * losses_C + 0.7 * top_losses_C).sum(), z_CD)
    return losses_C.detach(), top_losses_C.detach(), slopes_CD, ids_CK


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("rows", "tokens", "count", "dtype"),
    [
        (3, 63, 10, torch.float32),
        (1, 5, 5, torch.float32),
        (2, 4099, 1, torch.float32),
        (2, 8195, 33, torch.bfloat16),
        (2, 70, 64, torch.float16),
    ],
)
def test_the_top_k_term_is_the_part_of_the_likeliest(
    backend: Any, rows: int, tokens: int, count: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(count)
    student_CD, teacher_CD = ((torch.randn(rows, tokens) * 2).to(DEVICE, dtype) for _ in range(2))
    *expected, ids_CK = with_a_top_k_term(student_CD, teacher_CD, count)
    judged = soft_cross_entropy(
        student_CD=student_CD,
        teacher_CD=teacher_CD,
        weight=0.3,
        top_ids_CK=ids_CK,
        top_weight=0.7,
        backend=backend,
    )
    assert judged.top_losses_C is not None
    close(judged.losses_C, expected[0], torch.float32)
    close(judged.top_losses_C, expected[1], torch.float32)
    close(judged.slopes_CD, expected[2], dtype)
    assert judged.slopes_CD.dtype == dtype


def test_a_narrower_teacher_is_widened_and_a_wider_one_refused() -> None:
    torch.manual_seed(0)
    student_CD, teacher_CD = torch.randn(3, 41, device=DEVICE), torch.randn(3, 41, device=DEVICE).bfloat16()
    expected = soft_cross_entropy_reference(student_CD=student_CD, teacher_CD=teacher_CD)
    judged = soft_cross_entropy(student_CD=student_CD.clone(), teacher_CD=teacher_CD, backend="triton")
    close(judged.losses_C, expected.losses_C, torch.float32)
    with pytest.raises(EagleError, match=r"logits are torch\.bfloat16 and torch\.float32"):
        soft_cross_entropy(student_CD=teacher_CD, teacher_CD=student_CD, backend="triton")


def test_a_caller_may_refuse_and_bring_its_own_reference() -> None:
    logits_CD = torch.randn(2, 9, device=DEVICE)
    own = soft_cross_entropy_reference(student_CD=logits_CD, teacher_CD=logits_CD)
    arguments: dict[str, Any] = dict(student_CD=logits_CD, teacher_CD=logits_CD, refusal="of the moon")
    assert soft_cross_entropy(**arguments, reference=lambda: own) is own
    with pytest.raises(EagleError, match="cannot run: of the moon"):
        soft_cross_entropy(**arguments, backend="triton")
    ids_CK = torch.arange(65, device=DEVICE).expand(2, -1)
    wide_CD = torch.randn(2, 70, device=DEVICE)
    with pytest.raises(EagleError, match="over 65 tokens, expected at most 64"):
        soft_cross_entropy(student_CD=wide_CD, teacher_CD=wide_CD, top_ids_CK=ids_CK, backend="triton")


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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shift", [0.0, 3000.0])
def test_no_loss_is_below_zero_and_nan_stays(backend: Any, shift: float) -> None:
    """A sure teacher and student: the entropy is 0, and rounding grows with the logits."""
    logits_CD = torch.full((64, 40), -17.0)
    logits_CD[:, 3] = 0.0
    logits_CD += shift + torch.rand(64, 1, generator=torch.Generator().manual_seed(0))
    logits_CD, top_ids_CK = logits_CD.to(DEVICE), logits_CD.topk(3).indices.to(DEVICE)
    judged = soft_cross_entropy(
        student_CD=logits_CD.clone(), teacher_CD=logits_CD, top_ids_CK=top_ids_CK, top_weight=1.0, backend=backend
    )
    spoilt = soft_cross_entropy(student_CD=logits_CD * float("nan"), teacher_CD=logits_CD, backend=backend)
    assert judged.losses_C.min() >= 0
    assert judged.top_losses_C is not None
    assert judged.top_losses_C.min() >= 0
    assert spoilt.losses_C.isnan().all()


def test_strided_logits_and_no_positions() -> None:
    wide = torch.full((3, 120), float("nan"), device=DEVICE)
    wide[:, :101] = torch.randn(3, 101, device=DEVICE)
    student_CD, teacher_CD = wide[:, :101].clone(), wide[:, :101]
    expected = soft_cross_entropy_reference(student_CD=student_CD, teacher_CD=teacher_CD)
    judged = soft_cross_entropy(student_CD=student_CD, teacher_CD=teacher_CD, backend="triton")
    close(judged.losses_C, expected.losses_C, torch.float32)
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
