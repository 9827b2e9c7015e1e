"""How far the head's token distribution q is from the target's p, by name, each with its gradient.

C positions, D tokens. With z the logits of q = softmax(z) and g = d loss / d q, the gradient is

    d loss / d z = q (g - sum_x q(x) g(x)),

which for the cross-entropy -sum p log q (and KL(p||q), the same up to p's entropy) is q - p. No loss is below 0, though the
sums of rounded terms would be for q = p; gradients are of the sums as they are. Total variation is what
decides acceptance: speculative sampling accepts with probability sum_x min(p, q) = 1 - tv (arXiv 2211.17192, theorem 3.5).
"""

import math
from collections.abc import Callable, Mapping
from functools import cached_property

import torch


class Teacher:
    """p of C positions, from its logits [C, D], in float32 at least; what no divergence asks for is not computed."""

    def __init__(self, logits_CD: torch.Tensor):
        self.logits = logits_CD
        self._dtype = torch.promote_types(logits_CD.dtype, torch.float32)
        self._best: dict[int, torch.Tensor] = {}

    @cached_property
    def p(self) -> torch.Tensor:
        return self.logits.softmax(dim=-1, dtype=self._dtype)

    @cached_property
    def log_p(self) -> torch.Tensor:
        return self.logits.log_softmax(dim=-1, dtype=self._dtype)

    def best(self, count: int) -> torch.Tensor:
        """int64 [C, count]: the likeliest tokens."""
        if count not in self._best:
            self._best[count] = self.logits.topk(count, dim=-1).indices
        return self._best[count]

    def at(self, chosen_C: torch.Tensor) -> "Teacher":
        """The positions where chosen_C (bool [C]) is true: views of what has been computed where that is all of them."""
        if bool(chosen_C.all()):
            return self
        part = Teacher(self.logits[chosen_C])
        part._best = {count: ids_CK[chosen_C] for count, ids_CK in self._best.items()}
        return part


Divergence = Callable[[Teacher, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(p, log q [C, D]) -> (losses [C], d losses / d z [C, D]); log q is log_softmax(z)."""


def _dot(left_CD: torch.Tensor, right_CD: torch.Tensor) -> torch.Tensor:
    """[C]: each row's products, summed in the operands' dtype (einsum would take autocast's)."""
    return (left_CD * right_CD).sum(dim=-1)


def soft_ce(teacher: Teacher, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum p log q: EAGLE's."""
    return -_dot(teacher.p, log_q_CD), log_q_CD.exp().sub_(teacher.p)


def kl(teacher: Teacher, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum p (log p - log q): soft_ce less p's entropy, so 0 for a perfect head; the same gradient."""
    losses_C = _dot(teacher.p, teacher.log_p - log_q_CD).clamp_(min=0)
    return losses_C, log_q_CD.exp().sub_(teacher.p)


def reverse_kl(teacher: Teacher, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum q (log q - log p): punishes what the target would not say."""
    q_CD, slope_CD = log_q_CD.exp(), log_q_CD - teacher.log_p
    losses_C = _dot(q_CD, slope_CD)
    return losses_C.clamp(min=0), slope_CD.sub_(losses_C[:, None]).mul_(q_CD)


def js(teacher: Teacher, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p||m) / 2 + KL(q||m) / 2 with m = (p + q) / 2: symmetric, at most log 2."""
    log_m_CD = torch.logaddexp(teacher.log_p, log_q_CD).sub_(math.log(2))
    q_CD, slope_CD = log_q_CD.exp(), log_q_CD - log_m_CD
    forward_C = _dot(teacher.p, teacher.log_p - log_m_CD)
    reverse_C = _dot(q_CD, slope_CD)
    return ((forward_C + reverse_C) / 2).clamp_(min=0), slope_CD.sub_(reverse_C[:, None]).mul_(q_CD).mul_(0.5)


def tv(teacher: Teacher, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum |p - q| / 2: the share of drafts that sampling would reject. Flat for a head that knows nothing."""
    q_CD = log_q_CD.exp()
    gap_CD = q_CD - teacher.p
    losses_C = gap_CD.abs().sum(dim=-1) / 2
    sign_CD = gap_CD.sign_()
    return losses_C, sign_CD.sub_(_dot(q_CD, sign_CD)[:, None]).mul_(q_CD).mul_(0.5)


DIVERGENCES: Mapping[str, Divergence] = {"soft_ce": soft_ce, "kl": kl, "reverse_kl": reverse_kl, "js": js, "tv": tv}


def top_k(teacher: Teacher, log_q_CD: torch.Tensor, *, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum p log q over the `count` tokens that the target finds likeliest (HASS, arXiv 2408.15766, section 3.1).

    p and q stay distributions over all D tokens. Returns as a Divergence does.
    """
    ids_CK = teacher.best(count)
    p_CK = teacher.p.gather(-1, ids_CK)
    losses_C = -(p_CK * log_q_CD.gather(-1, ids_CK)).sum(dim=-1)
    slope_CD = log_q_CD.exp().mul_(p_CK.sum(dim=-1, keepdim=True))
    return losses_C, slope_CD.scatter_add_(-1, ids_CK, -p_CK)
