"""The validation's numbers, against a head that is really chained position by position."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional

from eagle.data import chunks
from eagle.data.store import Document
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.target.token_layers import TokenLayers
from eagle.train.divergences import DIVERGENCES
from eagle.train.metrics import Tally, tally_document
from eagle.train.objective import Objective
from tests.tiny import tiny_model

DEPTH = 3
OBJECTIVE = Objective(regression_weight=1.0, classification_weight=0.1)


@pytest.fixture(scope="module")
def tokens() -> TokenLayers:
    """The tiny target's embedding and an LM head of three words only, so that random heads agree now and then."""
    lm_head_VH = torch.randn(3, 32, generator=torch.Generator().manual_seed(7))
    return TokenLayers(embedding_VH=tiny_model("llama").get_input_embeddings().weight, lm_head_VH=lm_head_VH)


@pytest.fixture(scope="module")
def head() -> EagleHead:
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig.for_target(tiny_model("llama").config, initializer_range=0.1))
    return head.eval().requires_grad_(False)


def _document(tokens_count: int = 14) -> Document:
    ids_T = torch.randint(3, 384, (1, tokens_count), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        features_TH = tiny_model("llama").model(ids_T).last_hidden_state[0]
    mask_T = torch.tensor([j >= 3 and j not in (7, 8) for j in range(tokens_count)])
    return Document(id="d", input_ids_T=ids_T[0], loss_mask_T=mask_T, features_TH=features_TH, aux_TA=None)


def _chained(head: DraftHead, document: Document, tokens: TokenLayers, start: int) -> list[torch.Tensor]:
    """Drafts from index `start` on: plain causal forwards over a sequence that grows by the head's own features."""
    embeddings_TH = tokens.embed(document.input_ids_T[None])[0]
    features, predictions = list(head.fuse(document.states)[: start + 1]), []
    while len(predictions) < DEPTH and start + 1 + len(predictions) <= len(embeddings_TH) - 2:
        inputs_1TH = torch.stack(features)[None]
        predictions.append(head(inputs_1TH, embeddings_TH[None, 1 : 1 + len(features)])[0, -1])
        features.append(predictions[-1])
    return predictions


def _naive(head: EagleHead, document: Document, tokens: TokenLayers) -> dict[str, Any]:
    """The definitions, chain by chain."""
    regression = classification = 0.0
    counted, acceptance, attempts, agreed = ([0.0] * DEPTH for _ in range(4))
    length = len(document.input_ids_T)
    for start in range(length - 2):
        alive = True
        for depth, prediction_H in enumerate(_chained(head, document, tokens, start)):
            judged = bool(document.loss_mask_T[start + 2 + depth])
            target_H = document.features_TH[start + 1 + depth]
            p_V, q_V = tokens.logits(target_H).softmax(-1), tokens.logits(prediction_H).softmax(-1)
            same = bool(p_V.argmax() == q_V.argmax())
            if judged and depth == 0:
                regression += functional.smooth_l1_loss(prediction_H, target_H).item()
                classification -= (p_V * q_V.log()).sum().item()
            if judged:
                counted[depth] += 1
                acceptance[depth] += torch.minimum(p_V, q_V).sum().item()
            alive = alive and judged
            attempts[depth] += alive
            alive = alive and same
            agreed[depth] += alive
    rates = [a / b if b else None for a, b in zip(agreed, attempts, strict=True)]
    survive, tau = 1.0, 1.0
    for rate in rates:
        survive *= rate or 0.0
        tau += survive
    return {
        "val_regression": regression / counted[0],
        "val_classification": classification / counted[0],
        "val_acceptance": [a / b for a, b in zip(acceptance, counted, strict=True)],
        "val_agreement": rates,
        "val_tau": tau,
        "val_tokens": int(counted[0]),
    }


def _summary(head: Any, document: Document, tokens: TokenLayers) -> dict[str, Any]:
    tally = Tally(DEPTH, torch.device("cpu"))
    where = torch.device("cpu")
    tally_document(tally, head, document, tokens=DraftTokens(tokens), objective=OBJECTIVE, device=where)
    return tally.summary(OBJECTIVE)


@pytest.mark.parametrize("chunk_rows", [2, 100])
def test_validation_numbers_equal_their_definitions(
    chunk_rows: int, head: EagleHead, tokens: TokenLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk_rows * tokens.vocab_size)
    document = _document()
    ours, naive = _summary(head, document, tokens), _naive(head, document, tokens)
    assert 0 < naive["val_agreement"][0] < 1, "the case must tell something"
    assert 0 < naive["val_agreement"][1] < 1
    for key, value in naive.items():
        assert ours[key] == pytest.approx(value, rel=1e-4), key
    assert ours["val_loss"] == pytest.approx(naive["val_regression"] + 0.1 * naive["val_classification"], rel=1e-4)


@torch.no_grad()
def test_an_eagle3_head_is_judged_by_its_own_lm_head_over_its_own_features(tokens: TokenLayers) -> None:
    torch.manual_seed(3)
    head = Eagle3Head(Eagle3HeadConfig.for_target(tiny_model("llama").config, vocab_size=3, initializer_range=0.3))
    document, target = _document(), tiny_model("llama").model
    hidden = target(document.input_ids_T[None], output_hidden_states=True).hidden_states
    document = dataclasses.replace(document, aux_TA=torch.cat([layer[0] for layer in hidden[:3]], dim=-1))
    counted, acceptance, attempts, agreed = ([0.0] * DEPTH for _ in range(4))
    for start in range(12):
        alive = True
        for depth, prediction_H in enumerate(_chained(head, document, tokens, start)):
            judged = bool(document.loss_mask_T[start + 2 + depth])
            p_V = tokens.logits(document.features_TH[start + 1 + depth]).softmax(-1)
            q_V = head.lm_head(head.norm(prediction_H)).softmax(-1)
            counted[depth] += judged
            acceptance[depth] += torch.minimum(p_V, q_V).sum().item() * judged
            alive = alive and judged
            attempts[depth] += alive
            alive = alive and bool(p_V.argmax() == q_V.argmax())
            agreed[depth] += alive
    assert 0 < agreed[0] < attempts[0], "the case must tell something"
    objective = Objective(regression_weight=0.0, classification_weight=1.0)
    tally = Tally(DEPTH, torch.device("cpu"))
    draft_tokens, where = DraftTokens(tokens), torch.device("cpu")
    tally_document(tally, head, document, tokens=draft_tokens, objective=objective, device=where)
    summary = tally.summary(objective)
    assert summary["val_acceptance"] == pytest.approx([a / c for a, c in zip(acceptance, counted)], rel=1e-4)
    assert tally.attempts_K.tolist() == attempts
    assert tally.agreed_K.tolist() == agreed
    assert summary["val_regression"] is None
    assert summary["val_loss"] == summary["val_classification"]


class _Oracle:
    """Predicts the true features up to depth `good` - 1 and their negatives (the least likely token) after."""

    window = None

    def __init__(self, document: Document, good: int):
        self.features_TH, self.good = document.features_TH, good

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def logits(self, predictions: torch.Tensor, tokens: DraftTokens) -> torch.Tensor:
        return tokens.logits(predictions)

    def __call__(self, features: Any, embeddings: Any, positions_BT: torch.Tensor, attend: Any) -> torch.Tensor:
        attend(*[torch.zeros(1, 1, features.shape[1], 8)] * 3)
        depth = int(positions_BT[0, 0])
        true_TH = torch.zeros_like(features[0])
        true_TH[: -1 - depth] = self.features_TH[1 + depth :]
        return (true_TH if depth < self.good else -true_TH)[None]


def test_a_head_that_knows_the_next_two_features_has_tau_three(tokens: TokenLayers) -> None:
    document = _document()
    summary = _summary(_Oracle(document, 2), document, tokens)
    assert summary["val_agreement"] == [1.0, 1.0, 0.0]
    assert summary["val_acceptance"][:2] == pytest.approx([1.0, 1.0])
    assert summary["val_acceptance"][2] < 0.5
    assert summary["val_tau"] == 3.0
    assert summary["val_regression"] == 0.0


def test_a_document_too_short_for_the_chain_leaves_the_deep_places_empty(head: EagleHead, tokens: TokenLayers) -> None:
    summary = _summary(head, _document(4), tokens)
    assert summary["val_tokens"] == 1
    assert summary["val_acceptance"][2] is None
    assert summary["val_agreement"][2] is None


def test_a_reduced_vocabulary_is_judged_by_the_full_distribution(head: EagleHead) -> None:
    model = tiny_model("llama")
    full = TokenLayers.of_model(model, model.config)
    document = _document(40)
    p_TV = full.logits(document.features_TH).softmax(-1)
    # Half of the tokens that the target is likeliest to say, and some more.
    greedy = sorted(set(p_TV.argmax(-1).tolist()))
    ids = sorted({*greedy[::2], 5, 60, 200, 383})
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=384)
    counted, acceptance, classification, agreed = [0.0] * DEPTH, [0.0] * DEPTH, 0.0, 0.0
    outside = 0
    for start in range(38):
        for depth, prediction_H in enumerate(_chained(head, document, full, start)):
            if not document.loss_mask_T[start + 2 + depth]:
                continue
            p_V = p_TV[start + 1 + depth]
            q_D = full.logits(prediction_H)[ids].softmax(-1)
            counted[depth] += 1
            acceptance[depth] += sum(min(float(p_V[i]), float(q)) for i, q in zip(ids, q_D))
            if depth == 0:
                agreed += ids[int(q_D.argmax())] == int(p_V.argmax())
                if int(p_V.argmax()) in ids:
                    classification -= float((p_V[ids] / p_V[ids].sum() * q_D.log()).sum())
                else:
                    outside += 1
    assert 0 < outside < counted[0]
    tally = Tally(DEPTH, torch.device("cpu"))
    tokens = DraftTokens(full, vocabulary)
    tally_document(tally, head, document, tokens=tokens, objective=OBJECTIVE, device=torch.device("cpu"))
    summary = tally.summary(OBJECTIVE)
    assert summary["val_acceptance"] == pytest.approx([a / c for a, c in zip(acceptance, counted)], rel=1e-4)
    assert summary["val_classification"] == pytest.approx(classification / counted[0], rel=1e-4)
    assert tally.agreed_K[0] == agreed


