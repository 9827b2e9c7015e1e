"""The chunked losses against the formulas written out, values and gradients."""

import pytest
import torch

from eagle.token_layers import TokenLayers
from eagle.train import loss
from eagle.train.loss import draft_losses
from eagle.vocab import DraftTokens, DraftVocabulary


def _tokens(vocabulary: int = 50, hidden: int = 8) -> TokenLayers:
    weight = torch.randn(vocabulary, hidden, generator=torch.Generator().manual_seed(3))
    bias = torch.randn(vocabulary, generator=torch.Generator().manual_seed(4))
    return TokenLayers(embedding_VH=weight, lm_head_VH=weight, lm_head_bias_V=bias, logit_softcap=5.0)


def _naive(
    predictions_SH: torch.Tensor, targets_SH: torch.Tensor, tokens: TokenLayers
) -> tuple[torch.Tensor, torch.Tensor]:
    regression, classification = torch.zeros(()), torch.zeros(())
    for prediction_H, target_H in zip(predictions_SH, targets_SH, strict=True):
        gap_H = (prediction_H - target_H).abs()
        regression = regression + torch.where(gap_H < 1, 0.5 * gap_H**2, gap_H - 0.5).mean()
        p_V, q_V = tokens.logits(target_H).softmax(-1), tokens.logits(prediction_H).softmax(-1)
        classification = classification - (p_V * q_V.log()).sum()
    return regression, classification


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_losses_and_gradients_equal_the_formulas(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = _tokens()
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_rows * tokens.vocab_size)
    generator = torch.Generator().manual_seed(0)
    targets_SH = torch.randn(7, 8, generator=generator)
    ours_SH = (torch.randn(7, 8, generator=generator) * 2).requires_grad_()
    naive_SH = ours_SH.detach().clone().requires_grad_()
    ours = draft_losses(predictions_SH=ours_SH, targets_SH=targets_SH, tokens=DraftTokens(tokens))
    naive = _naive(naive_SH, targets_SH, tokens)
    torch.testing.assert_close(ours, naive)
    (2.0 * ours[0] + 0.3 * ours[1]).backward()
    (2.0 * naive[0] + 0.3 * naive[1]).backward()
    torch.testing.assert_close(ours_SH.grad, naive_SH.grad)


def test_no_supervised_position_gives_zero_losses_and_a_usable_gradient() -> None:
    predictions = torch.randn(2, 3, 8, requires_grad=True)
    none = torch.zeros(2, 3, dtype=torch.bool)
    losses = draft_losses(predictions_SH=predictions[none], targets_SH=torch.zeros(0, 8), tokens=DraftTokens(_tokens()))
    assert [value.item() for value in losses] == [0.0, 0.0]
    (losses[0] + losses[1]).backward()
    assert predictions.grad is not None
    assert not predictions.grad.any()


def test_bfloat16_predictions_are_judged_in_float32() -> None:
    """A bf16 log-softmax over 50 tokens would be off in the third digit."""
    tokens = DraftTokens(_tokens())
    predictions_SH, targets_SH = torch.randn(5, 8), torch.randn(5, 8)
    low = draft_losses(predictions_SH=predictions_SH.bfloat16(), targets_SH=targets_SH, tokens=tokens)
    exact = draft_losses(predictions_SH=predictions_SH.bfloat16().float(), targets_SH=targets_SH, tokens=tokens)
    assert low[1].dtype == torch.float32
    torch.testing.assert_close(low, exact)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_a_reduced_vocabulary_restricts_the_teacher_and_leaves_out_what_it_cannot_say(
    chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = _tokens()
    ids = [1, 4, 5, 9, 17, 18, 20, 23, 30, 31, 33, 34, 36, 40, 41, 45, 46, 48, 49]
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=50)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk_rows * tokens.vocab_size)
    generator = torch.Generator().manual_seed(1)
    targets_SH = torch.randn(9, 8, generator=generator)
    ours_SH = (torch.randn(9, 8, generator=generator) * 2).requires_grad_()
    naive_SH = ours_SH.detach().clone().requires_grad_()
    classification, outside = torch.zeros(()), 0
    for prediction_H, target_H in zip(naive_SH, targets_SH, strict=True):
        logits_V = tokens.logits(target_H)
        if int(logits_V.argmax()) not in ids:
            outside += 1
            continue
        p_V = logits_V.softmax(-1)
        p_D = p_V[ids] / p_V[ids].sum()
        q_V = tokens.logits(prediction_H).softmax(-1)
        classification = classification - (p_D * (q_V[ids] / q_V[ids].sum()).log()).sum()
    assert 0 < outside < 9, "the case must tell something"
    regression = _naive(naive_SH, targets_SH, tokens)[0]  # of all positions
    ours = draft_losses(predictions_SH=ours_SH, targets_SH=targets_SH, tokens=DraftTokens(tokens, vocabulary))
    torch.testing.assert_close(ours, (regression, classification))
    (2.0 * ours[0] + 0.3 * ours[1]).backward()
    (2.0 * regression + 0.3 * classification).backward()
    torch.testing.assert_close(ours_SH.grad, naive_SH.grad)
