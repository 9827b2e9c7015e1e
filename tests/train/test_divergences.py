"""The divergences' values and analytic gradients against autograd of the plain formulas."""

import math
from collections.abc import Callable

import pytest
import torch

from eagle.train.divergences import DIVERGENCES, Teacher, top_k

PLAIN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "reverse_kl": lambda p, q: (q * (q / p).log()).sum(-1),
    "js": lambda p, q: ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2,
    "tv": lambda p, q: 1 - torch.minimum(p, q).sum(-1),
}


def _logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(6, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_every_name_has_a_formula() -> None:
    assert PLAIN.keys() == DIVERGENCES.keys()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_values_and_gradients_equal_the_formula(name: str) -> None:
    z = _logits(1).requires_grad_()
    p = _logits(0).softmax(-1)
    expected = PLAIN[name](p, z.softmax(-1))
    losses, slope = DIVERGENCES[name](Teacher(_logits(0)), z.detach().log_softmax(-1))
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), z)[0])


@pytest.mark.parametrize("name", DIVERGENCES)
def test_distributions_without_overlap_stay_finite(name: str) -> None:
    """Probabilities below the smallest float32."""
    teacher, z = torch.zeros(1, 5), torch.zeros(1, 5)
    teacher[0, 0], z[0, 1] = 300.0, 300.0
    losses, slope = DIVERGENCES[name](Teacher(teacher), z.log_softmax(-1))
    assert losses.isfinite().all()
    assert slope.isfinite().all()
    bounds = {"js": math.log(2), "tv": 1.0}
    if name in bounds:
        assert losses.item() == pytest.approx(bounds[name])


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "js", "tv"])
def test_a_perfect_head_has_no_loss_and_no_gradient(name: str) -> None:
    losses, slope = DIVERGENCES[name](Teacher(_logits(0)), _logits(0).log_softmax(-1))
    torch.testing.assert_close(losses, torch.zeros(6, dtype=torch.float64))
    if name != "tv":  # which has a kink there
        torch.testing.assert_close(slope, torch.zeros(6, 11, dtype=torch.float64))


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_no_loss_is_below_zero(name: str, dtype: torch.dtype, shift: float) -> None:
    """For equal logits, and nearly equal ones, where the terms' rounding is all there is."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        z = (4 * torch.randn(64, 50, generator=generator) + shift).to(dtype)
        near = z.float() + 1e-6 * torch.randn(64, 50, generator=generator)
        for student in (z, near):
            losses, slope = DIVERGENCES[name](Teacher(z), student.float().log_softmax(-1))
            assert losses.min() >= 0
            assert slope.isfinite().all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_what_is_not_a_number_stays_one(name: str) -> None:
    """Training stops at it; a bound from below must not hide it."""
    z = torch.full((1, 5), float("nan"))
    assert DIVERGENCES[name](Teacher(torch.zeros(1, 5)), z.log_softmax(-1))[0].isnan().all()


@pytest.mark.parametrize("count", [1, 4, 11])
def test_top_k_is_the_cross_entropy_of_the_likeliest_tokens(count: int) -> None:
    z, p = _logits(1).requires_grad_(), _logits(0).softmax(-1)
    kept = p >= p.sort(dim=-1, descending=True).values[:, count - 1 : count]
    expected = -(torch.where(kept, p, 0.0) * z.log_softmax(-1)).sum(-1)
    losses, slope = top_k(Teacher(_logits(0)), z.detach().log_softmax(-1), count=count)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(slope, torch.autograd.grad(expected.sum(), z)[0])


def test_a_part_of_a_teacher_is_that_teacher_at_those_positions() -> None:
    chosen = torch.tensor([True, False, True, True, False, False])
    torch.testing.assert_close(Teacher(_logits(0)).at(chosen).p, _logits(0)[chosen].softmax(-1))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_autocast_does_not_lower_the_precision(name: str) -> None:
    teacher, log_q = Teacher(_logits(0).float()), _logits(1).float().log_softmax(-1)
    expected = DIVERGENCES[name](teacher, log_q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = DIVERGENCES[name](teacher, log_q)
    for mine, reference in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, reference)
