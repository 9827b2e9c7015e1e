"""Which documents make up each optimiser step, and how they become tensors.

B rows, T tokens of the longest row, H hidden, X the head's states (H, or the aux layers' blocks side by side). The order
depends on the seed alone: step s takes the same documents, with the same noise, whatever the number of processes or
micro-steps, however they are packed, and wherever the run was resumed.

Alignment: index i of a document of n tokens has inputs (state_i, e_{i+1}), regression target f_{i+1}, class target
p(t_{i+2}), and counts where t_{i+2} is the assistant's. At unroll step k everything moves on by k: inputs (the step
before's prediction at i, e_{i+1+k}), targets f_{i+1+k} and p(t_{i+2+k}), and it counts where t_{i+2+k} is of the same
document and the assistant's.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from eagle.data.documents import Documents

SHORTEST = 3
"""Tokens below which a document has no index to train on."""
Packing = Literal["none", "documents"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-step of one process. Tensors are by TOKEN index; a row holds one document, or several one after the other.

    Rows are padded on the right, which causal attention never sees; whole documents of a packed row must not see each
    other (compare `document_BT`).
    """

    states_BTX: torch.Tensor
    """float32: what the head sees of the target at token i, with noise: its feature f_i, or the aux layers' states"""
    ids_BT: torch.Tensor
    """int64: t_i; 0 in padding"""
    supervised_BT: torch.Tensor
    """bool: t_i is the assistant's; false in padding"""
    features_BTH: torch.Tensor
    """float32: f_i, without noise"""
    document_BT: torch.Tensor
    """int64: the document's number within its row, 0, 1, ...; -1 in padding"""
    positions_BT: torch.Tensor
    """int64: token i's place in its document, from 0 (0 in padding)"""
    token_count: int
    """Indices with an input and a target: all tokens but each document's last two."""
    supervised_count: int
    """Indices that count at step 0."""
    numbers: tuple[tuple[int, ...], ...] = ()
    """Each row's documents, by their numbers in the source; (): unknown."""

    def mask(self, step: int = 0) -> torch.Tensor:
        """bool [B, T]: index i counts at unroll step `step`: token i+2+step is of i's document, and the assistant's."""
        ahead = 2 + step
        same_BT = self.document_BT == _shifted(self.document_BT, ahead, fill=-1)
        return same_BT & _shifted(self.supervised_BT, ahead, fill=0)

    def to(self, device: torch.device) -> "Batch":
        names = [
            field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), torch.Tensor)
        ]
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})


def _shifted(values_BT: torch.Tensor, ahead: int, *, fill: int) -> torch.Tensor:
    """[B, T] whose index i has the value of i + ahead; `fill` where the row has ended."""
    moved_BT = torch.full_like(values_BT, fill)
    moved_BT[:, : max(0, values_BT.shape[1] - ahead)] = values_BT[:, ahead:]
    return moved_BT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Seeded permutations, one per epoch, cut into optimiser steps of `global_batch` documents (the last has fewer)."""

    documents: tuple[int, ...]
    """Numbers of the training documents in the store."""
    lengths: tuple[int, ...]
    """Tokens of each of them."""
    global_batch: int
    """Documents per optimiser step, over all processes and micro-steps."""
    packing: Packing = "none"
    """documents: the shares of a step get documents of all lengths, so that each fills its rows."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.documents) // self.global_batch)

    def step_documents(self, step: int) -> list[int]:
        """The store's numbers of the documents of optimiser step `step`, longest first (so micro-steps pad little)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _permutation(len(self.documents), self.seed, epoch)
        rows = order[place * self.global_batch : (place + 1) * self.global_batch]
        rows = sorted(rows, key=lambda row: (-self.lengths[row], row))
        return [self.documents[row] for row in rows]

    def micro_batch(self, step: int, micro_step: int, *, micro_steps: int, process: int, processes: int) -> list[int]:
        """One process's documents in one micro-step: an even share, possibly empty in an epoch's last step.

        Unpacked, a micro-step gets neighbours in length, so that it pads little, and deals them to the processes there and
        back (a, b, b, a, a, ...), so that none waits long for another; packed, every share gets long ones and short ones.
        """
        documents = self.step_documents(step)
        if self.packing == "documents":
            return documents[micro_step * processes + process :: micro_steps * processes]
        dealt = documents[micro_step * len(documents) // micro_steps : (micro_step + 1) * len(documents) // micro_steps]
        turns = (*range(processes), *reversed(range(processes)))
        return [document for document, turn in zip(dealt, itertools.cycle(turns), strict=False) if turn == process]


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    permutation: list[int] = torch.randperm(count, generator=seeded_generator(seed, epoch)).tolist()
    return permutation


def seeded_generator(*numbers: int) -> torch.Generator:
    """A CPU generator that is a function of all of `numbers`."""
    state = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents become rows."""

    noise: float = 0.0
    """States get uniform noise in (-noise, noise)."""
    packing: Packing = "none"
    """none: a document a row. documents: as many as fit."""
    max_tokens_per_row: int = 2048
    """Packing's limit; a longer document has a row of its own."""


