"""Validation: both losses, agreement, and the acceptance that a short draft chain would have, without decoding.

K chain depths (0 is the first draft token, 0-alpha), S supervised tokens of a document, C rows of a chunk, V the
vocabulary, D the draft vocabulary. The chain is teacher-forced: its tokens are the document's, its features the head's
own (eagle/train/unroll.py, as in training). Acceptance and agreement are with the target's FULL distribution, whatever
the head can say; the losses are those of training (eagle/train/loss.py).
"""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from eagle.data.chunks import chunk_rows
from eagle.data.documents import Document, Documents
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.train.divergences import Teacher
from eagle.train.loss import smooth_l1
from eagle.train.objective import Objective
from eagle.train.unroll import unroll


class Tally:
    """Sums over validation documents; every sum is a float64 tensor, so that processes can add theirs up."""

    def __init__(self, depth: int, device: torch.device):
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        """SmoothL1 and the objective's divergence at depth 0, summed over the supervised tokens"""
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

    def summary(self, objective: Objective) -> dict[str, Any]:
        """The metrics as plain numbers. A depth that no chain reached has None, as has a regression that is not trained."""
        count = max(1.0, self.counted_K[0].item())
        regression, classification = (self.losses / count).tolist()
        conditional = _ratios(self.agreed_K, self.attempts_K)
        tau, survive = 1.0, 1.0
        for agreement in conditional:
            survive *= agreement or 0.0
            tau += survive
        return {
            "val_loss": objective.total(regression, classification),
            "val_regression": regression if objective.regression_weight > 0 else None,
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
    tally: Tally,
    head: DraftHead,
    document: Document,
    *,
    tokens: DraftTokens,
    objective: Objective,
    device: torch.device,
) -> None:
    """Adds one document (T >= 3 tokens) to the tally.

    The draft for token m at depth s is row m - 2 - s of chain step s; it is compared with p(t_m), the softmax of
    logits(f_{m-1}).
    """
    features_TH = document.features_TH.to(device, torch.float32)
    states_TX = document.states.to(device, torch.float32)
    embeddings_BTH = tokens.full.embed(document.input_ids_T[None].to(device))
    chain = unroll(head, states_TX[None], embeddings_BTH, steps=len(tally.counted_K))
    supervised_S = document.loss_mask_T.nonzero()[:, 0].to(device)
    supervised_S = supervised_S[supervised_S >= 2]
    # agreed[s][i]: the chain from index i drafts the target's greedy choice at depth s. judged[s][i]: it counts.
    agreed, judged = (torch.zeros(len(chain), len(features_TH), dtype=torch.bool, device=device) for _ in "ab")
    for m_C in supervised_S.split(chunk_rows(tokens.full.vocab_size, device)):
        logits_CV = tokens.full.logits(features_TH[m_C - 1]).float()
        greedy_C, full_CD = logits_CV.argmax(dim=-1), tokens.restrict(logits_CV.softmax(dim=-1))
        teacher, learns_C = Teacher(tokens.restrict(logits_CV)), tokens.holds(greedy_C)
        for depth, predictions_1TH in enumerate(chain):
            reached = m_C - 2 - depth >= 0
            row_C = (m_C - 2 - depth)[reached]
            predictions_CH = predictions_1TH[0, row_C]
            log_q_CD = head.logits(predictions_CH, tokens).float().log_softmax(dim=-1)
            if depth == 0:
                tally.losses[0] += smooth_l1(predictions_CH, features_TH[m_C - 1])
                with torch.autocast(device.type, enabled=False):  # in float32, as in training
                    tally.losses[1] += (objective.classify(teacher, log_q_CD)[0] * learns_C).sum()
            tally.counted_K[depth] += len(row_C)
            tally.acceptance_K[depth] += torch.minimum(log_q_CD.exp(), full_CD[reached]).sum()
            agreed[depth, row_C] = tokens.to_target(log_q_CD.argmax(dim=-1)) == greedy_C[reached]
            judged[depth, row_C] = True
    alive_T = torch.ones(len(features_TH), dtype=torch.bool, device=device)
    for depth in range(len(chain)):
        alive_T = alive_T & judged[depth]
        tally.attempts_K[depth] += alive_T.sum()
        alive_T = alive_T & agreed[depth]
        tally.agreed_K[depth] += alive_T.sum()


def validate(
    head: DraftHead,
    source: Documents,
    documents: Sequence[int],
    *,
    tokens: DraftTokens,
    objective: Objective,
    depth: int,
    accelerator: Accelerator,
    autocast: torch.autocast,
) -> Tally:
    """The tally over `documents`, shared out among the processes; every process returns the whole."""
    tally = Tally(depth, accelerator.device)
    head.eval()
    with autocast:
        for number in documents[accelerator.process_index :: accelerator.num_processes]:
            document = source[number]
            tally_document(tally, head, document, tokens=tokens, objective=objective, device=accelerator.device)
    head.train()
    tally.reduce(accelerator)
    return tally