def test_a_perfect_head_agrees_wherever_its_vocabulary_has_the_targets_token() -> None:
    model = tiny_model("llama")
    full = TokenLayers.of_model(model, model.config)
    document = _document(40)
    greedy_T = full.logits(document.features_TH).argmax(-1)
    ids = sorted(set(greedy_T.tolist()))[1::2]
    tally = Tally(1, torch.device("cpu"))
    tokens = DraftTokens(full, DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=384))
    oracle: Any = _Oracle(document, 1)
    tally_document(tally, oracle, document, tokens=tokens, objective=OBJECTIVE, device=torch.device("cpu"))
    judged = [int(greedy_T[m - 1]) in ids for m in range(2, 40) if document.loss_mask_T[m]]
    assert 0 < sum(judged) < len(judged)
    assert (tally.agreed_K[0], tally.attempts_K[0]) == (sum(judged), len(judged))


def test_the_validations_classification_is_in_float32_under_autocast(
    head: EagleHead, tokens: TokenLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[bool] = []
    real = DIVERGENCES["soft_ce"]

    def spy(teacher: Any, log_q_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states.append(torch.is_autocast_enabled("cpu"))
        return real(teacher, log_q_CD)

    monkeypatch.setitem(DIVERGENCES, "soft_ce", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _summary(head, _document(), tokens)
    assert states
    assert not any(states)