def pack(lengths: Sequence[int], *, packing: Packing, max_tokens_per_row: int) -> list[list[int]]:
    """The rows, each a list of indices into `lengths`: first fit in the given order (longest first packs best)."""
    if packing == "none":
        return [[index] for index in range(len(lengths))]
    rows: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(lengths):
        row = next((row for row, free in enumerate(room) if free >= length), None)
        if row is None:
            rows.append([index])
            room.append(max_tokens_per_row - length)
        else:
            rows[row].append(index)
            room[row] -= length
    return rows


def collate(source: Documents, numbers: Sequence[int], *, layout: Layout, seed: int, step: int) -> Batch:
    """Reads the documents and lays them out in rows; no document gives one padded index and no supervised position.

    The noise is drawn per document from (seed, step, document): it does not depend on the layout.
    """
    documents = source.read(numbers)
    hidden_size, state_size = source.hidden_size, source.hidden_size * max(1, len(source.aux_layers))
    rows = pack(
        [len(document.input_ids_T) for document in documents],
        packing=layout.packing,
        max_tokens_per_row=layout.max_tokens_per_row,
    )
    longest = max((sum(len(documents[index].input_ids_T) for index in row) for row in rows), default=1)
    shape = max(1, len(rows)), longest
    device = documents[0].features_TH.device if documents else torch.device("cpu")
    states_BTX = torch.zeros(*shape, state_size, device=device)
    features_BTH = torch.zeros(*shape, hidden_size, device=device) if layout.noise > 0 or source.aux_layers else None
    ids_BT, positions_BT = (torch.zeros(shape, dtype=torch.int64) for _ in "ab")
    document_BT = torch.full(shape, -1, dtype=torch.int64)
    supervised_BT = torch.zeros(shape, dtype=torch.bool)
    supervised_count = 0
    for b, row in enumerate(rows):
        end = 0
        for place, index in enumerate(row):
            document, start = documents[index], end
            end = start + len(document.input_ids_T)
            states_BTX[b, start:end] = document.states
            if features_BTH is not None:
                features_BTH[b, start:end] = document.features_TH
            if layout.noise > 0:
                generator = seeded_generator(seed, step, numbers[index])
                uniform_TX = torch.rand(end - start, state_size, generator=generator)
                states_BTX[b, start:end] += ((2 * uniform_TX - 1) * layout.noise).to(device)
            ids_BT[b, start:end], supervised_BT[b, start:end] = document.input_ids_T, document.loss_mask_T
            document_BT[b, start:end], positions_BT[b, start:end] = place, torch.arange(end - start)
            supervised_count += int(document.loss_mask_T[2:].sum())
    return Batch(
        states_BTX=states_BTX,
        ids_BT=ids_BT,
        supervised_BT=supervised_BT,
        features_BTH=states_BTX if features_BTH is None else features_BTH,
        document_BT=document_BT,
        positions_BT=positions_BT,
        token_count=sum(max(0, len(document.input_ids_T) - 2) for document in documents),
        supervised_count=supervised_count,
        numbers=tuple(tuple(numbers[index] for index in row) for row in rows),
    )


class MicroBatches(Dataset[Batch]):
    """The micro-batches of one process from step `start` to step `end`, in order."""

    def __init__(
        self,
        source: Documents,
        order: Order,
        *,
        layout: Layout,
        start: int,
        end: int,
        micro_steps: int,
        process: int,
        processes: int,
    ):
        self.source, self.order, self.layout = source, order, layout
        self.start, self.end, self.micro_steps = start, end, micro_steps
        self.process, self.processes = process, processes

    def __len__(self) -> int:
        return (self.end - self.start) * self.micro_steps

    def __getitem__(self, index: int) -> Batch:
        step, micro_step = self.start + index // self.micro_steps, index % self.micro_steps
        documents = self.order.micro_batch(
            step, micro_step, micro_steps=self.micro_steps, process=self.process, processes=self.processes
        )
        return collate(self.source, documents, layout=self.layout, seed=self.order.seed, step=step)


def steps(micro_batches: MicroBatches, *, workers: int) -> Iterator[list[Batch]]:
    """The process's micro-batches, one list per optimiser step; `workers` loader processes read ahead (0: none)."""
    options: dict[str, Any] = {"prefetch_factor": 2, "persistent_workers": True} if workers else {}
    loader = DataLoader(micro_batches, batch_size=None, num_workers=workers, **options)
    step: list[Batch] = []
    for batch in loader:
        step.append(batch)
        if len(step) == micro_batches.micro_steps:
            yield step
            step = []
