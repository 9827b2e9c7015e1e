"""Which positions a reduced vocabulary could draft: the bits, and that remembering them changes nothing."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from eagle.target.token_layers import TokenLayers
from eagle.train import draftable as module
from eagle.train.batches import Batch
from eagle.train.draftable import Draftable
from eagle.train.loss import Losses, draft_losses
from eagle.train.objective import Objective
from tests.train.batch_cases import IDS, VOCAB, random_batch, small_head, small_tokens

ROWS = [[4, 7, 1], [12]]


def _bits(draftable: Draftable, batch: Batch) -> torch.Tensor:
    targets_S = batch.mask(0).flatten().nonzero()[:, 0] + 1
    return draftable.of(batch.features_BTH, targets_S, document_BT=batch.document_BT, numbers=batch.numbers)


def _expected(batch: Batch) -> list[bool]:
    tokens, found = small_tokens(), []
    for b, i in batch.mask(0).nonzero().tolist():
        found.append(int(tokens.full.logits(batch.features_BTH[b, i + 1]).argmax()) in IDS)
    return found


def test_bits_say_whether_the_targets_choice_is_a_draft_token_and_are_computed_once() -> None:
    batch, draftable = random_batch(ROWS), Draftable(small_tokens(reduced=True))
    expected = _expected(batch)
    assert 0 < sum(expected) < len(expected), "the case must tell something"
    for _ in range(2):
        assert _bits(draftable, batch).tolist() == expected
        assert draftable.computed == len(expected)
    assert (
        sum(len(known_T) for known_T in draftable.known.values()) == 23
    )  # a byte a token; that of one token has nothing to predict
    assert {known_T.dtype for known_T in draftable.known.values()} == {torch.int8}


def test_a_document_is_recognised_in_another_row_and_place() -> None:
    batch, draftable = random_batch(ROWS), Draftable(small_tokens(reduced=True))
    _bits(draftable, batch)
    computed = draftable.computed
    # The document of 7 tokens, alone in a row and padded.
    inside = slice(4, 11)
    other = random_batch([[7], [9]], seed=5)
    for name in ("features_BTH", "supervised_BT"):
        getattr(other, name)[0, :7] = getattr(batch, name)[0, inside]
    other = dataclasses.replace(other, numbers=((1,), (77,)))
    assert _bits(draftable, other).tolist() == _expected(other)
    assert draftable.computed == computed + int(other.mask(0)[1].sum())


def test_losses_and_gradients_are_identical_with_remembered_bits() -> None:
    head, batch, tokens = small_head("eagle1", reduced=True), random_batch(ROWS), small_tokens(reduced=True)
    draftable = Draftable(tokens)
    prediction = torch.randn(batch.features_BTH.shape, dtype=torch.float64, requires_grad=True)

    def losses() -> Losses:
        return draft_losses(
            head=head, predictions=[prediction], batch=batch, tokens=tokens, objective=Objective(), draftable=draftable
        )

    first = losses()
    computed = draftable.computed
    second = losses()
    assert 0 < computed == draftable.computed
    assert torch.equal(first.total, second.total)
    gradients = [torch.autograd.grad(result.total, prediction)[0] for result in (first, second)]
    assert torch.equal(*gradients)


def test_beyond_the_memory_limit_documents_are_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 12)
    batch, draftable = random_batch(ROWS), Draftable(small_tokens(reduced=True))
    for _ in range(2):
        assert _bits(draftable, batch).tolist() == _expected(batch)
    assert sum(len(known_T) for known_T in draftable.known.values()) == 11
    assert set(draftable.known) == {0, 1}


def test_documents_without_numbers_are_not_remembered() -> None:
    batch, draftable = random_batch(ROWS), Draftable(small_tokens(reduced=True))
    batch = dataclasses.replace(batch, numbers=((), ()))
    assert _bits(draftable, batch).tolist() == _expected(batch)
    assert not draftable.known


def test_a_full_vocabulary_needs_no_bits() -> None:
    batch, draftable = random_batch(ROWS), Draftable(small_tokens())
    assert _bits(draftable, batch).all()
    assert draftable.computed == 0


def test_a_documents_bits_do_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's last bits depend on its rows: here its likeliest token does, to the full."""

    def by_rows(layers: TokenLayers, features: torch.Tensor) -> torch.Tensor:
        chosen = IDS[0] if len(features) % 2 else 0  # a draft token or none
        return functional.one_hot(torch.full((len(features),), chosen), VOCAB).float()

    monkeypatch.setattr(TokenLayers, "logits", by_rows)
    batch = random_batch([[9, 14, 11], [12]])
    together = Draftable(small_tokens(reduced=True))
    _bits(together, batch)
    found = []
    for number, (row, start, end) in enumerate([(0, 0, 9), (0, 9, 23), (0, 23, 34), (1, 0, 12)]):
        alone = random_batch([[end - start]])
        for name in ("features_BTH", "supervised_BT"):
            getattr(alone, name)[0] = getattr(batch, name)[row, start:end]
        draftable = Draftable(small_tokens(reduced=True))
        _bits(draftable, dataclasses.replace(alone, numbers=((number,),)))
        assert torch.equal(draftable.known[number], together.known[number])
        found.append(draftable.known[number].max().item())
    assert set(found) == {0, 1}, "the case must tell something"


def test_bits_of_features_that_depend_on_the_batch_are_not_remembered() -> None:
    batch, draftable = random_batch(ROWS), Draftable(small_tokens(reduced=True), memory="nothing")
    for _ in range(2):
        assert _bits(draftable, batch).tolist() == _expected(batch)
    assert draftable.computed == 2 * len(_expected(batch))
    assert not draftable.known
