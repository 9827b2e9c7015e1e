"""What a draft's children are chosen by: scores that share verification's noise, or draws from q with noise of their own.

B rows, N nodes, D draft vocabulary, V the target's. Where kernels run (eagle/kernels/dispatch.py), for all rows at once and
without asking the device for anything; elsewhere row by row, as eagle/sample/sampling.py says.
"""

from collections.abc import Sequence

import torch

from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.dispatch import chosen
from eagle.kernels.noise.op import gumbel_rows
from eagle.kernels.placement import sent
from eagle.kernels.sample.op import DTYPES, NAME, sample_and_describe
from eagle.kernels.sample.settings import RowSettings
from eagle.sample.noise import DRAFTS, gumbel
from eagle.sample.row import Row
from eagle.sample.sampling import row_settings


class DraftSampler:
    """For the rows of a batch. vocabulary: the draft tokens, out of the target's `target_size`."""

    def __init__(self, rows: Sequence[Row], vocabulary: DraftTokens, *, target_size: int):
        self.rows, self.vocabulary, self.target_size = list(rows), vocabulary, target_size
        self.greedy = all(row.sampler.sampling.greedy for row in self.rows)
        self._settings: RowSettings | None = None

    def confidence(self, logits_BND: torch.Tensor, *, depth: int) -> torch.Tensor:
        """log softmax(log q + T * G), filtered: RowSampler.draft_scores of the children at `depth`. float32 [B, N, D]."""
        if self.greedy:
            return logits_BND.float().log_softmax(-1)
        if not self._by_kernels(logits_BND):
            return torch.stack(
                [
                    row.sampler.draft_scores(
                        logits_ND,
                        len(row.tokens) - 1 + depth,  # the root lies at position len(row.tokens) - 1
                        target_ids_V=self.vocabulary.target_ids_D,
                        target_size=self.target_size,
                    )
                    for row, logits_ND in zip(self.rows, logits_BND)
                ]
            )
        settings = self._on(logits_BND.device)
        noise_BV = gumbel_rows(settings.seed_B, self._roots(logits_BND.device) + depth, self.target_size)
        temperature_B11 = settings.temperature_B[:, None, None]
        noisy_BND = logits_BND.float() + temperature_B11 * self.vocabulary.restrict(noise_BV)[:, None]
        if settings.filtered:
            _, kept_BND, _ = self._warped(logits_BND, settings)
            noisy_BND = noisy_BND.masked_fill(~(kept_BND | (temperature_B11 == 0)), float("-inf"))
        return noisy_BND.log_softmax(-1)

    def draws(self, logits_BND: torch.Tensor, *, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(log q, log q + noise of the draws) of the children at `depth`. float32 [B, N, D]. Greedy rows: no noise.

        Gumbel-top-k (Kool et al. 2019, arXiv 1903.06059): the largest of the second, in order, are draws without replacement.
        The nodes of a level share a noise vector (a walk sees the children of one of them), cycles never do.
        """
        if not self._by_kernels(logits_BND):
            log_q_BND = torch.stack([row.sampler.draft_log_q(one) for row, one in zip(self.rows, logits_BND)])
            return log_q_BND, torch.stack([self._noisy(row, one, depth) for row, one in zip(self.rows, log_q_BND)])
        log_q_BND = logits_BND.float().log_softmax(-1)
        if self.greedy:
            return log_q_BND, log_q_BND
        settings = self._on(logits_BND.device)
        greedy_B11 = settings.temperature_B[:, None, None] == 0
        scores_BND, kept_BND, log_total_BN1 = self._warped(logits_BND, settings)
        warped_BND = (scores_BND - log_total_BN1).masked_fill(~kept_BND, float("-inf"))
        log_q_BND = torch.where(greedy_B11, log_q_BND, warped_BND)
        roots_B = self._roots(logits_BND.device)
        noise_BV = gumbel_rows(
            settings.seed_B, roots_B + depth, self.vocabulary.full.vocab_size, stream=DRAFTS, cycles_B=roots_B
        )
        return log_q_BND, log_q_BND + torch.where(greedy_B11, 0.0, self.vocabulary.restrict(noise_BV)[:, None])

    def _noisy(self, row: Row, log_q_ND: torch.Tensor, depth: int) -> torch.Tensor:
        sampling, root = row.sampler.sampling, len(row.tokens) - 1
        if sampling.greedy:
            return log_q_ND
        noise_V = gumbel(sampling.seed, root + depth, self.vocabulary.full.vocab_size, stream=DRAFTS, cycle=root)
        return log_q_ND + self.vocabulary.restrict(noise_V.to(log_q_ND.device))

    def _by_kernels(self, logits_BND: torch.Tensor) -> bool:
        refusal = None if logits_BND.dtype in DTYPES else f"logits are {logits_BND.dtype}, not fp16, bf16 or fp32"
        return chosen(NAME, logits_BND.device, refusal=refusal) == "triton"

    def _warped(
        self, logits_BND: torch.Tensor, settings: RowSettings
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(scores / T, the best one 0 [B, N, D]; which the filters keep; log of the kept ones' mass [B, N, 1]).

        Scores that no token can be chosen from are nan, and kept, so that the node's confidences tell (eagle/verify/verifier.py).
        """
        rows, nodes, _ = logits_BND.shape
        logits_RD = logits_BND.flatten(0, 1)
        positions_R = torch.zeros(rows * nodes, dtype=torch.int64, device=logits_BND.device)  # the choice is not used
        choice = sample_and_describe(logits_RD.contiguous(), positions_R=positions_R, settings=settings)
        peaks, thresholds, totals = (
            one.view(rows, nodes, 1) for one in (choice.peaks_R, choice.thresholds_R, choice.log_totals_R)
        )
        temperature_B11 = settings.temperature_B[:, None, None]
        scores_BND = (logits_BND.float() - peaks) / torch.where(temperature_B11 == 0, 1.0, temperature_B11)
        dropped_BND = (scores_BND == float("-inf")) | (scores_BND < thresholds)
        return scores_BND, ~dropped_BND, totals

    def _roots(self, device: torch.device) -> torch.Tensor:
        """int64 [B]: the roots' positions."""
        return sent(torch.tensor([len(row.tokens) - 1 for row in self.rows]), device)

    def _on(self, device: torch.device) -> RowSettings:
        if self._settings is None:
            self._settings = row_settings([row.sampler.sampling for row in self.rows], device)
        return self._settings
