"""Unrolled heads against plain causal forwards and against one explicit mask over all steps' keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eagle.heads.eagle1 import DraftHead
from eagle.train.batches import Batch
from eagle.train.unroll import Between, Checkpointing, unroll
from tests.train.batch_cases import HIDDEN, random_batch, small_head, small_tokens
from tests.train.test_merged_attention import explicit

VERSIONS = {"eagle1": HIDDEN, "eagle3": 3 * HIDDEN}
ROWS = {"one": [[9], [12], [5]], "packed": [[4, 7, 1], [12], [6, 3]]}
STEPS = 4


def _unrolled(head: DraftHead, batch: Batch, steps: int = STEPS, **options: Any) -> list[torch.Tensor]:
    embeddings_BTH = small_tokens().full.embed(batch.ids_BT)
    where = dict(positions_BT=batch.positions_BT, document_BT=batch.document_BT)
    return unroll(head, batch.states_BTX, embeddings_BTH, steps=steps, **where, **options)


def _valid(batch: Batch, step: int) -> torch.Tensor:
    """bool [B, T]: token i + 1 + step is of i's document: the step has its inputs."""
    tokens = batch.ids_BT.shape[1]
    valid_BT = torch.zeros_like(batch.supervised_BT)
    for b in range(len(valid_BT)):
        for i in range(tokens - 1 - step):
            valid_BT[b, i] = batch.document_BT[b, i] == batch.document_BT[b, i + 1 + step] != -1
    return valid_BT


def _chained(head: DraftHead, batch: Batch, row: int, document: int, start: int) -> list[torch.Tensor]:
    """Drafts from a document's index `start`: plain causal forwards over a sequence that grows by the head's own features."""
    inside_T = batch.document_BT[row] == document
    embeddings_TH = small_tokens().full.embed(batch.ids_BT[row, inside_T])
    features = list(head.fuse(batch.states_BTX[row, inside_T])[: start + 1])
    predictions: list[torch.Tensor] = []
    while len(predictions) < STEPS and len(features) < len(embeddings_TH):
        out_TH = head(torch.stack(features)[None], embeddings_TH[None, 1 : 1 + len(features)])[0]
        predictions.append(out_TH[-1])
        features.append(out_TH[-1])
    return predictions


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_unrolled_chains_equal_chains_drafted_one_by_one(version: str, rows: str, window: int | None) -> None:
    head, batch = small_head(version), random_batch(ROWS[rows], states=VERSIONS[version])
    head.config.sliding_window = window
    with torch.no_grad():
        steps = _unrolled(head, batch)
        compared = 0
        for b in range(len(ROWS[rows])):
            starts = batch.positions_BT[b]
            for i in (batch.document_BT[b] >= 0).nonzero()[:, 0].tolist():
                chain = _chained(head, batch, b, int(batch.document_BT[b, i]), int(starts[i]))
                for step, prediction_H in enumerate(chain):
                    torch.testing.assert_close(steps[step][b, i], prediction_H)
                    compared += 1
    assert compared == sum(int(_valid(batch, step).sum()) for step in range(STEPS))


def _reference(head: DraftHead, batch: Batch, between: Between) -> list[torch.Tensor]:
    """The same steps with softmax over an explicit [T, steps * T] mask."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys.append(key)
        values.append(value)
        return explicit(query, keys, values, batch.document_BT)

    embeddings_BTH = small_tokens().full.embed(batch.ids_BT)
    inputs, predictions = head.fuse(batch.states_BTX), []
    for step in range(STEPS):
        moved = torch.zeros_like(embeddings_BTH)
        moved[:, : -1 - step] = embeddings_BTH[:, 1 + step :]
        inputs = head(inputs, moved, positions_BT=batch.positions_BT + step, attend=attend)
        predictions.append(inputs)
        inputs = inputs.detach() if between == "detach" else inputs
    return predictions


def _gradients(
    make: Callable[[DraftHead, Batch], list[torch.Tensor]], version: str, batch: Batch
) -> tuple[float, dict[str, torch.Tensor]]:
    """Of a loss that weighs every valid prediction of every step differently."""
    head = small_head(version)
    generator = torch.Generator().manual_seed(9)
    loss = torch.zeros((), dtype=torch.float64)
    for step, predictions_BTH in enumerate(make(head, batch)):
        valid_BT = _valid(batch, step)
        chosen_SH = predictions_BTH[valid_BT]
        loss = loss + (chosen_SH * torch.randn(chosen_SH.shape, generator=generator, dtype=torch.float64)).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("between", ["flow", "detach"])
def test_gradients_equal_those_of_the_explicit_mask(version: str, rows: str, between: Between) -> None:
    batch = random_batch(ROWS[rows], states=VERSIONS[version])
    mine = _gradients(lambda head, batch: _unrolled(head, batch, between=between), version, batch)
    reference = _gradients(lambda head, batch: _reference(head, batch, between), version, batch)
    assert len(mine[1]) >= 9
    torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("version", VERSIONS)
def test_detaching_changes_the_gradient_and_not_the_predictions(version: str) -> None:
    batch = random_batch(ROWS["one"], states=VERSIONS[version])
    flow = _gradients(lambda head, batch: _unrolled(head, batch, between="flow"), version, batch)
    detached = _gradients(lambda head, batch: _unrolled(head, batch, between="detach"), version, batch)
    assert flow[0] == detached[0]
    assert not torch.allclose(flow[1]["fc.weight"], detached[1]["fc.weight"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("between", ["flow", "detach"])
def test_checkpointed_steps_have_the_same_gradients(version: str, between: Between) -> None:
    batch = random_batch(ROWS["packed"], states=VERSIONS[version])
    plain = _gradients(lambda head, batch: _unrolled(head, batch, between=between), version, batch)
    again = _gradients(
        lambda head, batch: _unrolled(head, batch, between=between, checkpointing="steps"), version, batch
    )
    torch.testing.assert_close(plain, again, rtol=0, atol=0)


def _saved_elements(version: str, tokens: int, steps: int, checkpointing: Checkpointing = "none") -> int:
    """Elements of the distinct tensors kept for the backward, weights left out."""
    head, batch = small_head(version), random_batch([[tokens]], states=VERSIONS[version])
    weights = {parameter.untyped_storage().data_ptr() for parameter in head.parameters()}
    sizes: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            held.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        predictions = _unrolled(head, batch, steps, checkpointing=checkpointing)
    assert len(predictions) == steps
    return sum(sizes.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_grows_linearly_in_tokens_and_in_steps(version: str) -> None:
    base = _saved_elements(version, 64, 2)
    assert _saved_elements(version, 256, 2) == pytest.approx(4 * base, rel=0.01)
    # One more step always costs the same.
    first, second = _saved_elements(version, 64, 4), _saved_elements(version, 64, 6)
    assert second - first == pytest.approx(first - base, rel=0.01)


def test_checkpointing_keeps_a_fraction() -> None:
    assert _saved_elements("eagle3", 64, 4, "steps") < 0.5 * _saved_elements("eagle3", 64, 4)


def test_a_row_shorter_than_the_unroll_is_harmless() -> None:
    batch = random_batch([[2]])
    steps = _unrolled(small_head("eagle1"), batch)
    assert [step.shape for step in steps] == [(1, 2, HIDDEN)] * STEPS
    assert all(step.isfinite().all() for step in steps)
