"""Validation: both losses, agreement, and the acceptance that a short draft chain would have, without decoding.

K chain depths (0 is the first draft token, 0-alpha), S supervised tokens of a document, C rows of a chunk, V the
vocabulary, D the draft vocabulary. The chain is teacher-forced: its tokens are the document's, its features the head's
own (see eagle/train/chain.py). Acceptance and agreement are with the target's FULL distribution, whatever the head can
say; the losses are those of training (eagle/train/loss.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional

from eagle.data.documents import Document, Documents
from eagle.heads import EagleHead
from eagle.train.chain import unroll
from eagle.train.loss import CHUNK_ELEMENTS, restricted_teacher
from eagle.vocab import DraftTokens


class Tally:
    """Sums over validation documents; every sum is a float64 tensor, so that processes can add theirs up."""

    def __init__(self, depth: int, device: torch.device):
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        """SmoothL1 and soft cross-entropy at depth 0, summed over the supervised tokens"""
        self.counted_K = torch.zeros(depth, dtype=torch.float64, device=device)
        """supervised tokens that the chain reaches at this depth"""
        self.acceptance_K = torch.zeros_like(self.counted_K)
        """sum over them of sum_x min(p(x), q(x)): what speculative sampling would accept"""
        self.attempts_K = torch.zeros_like(self.counted_K)
        """chains whose drafts of all earlier depths were the target's greedy choice"""
        self.agreed_K = torch.zeros_like(self.counted_K)
        """those whose draft at this depth is so too"""

    def reduce(self, accelerator: Accelerator) -> None:
        """Adds up the processes' sums (a collective)."""
        for name, value in vars(self).items():
            setattr(self, name, accelerator.reduce(value, reduction="sum"))

    def summary(self, *, regression_weight: float, classification_weight: float) -> dict[str, Any]:
        """The metrics as plain numbers. A depth that no chain reached has None."""
        count = max(1.0, self.counted_K[0].item())
        regression, classification = (self.losses / count).tolist()
        conditional = _ratios(self.agreed_K, self.attempts_K)
        tau, survive = 1.0, 1.0
        for agreement in conditional:
            survive *= agreement or 0.0
            tau += survive
        return {
            "val_loss": regression_weight * regression + classification_weight * classification,
            "val_regression": regression,
            "val_classification": classification,
            "val_top1_agreement": conditional[0],
            "val_acceptance": _ratios(self.acceptance_K, self.counted_K),
            "val_agreement": conditional,
            "val_tau": tau,
            "val_tokens": int(self.counted_K[0].item()),
        }


def _ratios(numerators_K: torch.Tensor, denominators_K: torch.Tensor) -> list[float | None]:
    pairs = zip(numerators_K.tolist(), denominators_K.tolist(), strict=True)
    return [above / below if below else None for above, below in pairs]


@torch.no_grad()
def tally_document(
    tally: Tally, head: EagleHead, document: Document, *, tokens: DraftTokens, device: torch.device
) -> None:
    """Adds one document (T >= 3 tokens) to the tally.

    The draft for token m at depth s is row m - 2 - s of chain step s; it is compared with p(t_m), the softmax of
    logits(f_{m-1}).
    """
    features_TH = document.features_TH.to(device, torch.float32)
    embeddings_TH = tokens.full.embed(document.input_ids_T[None].to(device))[0]
    chain = unroll(head, features_TH=features_TH, embeddings_TH=embeddings_TH, depth=len(tally.counted_K))
    supervised_S = document.loss_mask_T.nonzero()[:, 0].to(device)
    supervised_S = supervised_S[supervised_S >= 2]
    # agreed[s][i]: the chain from index i drafts the target's greedy choice at depth s. judged[s][i]: it counts.
    agreed, judged = ([torch.zeros(len(step), dtype=torch.bool, device=device) for step in chain] for _ in "ab")
    for m_C in supervised_S.split(max(1, CHUNK_ELEMENTS // tokens.full.vocab_size)):
        logits_CV = tokens.full.logits(features_TH[m_C - 1]).float()
        greedy_C, teacher_CD = logits_CV.argmax(dim=-1), tokens.restrict(logits_CV.softmax(dim=-1))
        learned_CD, learns_C1 = restricted_teacher(logits_CV, tokens)
        if learns_C1 is not None:
            learned_CD = learned_CD * learns_C1
        for depth, predictions_IH in enumerate(chain):
            reached = m_C - 2 - depth >= 0
            row_C = (m_C - 2 - depth)[reached]
            student_CD = tokens.logits(predictions_IH[row_C]).float()
            if depth == 0:
                tally.losses[0] += _smooth_l1(predictions_IH[row_C], features_TH[m_C - 1])
                tally.losses[1] += functional.cross_entropy(student_CD, learned_CD, reduction="sum")
            tally.counted_K[depth] += len(row_C)
            tally.acceptance_K[depth] += torch.minimum(student_CD.softmax(dim=-1), teacher_CD[reached]).sum()
            agreed[depth][row_C] = tokens.to_target(student_CD.argmax(dim=-1)) == greedy_C[reached]
            judged[depth][row_C] = True
    alive = torch.ones(len(chain[0]), dtype=torch.bool, device=device)
    for depth, (agreed_I, judged_I) in enumerate(zip(agreed, judged, strict=True)):
        alive = alive[: len(judged_I)] & judged_I
        tally.attempts_K[depth] += alive.sum()
        alive = alive & agreed_I
        tally.agreed_K[depth] += alive.sum()


def _smooth_l1(predictions_CH: torch.Tensor, targets_CH: torch.Tensor) -> torch.Tensor:
    return functional.smooth_l1_loss(predictions_CH.float(), targets_CH, reduction="none").mean(dim=-1).sum()


def validate(
    head: EagleHead,
    source: Documents,
    documents: Sequence[int],
    *,
    tokens: DraftTokens,
    depth: int,
    accelerator: Accelerator,
    autocast: torch.autocast,
) -> Tally:
    """The tally over `documents`, shared out among the processes; every process returns the whole."""
    tally = Tally(depth, accelerator.device)
    head.eval()
    with autocast:
        for number in documents[accelerator.process_index :: accelerator.num_processes]:
            tally_document(tally, head, source[number], tokens=tokens, device=accelerator.device)
    head.train()
    tally.reduce(accelerator)
    return tally
