"""The order of the documents, their split into micro-steps, the alignment of a batch, and its noise."""

from itertools import chain, product
from typing import Any

import pytest
import torch

from eagle.data.documents import Document
from eagle.train.batches import Layout, MicroBatches, Order, collate, pack, steps


class FakeStore:
    """Document n has n + 3 tokens; token j is 100 n + j, its feature (n, j), supervised where j is odd."""

    hidden_size, aux_layers = 2, ()

    def read(self, numbers: list[int]) -> list[Document]:
        return [self[number] for number in numbers]

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


def _collate(documents: list[int], *, seed: int = 0, step: int = 0, **layout: Any) -> Any:
    return collate(STORE, documents, layout=Layout(**layout), seed=seed, step=step)


def test_index_i_has_feature_i_token_i_plus_1_target_i_plus_1_and_mask_of_token_i_plus_2() -> None:
    """And at unroll step k the token, the target and the mask are k further on."""
    batch = _collate([4, 2])
    assert batch.states_BTX.shape == (2, 7, 2)
    assert batch.token_count == 5 + 3
    for k in range(4):
        mask_BT, counted = batch.mask(k), []
        for row, (number, tokens) in enumerate([(4, 7), (2, 5)]):
            for i in range(tokens - 2 - k):
                assert batch.states_BTX[row, i].tolist() == [number, i]
                assert batch.ids_BT[row, i + 1 + k] == 100 * number + i + 1 + k
                assert mask_BT[row, i] == ((i + 2 + k) % 2 == 1)
                if (i + 2 + k) % 2 == 1:
                    counted.append([number, i + 1 + k])
            assert not mask_BT[row, max(0, tokens - 2 - k) :].any()
        rows_S, index_S = mask_BT.nonzero(as_tuple=True)
        assert batch.features_BTH[rows_S, index_S + 1 + k].tolist() == counted
        assert k > 0 or batch.supervised_count == len(counted)


def test_packed_documents_keep_their_own_alignment_and_positions() -> None:
    """Documents of 7, 5, 4, 3 tokens in rows of at most 10: [7, 3] and [5, 4]."""
    numbers = [4, 2, 1, 0]
    packed = _collate(numbers, packing="documents", max_tokens_per_row=10)
    assert packed.document_BT.tolist() == [[0] * 7 + [1] * 3, [0] * 5 + [1] * 4 + [-1]]
    assert packed.positions_BT.tolist() == [[*range(7), *range(3)], [*range(5), *range(4), 0]]
    alone = [_collate([number]) for number in numbers]
    assert packed.token_count == sum(batch.token_count for batch in alone)
    assert packed.supervised_count == sum(batch.supervised_count for batch in alone)
    places = {4: (0, 0), 0: (0, 7), 2: (1, 0), 1: (1, 5)}
    for number, own in zip(numbers, alone, strict=True):
        row, start = places[number]
        span = slice(start, start + number + 3)
        assert torch.equal(packed.states_BTX[row, span], own.states_BTX[0])
        assert torch.equal(packed.ids_BT[row, span], own.ids_BT[0])
        for k in range(4):
            mask_T = packed.mask(k)[row, span]
            assert torch.equal(mask_T, own.mask(k)[0]), "no target of the next document"


def test_rows_are_filled_first_fit_and_a_long_document_has_its_own() -> None:
    assert pack([30, 9, 5, 5, 1], packing="documents", max_tokens_per_row=10) == [[0], [1, 4], [2, 3]]
    assert pack([9, 5, 1], packing="none", max_tokens_per_row=100) == [[0], [1], [2]]
    assert pack([], packing="documents", max_tokens_per_row=10) == []


def test_an_empty_share_has_nothing_supervised_but_something_to_run() -> None:
    for packing in ("none", "documents"):
        batch = _collate([], packing=packing)
        assert batch.states_BTX.shape == (1, 1, 2)
        assert batch.token_count == batch.supervised_count == 0
        for k in range(3):
            assert not batch.mask(k).any()


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
        documents = order.step_documents(step)
        assert sorted(chain.from_iterable(shares)) == sorted(documents)
        assert max(map(len, shares)) <= -(-8 // (micro_steps * processes))
        lengths = [order.lengths[number] for number in documents]
        micro = [
            [order.lengths[n] for n in chain.from_iterable(shares[m * processes : (m + 1) * processes])]
            for m in range(micro_steps)
        ]
        assert list(chain.from_iterable(sorted(m, reverse=True) for m in micro)) == lengths  # neighbours in length


def test_no_process_waits_long_for_another() -> None:
    order = Order(
        documents=tuple(range(64)), lengths=tuple(10 + n * n % 97 for n in range(64)), global_batch=16, seed=1
    )
    for step, processes in product(range(4), (2, 4)):
        documents = order.step_documents(step)
        shares = [order.micro_batch(step, 0, micro_steps=1, process=p, processes=processes) for p in range(processes)]
        tokens = [sum(order.lengths[number] for number in share) for share in shares]
        longest, shortest = order.lengths[documents[0]], order.lengths[documents[-1]]
        assert max(tokens) - min(tokens) <= longest - shortest  # neighbours dealt in blocks: several times that


def test_noise_is_uniform_and_a_function_of_seed_step_and_document() -> None:
    def noise_of(batch: Any, row: int, number: int) -> torch.Tensor:
        noise: torch.Tensor = batch.states_BTX[row, : number + 3] - _collate([number]).states_BTX[0]
        return noise

    alone = noise_of(_collate([20], noise=0.1), 0, 20)
    in_company = noise_of(_collate([22, 20], noise=0.1), 1, 20)
    assert torch.equal(alone, in_company)
    assert alone.abs().max() <= 0.1 + 1e-5
    assert alone.min() < -0.05 < 0.05 < alone.max()
    assert not torch.equal(alone, noise_of(_collate([20], noise=0.1, step=1), 0, 20))
    assert not torch.equal(alone, noise_of(_collate([20], noise=0.1, seed=1), 0, 20))
    clean = _collate([20], noise=0.1)
    assert torch.equal(clean.features_BTH, _collate([20]).features_BTH), "targets carry no noise"
    packed = _collate([22, 20], noise=0.1, packing="documents", max_tokens_per_row=100)
    assert torch.equal(packed.states_BTX[0, 25:48], _collate([20], noise=0.1).states_BTX[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_start_in_the_middle_as_if_they_had_come_from_the_beginning(workers: int) -> None:
    def run(start: int) -> list[Any]:
        batches = MicroBatches(
            STORE,
            _order(),
            layout=Layout(noise=0.1),
            start=start,
            end=5,
            micro_steps=2,
            process=0,
            processes=2,
        )
        return list(steps(batches, workers=workers))

    whole, rest = run(0), run(3)
    assert [len(step) for step in whole] == [2] * 5
    assert len(rest) == 2
    for ours, theirs in zip(rest, whole[3:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.states_BTX, b.states_BTX)
            assert torch.equal(a.ids_BT, b.ids_BT)
