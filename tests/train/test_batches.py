"""The order of the documents, their split into micro-steps, the alignment of a batch, and its noise."""

from itertools import chain
from typing import Any

import pytest
import torch

from eagle.data.store import Document
from eagle.train.batches import MicroBatches, Order, collate, steps


class FakeStore:
    """Document n has n + 3 tokens; token j is 100 n + j, its feature (n, j), supervised where j is odd."""

    def __getitem__(self, number: int) -> Document:
        position_T = torch.arange(number + 3)
        features_TH = torch.stack([torch.full_like(position_T, number), position_T], dim=-1).float()
        return Document(
            id=f"doc-{number}",
            input_ids_T=100 * number + position_T,
            loss_mask_T=position_T % 2 == 1,
            features_TH=features_TH.bfloat16(),
            aux_TA=None,
        )


STORE: Any = FakeStore()


def _order(count: int = 23, global_batch: int = 8, seed: int = 5) -> Order:
    return Order(
        documents=tuple(range(count)),
        lengths=tuple(number + 3 for number in range(count)),
        global_batch=global_batch,
        seed=seed,
    )


def _collate(documents: list[int], *, noise: float = 0.0, seed: int = 0, step: int = 0) -> Any:
    return collate(STORE, documents, hidden_size=2, noise=noise, seed=seed, step=step)


def test_index_i_has_feature_i_token_i_plus_1_target_i_plus_1_and_mask_of_token_i_plus_2() -> None:
    batch = _collate([4, 2])
    assert batch.inputs_BTH.shape == (2, 5, 2)
    assert batch.token_count == 5 + 3
    for row, (number, tokens) in enumerate([(4, 7), (2, 5)]):
        for i in range(tokens - 2):
            assert batch.inputs_BTH[row, i].tolist() == [number, i]
            assert batch.next_ids_BT[row, i] == 100 * number + i + 1
            assert batch.mask_BT[row, i] == ((i + 2) % 2 == 1)
        assert not batch.mask_BT[row, tokens - 2 :].any()
    expected = [[number, i + 1] for number, tokens in [(4, 7), (2, 5)] for i in range(tokens - 2) if i % 2 == 1]
    assert batch.targets_SH.tolist() == expected


def test_an_empty_share_has_nothing_supervised_but_something_to_run() -> None:
    batch = _collate([])
    assert batch.inputs_BTH.shape == (1, 1, 2)
    assert batch.token_count == batch.supervised_count == 0
    assert not batch.mask_BT.any()


def test_an_epoch_takes_every_document_once_and_the_next_in_another_order() -> None:
    order = _order()
    assert order.steps_per_epoch == 3
    epochs = [[order.step_documents(step) for step in range(first, first + 3)] for first in (0, 3)]
    for epoch in epochs:
        assert sorted(chain.from_iterable(epoch)) == list(range(23))
        assert [len(step) for step in epoch] == [8, 8, 7]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [_order(seed=6).step_documents(step) for step in range(3)]


@pytest.mark.parametrize(("micro_steps", "processes"), [(1, 1), (4, 1), (2, 2), (1, 8), (8, 1), (3, 4)])
def test_processes_and_micro_steps_share_out_the_same_step(micro_steps: int, processes: int) -> None:
    order = _order()
    for step in range(6):
        shares = [
            order.micro_batch(step, m, micro_steps=micro_steps, process=p, processes=processes)
            for m in range(micro_steps)
            for p in range(processes)
        ]
        assert list(chain.from_iterable(shares)) == order.step_documents(step)
        assert max(map(len, shares)) <= -(-8 // (micro_steps * processes))


def test_noise_is_uniform_and_a_function_of_seed_step_and_document() -> None:
    def noise_of(batch: Any, row: int, number: int) -> torch.Tensor:
        noise: torch.Tensor = batch.inputs_BTH[row, : number + 1] - _collate([number]).inputs_BTH[0]
        return noise

    alone = noise_of(_collate([20], noise=0.1), 0, 20)
    in_company = noise_of(_collate([22, 20], noise=0.1), 1, 20)
    assert torch.equal(alone, in_company)
    assert alone.abs().max() <= 0.1 + 1e-5
    assert alone.min() < -0.05 < 0.05 < alone.max()
    assert not torch.equal(alone, noise_of(_collate([20], noise=0.1, step=1), 0, 20))
    assert not torch.equal(alone, noise_of(_collate([20], noise=0.1, seed=1), 0, 20))
    clean = _collate([20], noise=0.1)
    assert torch.equal(clean.targets_SH, _collate([20]).targets_SH), "targets carry no noise"


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_start_in_the_middle_as_if_they_had_come_from_the_beginning(workers: int) -> None:
    def run(start: int) -> list[Any]:
        batches = MicroBatches(
            STORE, _order(), hidden_size=2, noise=0.1, start=start, end=5, micro_steps=2, process=0, processes=2
        )
        return list(steps(batches, workers=workers))

    whole, rest = run(0), run(3)
    assert [len(step) for step in whole] == [2] * 5
    assert len(rest) == 2
    for ours, theirs in zip(rest, whole[3:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.inputs_BTH, b.inputs_BTH)
            assert torch.equal(a.next_ids_BT, b.next_ids_BT)
