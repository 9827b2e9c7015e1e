"""A drafter that knows the answers: random trees in which every row's own continuation is hidden, so that blocks are
really accepted, also in batches; and calls of `generate` with and without it."""

from collections.abc import Sequence
from typing import Any

import torch

from eagle.decode.decoder import SpeculativeDecoder, SpeculativeOutput
from eagle.draft.tree import DraftTree
from eagle.sample.row import Row
from eagle.target.target import Target
from tests.kernels.test_tree_attention import random_parents

NEW = 24
"""Tokens of an answer in most tests."""


class BatchOracle:
    """truths: each row's unpadded prompt and answer. A truth is hidden up to a random depth; `nodes` is the largest tree."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, truths: list[list[int]], *, seed: int = 0, vocab: int = 384, nodes: int = 40):
        self.truths, self.vocab, self.nodes = truths, vocab, nodes
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        assert len(rows) == len(self.truths)
        self.rows, self.running = list(rows), list(self.truths)

    def keep_rows(self, kept: Sequence[int]) -> None:
        self.rows, self.running = [self.rows[b] for b in kept], [self.running[b] for b in kept]

    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        assert states_BKX.shape[:2] == next_tokens_BK.shape == (len(self.rows), int(counts_B.max()))

    def propose(self) -> DraftTree:
        nodes = self._random(1, self.nodes + 1)
        trees = [self._tree(row, truth, nodes) for row, truth in zip(self.rows, self.running)]
        tokens, parents = zip(*trees)
        return DraftTree.from_parents(torch.cat(tokens), torch.cat(parents))

    def _tree(self, row: Row, truth: list[int], nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        parents_1N = random_parents(1, nodes, self._random(0, 10_000))
        depths_N = DraftTree.from_parents(torch.zeros(1, nodes, dtype=torch.int64), parents_1N).depths_BN[0]
        order = depths_N.sort(stable=True).indices  # by depth, as drafters make them
        place = order.argsort()
        parents = torch.tensor([[-1] + [int(place[parents_1N[0, i]]) for i in order[1:].tolist()]])
        tokens = torch.randint(3, self.vocab, (1, nodes), generator=self.generator)
        tokens[0, 0] = row.tokens[-1]
        node = 0
        for token in truth[len(row.tokens) :]:
            children = (parents[0] == node).nonzero().flatten().tolist()
            if not children:
                break
            node = children[self._random(0, len(children))]
            tokens[0, node] = token
        return tokens, parents

    def _random(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.generator))


class Chain(BatchOracle):
    """Only the truth, `nodes` - 1 tokens of it: everything is accepted."""

    def _tree(self, row: Row, truth: list[int], nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        rest = [*truth[len(row.tokens) :], *[3] * self.nodes]
        tokens = torch.tensor([[row.tokens[-1], *rest[: self.nodes - 1]]])
        return tokens, torch.arange(-1, self.nodes - 1)[None]


def prompt(length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (1, length), generator=torch.Generator().manual_seed(seed))


def padded(prompts: Sequence[list[int]], side: str, pad: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        place = slice(longest - len(one), longest) if side == "left" else slice(0, len(one))
        ids[row, place], mask[row, place] = torch.tensor(one), 1
    return ids, mask


def answers(out: SpeculativeOutput, width: int) -> list[list[int]]:
    assert out.stats is not None
    return [row[width : width + stats.new_tokens].tolist() for row, stats in zip(out.sequences, out.stats)]


def with_oracle(
    target: Target,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    kind: type[BatchOracle] = BatchOracle,
    nodes: int = 40,
    **arguments: Any,
) -> tuple[SpeculativeOutput, SpeculativeOutput]:
    """The same call plainly, and with a drafter that knows the plain answer and what would have followed it."""
    plain = SpeculativeDecoder(target).generate(ids, mask, **arguments)
    # What follows an end is drafted too, so that a stop really lies inside accepted blocks.
    endless = {
        **arguments,
        "eos_token_id": [],
        "stop_strings": None,
        "stopping_criteria": None,
        "exponential_decay_length_penalty": None,
    }
    endless["max_new_tokens"] = max(map(len, answers(plain, ids.shape[1]))) + 8
    if target.max_positions is not None:
        endless["max_new_tokens"] = min(endless["max_new_tokens"], target.max_positions - ids.shape[1])
    longer = SpeculativeDecoder(target).generate(ids, mask, **endless)
    mask = torch.ones_like(ids) if mask is None else mask
    copies = len(plain.sequences) // len(ids)
    prompts = [one[keep].tolist() for one, keep in zip(ids, mask.bool()) for _ in range(copies)]
    ends = answers(plain, ids.shape[1])
    truths = [
        [*before, *end, *more[len(end) :]] for before, end, more in zip(prompts, ends, answers(longer, ids.shape[1]))
    ]
    drafter = kind(truths, vocab=target.vocab_size, nodes=nodes)
    return plain, SpeculativeDecoder(target, drafter).generate(ids, mask, **arguments)


def stops_everywhere(target: Target, ids: torch.Tensor) -> list[int]:
    return SpeculativeDecoder(target).generate(ids, max_new_tokens=NEW, eos_token_id=[]).sequences[0].tolist()
