"""Which documents make up each optimiser step, and how they become tensors.

B documents, T indices, H hidden, S supervised positions. The order depends on the seed alone: step s takes the same
documents, with the same noise, whatever the number of processes or micro-steps and wherever the run was resumed.

Alignment: index i of a document of n tokens (i = 0 .. n-3) has inputs (f_i, e_{i+1}), regression target f_{i+1}, class
target p(t_{i+2}), and counts where t_{i+2} is the assistant's.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from eagle.data.store import FeatureStore

SHORTEST = 3
"""Tokens below which a document has no index to train on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-step of one process; the documents are padded on the right, which causal attention never sees."""

    inputs_BTH: torch.Tensor
    """float32: features f_i, with noise"""
    next_ids_BT: torch.Tensor
    """int64: t_{i+1}"""
    mask_BT: torch.Tensor
    """bool: t_{i+2} is supervised"""
    targets_SH: torch.Tensor
    """float32: f_{i+1} at the true positions of mask_BT, row by row"""
    token_count: int
    """Indices that are not padding."""

    @property
    def supervised_count(self) -> int:
        return self.targets_SH.shape[0]

    def to(self, device: torch.device) -> "Batch":
        return dataclasses.replace(
            self,
            inputs_BTH=self.inputs_BTH.to(device),
            next_ids_BT=self.next_ids_BT.to(device),
            mask_BT=self.mask_BT.to(device),
            targets_SH=self.targets_SH.to(device),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Seeded permutations, one per epoch, cut into optimiser steps of `global_batch` documents (the last has fewer)."""

    documents: tuple[int, ...]
    """Numbers of the training documents in the store."""
    lengths: tuple[int, ...]
    """Tokens of each of them."""
    global_batch: int
    """Documents per optimiser step, over all processes and micro-steps."""
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

        The processes of a micro-step get neighbours in length, so that none waits long for another.
        """
        documents = self.step_documents(step)
        share, shares = micro_step * processes + process, micro_steps * processes
        return documents[share * len(documents) // shares : (share + 1) * len(documents) // shares]


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    permutation: list[int] = torch.randperm(count, generator=seeded_generator(seed, epoch)).tolist()
    return permutation


def seeded_generator(*numbers: int) -> torch.Generator:
    """A CPU generator that is a function of all of `numbers`."""
    state = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(state[0]) << 32 | int(state[1]))


def collate(
    store: FeatureStore, documents: Sequence[int], *, hidden_size: int, noise: float, seed: int, step: int
) -> Batch:
    """Reads the documents and lays them side by side; no document gives one padded index and no supervised position.

    The noise, uniform in (-noise, noise), is drawn per document from (seed, step, document).
    """
    read = [store[number] for number in documents]
    longest = max((len(document.input_ids_T) - 2 for document in read), default=1)
    inputs_BTH = torch.zeros(max(1, len(read)), longest, hidden_size)
    next_ids_BT = torch.zeros(max(1, len(read)), longest, dtype=torch.int64)
    mask_BT = torch.zeros(max(1, len(read)), longest, dtype=torch.bool)
    targets = [torch.zeros(0, hidden_size)]
    for row, (number, document) in enumerate(zip(documents, read, strict=True)):
        features_TH = document.features_TH.float()
        count = len(document.input_ids_T) - 2
        inputs_BTH[row, :count] = features_TH[:-2]
        if noise > 0:
            uniform_TH = torch.rand(count, hidden_size, generator=seeded_generator(seed, step, number))
            inputs_BTH[row, :count] += (2 * uniform_TH - 1) * noise
        next_ids_BT[row, :count] = document.input_ids_T[1:-1]
        mask_BT[row, :count] = document.loss_mask_T[2:]
        targets.append(features_TH[1:-1][document.loss_mask_T[2:]])
    return Batch(
        inputs_BTH=inputs_BTH,
        next_ids_BT=next_ids_BT,
        mask_BT=mask_BT,
        targets_SH=torch.cat(targets),
        token_count=sum(len(document.input_ids_T) - 2 for document in read),
    )


class MicroBatches(Dataset[Batch]):
    """The micro-batches of one process from step `start` to step `end`, in order."""

    def __init__(
        self,
        store: FeatureStore,
        order: Order,
        *,
        hidden_size: int,
        noise: float,
        start: int,
        end: int,
        micro_steps: int,
        process: int,
        processes: int,
    ):
        self.store, self.order, self.hidden_size, self.noise = store, order, hidden_size, noise
        self.start, self.end, self.micro_steps = start, end, micro_steps
        self.process, self.processes = process, processes

    def __len__(self) -> int:
        return (self.end - self.start) * self.micro_steps

    def __getitem__(self, index: int) -> Batch:
        step, micro_step = self.start + index // self.micro_steps, index % self.micro_steps
        documents = self.order.micro_batch(
            step, micro_step, micro_steps=self.micro_steps, process=self.process, processes=self.processes
        )
        return collate(
            self.store,
            documents,
            hidden_size=self.hidden_size,
            noise=self.noise,
            seed=self.order.seed,
            step=step,
        )


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
