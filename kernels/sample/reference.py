"""Sampling in plain PyTorch: the judge of the Triton version. Semantics: eagle/sample/sampling.py.

R rows of logits, V vocabulary, B rows of settings; R is a multiple of B, and row r has the settings of row r // (R / B).

score = (logit - best logit) / temperature, float32. All filters keep the scores from some value on: top-k from the k-th best,
top-p from the last whose betters hold less than top_p of the mass, min-p from log(min_p). Scores equal to that value stay
(ties). The token is the kept one with the largest score + Gumbel noise, temperature 0 the one with the largest logit;
among equals the lowest id.
"""

from typing import NamedTuple

import torch

from eagle.kernels.noise.reference import gumbel
from eagle.kernels.sample.settings import RowSettings

NOTHING = -1
"""In place of a token, where none can be chosen."""


class Choice(NamedTuple):
    """What was chosen, and the distribution it was chosen from; a greedy row's is all on its token, its last two fields are 0."""

    tokens_R: torch.Tensor
    """int64; NOTHING where no token can be chosen: a nan, all logits -inf, or, unless greedy, an inf."""
    peaks_R: torch.Tensor
    """float32: the best logit; nan where no token can be chosen, whose row's other fields mean nothing."""
    thresholds_R: torch.Tensor
    """float32: the score from which on tokens are kept, as far as the filters say: -inf without any (tokens of score -inf are
    dropped nevertheless)."""
    log_totals_R: torch.Tensor
    """float32: log of the sum of exp(score) over the kept tokens. A kept token's probability is exp(score - log_total)."""


def sample_reference(logits_RV: torch.Tensor, *, positions_R: torch.Tensor, settings: RowSettings) -> Choice:
    """As op.sample."""
    rows, vocab_size = logits_RV.shape
    of_R = torch.arange(rows, device=logits_RV.device) // (rows // settings.rows)
    logits_RV = logits_RV.float()
    peaks_R, greedy_R = logits_RV.amax(-1), settings.temperature_B[of_R] == 0
    sound_R = torch.where(greedy_R, peaks_R > float("-inf"), peaks_R.isfinite())
    scores_RV = scores(logits_RV, settings.temperature_B[of_R])
    thresholds_R = thresholds(scores_RV, settings, of_R)
    kept_RV = scores_RV.isfinite() & (scores_RV >= thresholds_R[:, None])
    log_totals_R = scores_RV.masked_fill(~kept_RV, float("-inf")).logsumexp(-1)
    seeds, positions = settings.seed_B[of_R].tolist(), positions_R.tolist()
    noise_RV = torch.zeros_like(scores_RV)
    for row, (seed, position) in enumerate(zip(seeds, positions)):
        noise_RV[row] = gumbel(seed & (2**64 - 1), position, vocab_size)
    noisy_RV = (scores_RV + noise_RV).masked_fill(~kept_RV, float("-inf"))
    tokens_R = torch.where(greedy_R, logits_RV.argmax(-1), noisy_RV.argmax(-1))
    return Choice(
        tokens_R=torch.where(sound_R, tokens_R, NOTHING),
        peaks_R=peaks_R.masked_fill(~sound_R, float("nan")),
        thresholds_R=thresholds_R.masked_fill(greedy_R, 0.0),
        log_totals_R=log_totals_R.masked_fill(greedy_R, 0.0),
    )


def scores(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """float32 [R, V], the best one 0. Greedy rows: as for temperature 1."""
    divisor_R1 = torch.where(temperature_R == 0, 1.0, temperature_R)[:, None]
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / divisor_R1


def thresholds(scores_RV: torch.Tensor, settings: RowSettings, of_R: torch.Tensor) -> torch.Tensor:
    """The lowest score that the filters of each row keep; -inf: they keep all. float32 [R]."""
    never = float("-inf")
    vocab_size = scores_RV.shape[1]
    sorted_RV = scores_RV.sort(-1, descending=True).values
    top_k_R1 = settings.top_k_B[of_R].long()[:, None]
    kth_R1 = sorted_RV.gather(1, (top_k_R1 - 1).clamp(0, vocab_size - 1))
    kth_R1 = torch.where((top_k_R1 > 0) & (top_k_R1 < vocab_size), kth_R1, never)
    joint_R1 = settings.joint_B[of_R][:, None] > 0
    seen_RV = sorted_RV.masked_fill((sorted_RV < kth_R1) & ~joint_R1, never)
    probabilities_RV = seen_RV.softmax(-1)
    top_p_R1 = settings.top_p_B[of_R][:, None]
    stay_RV = probabilities_RV.cumsum(-1) - probabilities_RV < top_p_R1
    stay_RV[:, 0] = True
    last_R1 = sorted_RV.masked_fill(~stay_RV, float("inf")).amin(-1, keepdim=True)
    last_R1 = torch.where(top_p_R1 < 1, last_R1, never)
    return torch.cat([kth_R1, last_R1, settings.log_min_p_B[of_R][:, None]], dim=1).amax(-1)
