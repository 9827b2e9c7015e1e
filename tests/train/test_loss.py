"""The chunked losses of unrolled heads against loops over documents, indices and steps; values and gradients."""

import dataclasses
from typing import Any

import pytest
import torch

from eagle.data import chunks
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.train.batches import Batch
from eagle.train.divergences import DIVERGENCES
from eagle.train.draftable import Draftable
from eagle.train.loss import Losses, draft_losses
from eagle.train.objective import Objective
from tests.train.batch_cases import HIDDEN, IDS, VOCAB, random_batch, small_head, small_tokens
from tests.train.test_divergences import PLAIN

ROWS = [[4, 7, 1], [12], [2, 3]]
STEPS = 3
OBJECTIVE = Objective(
    steps=STEPS, decay=0.7, regression_weight=2.0, classification_weight=0.3, distill_weight=0.2, distill_top_k=4
)


def _predictions(batch: Batch) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    shape = batch.features_BTH.shape
    return [(2 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_() for _ in range(STEPS)]


def _ours(
    head: DraftHead, batch: Batch, predictions: list[torch.Tensor], tokens: DraftTokens, objective: Objective
) -> Losses:
    return draft_losses(
        head=head, predictions=predictions, batch=batch, tokens=tokens, objective=objective, draftable=Draftable(tokens)
    )


def _naive(
    head: DraftHead, batch: Batch, predictions: list[torch.Tensor], tokens: DraftTokens, objective: Objective
) -> dict[str, Any]:
    """The definitions, one (row, index, step) after the other."""
    ids = list(IDS) if tokens.vocabulary is not None else list(range(VOCAB))
    zero = torch.zeros((), dtype=torch.float64)
    sums = {name: [zero] * STEPS for name in ("regression", "classification", "distillation")}
    outside = 0
    for b in range(len(batch.ids_BT)):
        documents = batch.document_BT[b].tolist()
        for i, step in ((i, step) for i in range(len(documents)) for step in range(STEPS)):
            m = i + 2 + step  # the token that is drafted
            if m >= len(documents) or documents[m] != documents[i] or not batch.supervised_BT[b, m]:
                continue
            target_H, prediction_H = batch.features_BTH[b, m - 1], predictions[step][b, i]
            gap_H = (prediction_H - target_H).abs()
            l1 = torch.where(gap_H < 1, 0.5 * gap_H**2, gap_H - 0.5).mean()
            sums["regression"][step] = sums["regression"][step] + l1
            logits_V = tokens.full.logits(target_H)
            if int(logits_V.argmax()) not in ids:
                outside += 1
                continue
            p_D = logits_V.softmax(-1)[ids]
            p_D = p_D / p_D.sum()
            q_D = head.logits(prediction_H, tokens).softmax(-1)
            loss = PLAIN[objective.divergence](p_D, q_D)
            sums["classification"][step] = sums["classification"][step] + loss
            best = p_D.topk(objective.distill_top_k).indices
            sums["distillation"][step] = sums["distillation"][step] - (p_D[best] * q_D[best].log()).sum()
    total = sum(
        objective.decay**step * objective.total(*(sums[name][step] for name in sums))  # type: ignore[arg-type]
        for step in range(STEPS)
    )
    return {**{name: torch.stack(values) for name, values in sums.items()}, "total": total, "outside": outside}


# Chunks are the same code for all divergences.
CASES = [*[("soft_ce", rows) for rows in (1, 3, 100)], *[(name, 3) for name in DIVERGENCES if name != "soft_ce"]]


@pytest.mark.parametrize(("divergence", "chunk_rows"), CASES)
@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
@pytest.mark.parametrize("reduced", [False, True])
def test_losses_and_gradients_equal_the_formulas(
    chunk_rows: int, version: str, reduced: bool, divergence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = small_tokens(reduced=reduced)
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk_rows * tokens.size)
    head, batch = small_head(version, reduced=reduced), random_batch(ROWS)
    objective = dataclasses.replace(OBJECTIVE, divergence=divergence)
    mine, plain = _predictions(batch), _predictions(batch)
    ours = _ours(head, batch, mine, tokens, objective)
    naive = _naive(head, batch, plain, tokens, objective)
    assert bool(naive["outside"]) == reduced, "the case must tell something"
    torch.testing.assert_close(ours.total.double(), naive["total"].detach(), rtol=1e-5, atol=1e-5)
    for name in ("regression", "classification", "distillation"):
        torch.testing.assert_close(getattr(ours, f"{name}_K"), naive[name].detach(), rtol=1e-5, atol=1e-5)
    weights = head.logit_parameters()
    assert len(weights) == (2 if version == "eagle3" else 0)
    for gradient, reference in zip(
        torch.autograd.grad(3 * ours.total, [*mine, *weights]),
        torch.autograd.grad(3 * naive["total"], [*plain, *weights]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_no_supervised_position_gives_zero_losses_and_gradients_for_every_parameter(version: str) -> None:
    """Other processes wait for them."""
    batch = random_batch(ROWS)
    batch = dataclasses.replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
    head, predictions = small_head(version, reduced=True), _predictions(batch)
    losses = _ours(head, batch, predictions, small_tokens(reduced=True), OBJECTIVE)
    assert losses.total.item() == 0.0
    for gradient in torch.autograd.grad(losses.total, [*predictions, *head.logit_parameters()]):
        assert not gradient.any()


def test_terms_without_weight_are_not_computed() -> None:
    batch, objective = random_batch(ROWS), dataclasses.replace(OBJECTIVE, regression_weight=0.0, distill_weight=0.0)
    losses = _ours(small_head("eagle3"), batch, _predictions(batch), small_tokens(), objective)
    assert not losses.regression_K.any()
    assert not losses.distillation_K.any()
    assert losses.classification_K.all()


def test_bfloat16_predictions_are_judged_in_float32() -> None:
    """A bf16 log-softmax over 50 tokens would be off in the third digit."""
    batch, tokens, head = random_batch(ROWS), small_tokens(), small_head("eagle1")
    tokens.full.float()
    low = [prediction.detach().bfloat16() for prediction in _predictions(batch)]
    judged = _ours(head, batch, low, tokens, OBJECTIVE)
    exact = _ours(head, batch, [prediction.float() for prediction in low], tokens, OBJECTIVE)
    assert judged.total.dtype == torch.float32
    torch.testing.assert_close(judged.total, exact.total)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_teachers_logits_are_computed_once_for_all_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, tokens, head = random_batch(ROWS), small_tokens(), small_head("eagle3")
    positions, compute = [], type(tokens).logits

    def count(self: DraftTokens, features: torch.Tensor) -> torch.Tensor:
        positions.append(len(features))
        return compute(self, features)

    monkeypatch.setattr(DraftTokens, "logits", count)
    predictions = (_predictions(batch) * 2)[:steps]
    _ours(head, batch, predictions, tokens, dataclasses.replace(OBJECTIVE, steps=steps, regression_weight=0.0))
    assert sum(positions) == int(batch.mask(0).sum())


def test_no_tensor_of_all_positions_and_tokens_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kept for the backward nor made by any operator: a chunk's logits are the largest."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", 20 * VOCAB)
    batch = random_batch([[300]] * 2)
    head, tokens, predictions = small_head("eagle1"), small_tokens(), _predictions(batch)

    class Widest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCAB,):
                self.rows = max(self.rows, result.numel() // VOCAB)
            return result

    with Widest() as mode:
        _ours(head, batch, predictions, tokens, OBJECTIVE).total.backward()
    assert mode.rows == 20
    assert HIDDEN < VOCAB


def test_autocast_is_off_where_distributions_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    real = DIVERGENCES["soft_ce"]

    def spy(teacher: Any, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states.append(torch.is_autocast_enabled("cpu"))
        return real(teacher, log_q_CD)

    monkeypatch.setitem(DIVERGENCES, "soft_ce", spy)
    batch, tokens, head = random_batch(ROWS), small_tokens(), small_head("eagle1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _ours(head, batch, _predictions(batch), tokens, OBJECTIVE)
    assert len(states) == STEPS
    assert not any(states)


def test_gradients_in_bfloat16_are_scaled_by_a_factor_in_float32() -> None:
    """1.003 in bfloat16 is 1."""
    batch, tokens, head = random_batch(ROWS), small_tokens(), small_head("eagle1")
    tokens.full.float()
    objective = dataclasses.replace(OBJECTIVE, regression_weight=0.0)
    low = [prediction.detach().bfloat16().requires_grad_() for prediction in _predictions(batch)]
    total = _ours(head, batch, low, tokens, objective).total
    plain = torch.autograd.grad(total, low, retain_graph=True)
    scaled = torch.autograd.grad(1.003 * total, low)
    for one, other in zip(plain, scaled, strict=True):
        assert torch.equal(other, (one.float() * torch.tensor(1.003)).bfloat16())
        assert not torch.equal(other, one)
