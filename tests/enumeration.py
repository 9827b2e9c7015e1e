"""Exact output distributions of verification rules: every draw and every coin is taken both ways and weighed.

p and q are tables: the distribution after each prefix (the emitted tokens behind the root), float64 [V].
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from typing import TypeVar

import torch

from eagle.draft.tree import Children, DraftTree
from eagle.verify.coupled import Rule

Table = dict[tuple[int, ...], torch.Tensor]
Outcome = TypeVar("Outcome", bound=Hashable)


class Chance:
    """Takes a prescribed branch at every choice, the first possible one behind the script, and notes the others."""

    def __init__(self, script: list[int], pending: list[list[int]]):
        self.script, self.pending = script, pending
        self.taken: list[int] = []
        self.weight = 1.0

    def pick(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = possible[0]
            self.pending += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.weight *= weights[choice] / sum(weights)
        return choice


def distribution(run: Callable[[Chance], Outcome]) -> dict[Outcome, float]:
    """The exact probability of everything that `run` can return."""
    total: dict[Outcome, float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        chance = Chance(pending.pop(), pending)
        outcome = run(chance)
        total[outcome] += chance.weight
    return total


class TableView:
    """A NodeView over a table, whose chance is enumerated."""

    def __init__(self, p: Table, chance: Chance):
        self.p, self.chance = p, chance

    def choose(self, node: int, accepted: list[int]) -> int:
        return self.draw(self.p[tuple(accepted)], accepted)

    def processed(self, node: int, accepted: list[int]) -> torch.Tensor:
        return self.p[tuple(accepted)].log().float()

    def probabilities(self, node: int, accepted: list[int]) -> torch.Tensor:
        return self.p[tuple(accepted)]

    def accepts(self, probability: float, accepted: list[int], attempt: int) -> bool:
        probability = min(1.0, max(0.0, probability))
        return self.chance.pick([probability, 1 - probability]) == 0

    def draw(self, weights_V: torch.Tensor, accepted: list[int]) -> int:
        return self.chance.pick(weights_V.tolist())

    def stops(self, accepted: list[int]) -> bool:
        return False

    def ends(self, accepted: list[int]) -> bool:
        return False


def random_table(vocab: int, depth: int, *, seed: int, zeros: float = 0.0, sharpness: float = 1.5) -> Table:
    """Distributions after every prefix of up to `depth` tokens; a share `zeros` of the entries is 0."""
    generator = torch.Generator().manual_seed(seed)
    table = {}
    for length in range(depth + 1):
        for prefix in product(range(vocab), repeat=length):
            logits_V = sharpness * torch.randn(vocab, generator=generator, dtype=torch.float64)
            dropped_V = torch.rand(vocab, generator=generator) < zeros
            dropped_V[int(torch.randint(0, vocab, (1,), generator=generator))] = False
            table[prefix] = logits_V.masked_fill(dropped_V, float("-inf")).softmax(-1)
    return table


def joint(p: Table, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every sequence of `length` tokens."""
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        cells = {(*prefix, x): mass * float(p[prefix][x]) for prefix, mass in cells.items() for x in range(len(p[()]))}
    return cells


def output(rule: Rule, p: Table, grow: Callable[[Chance], DraftTree], length: int) -> dict[tuple[int, ...], float]:
    """Exact distribution of the first `length` tokens that one verification of the trees emits, and plain sampling after."""

    def run(chance: Chance) -> tuple[int, ...]:
        return tuple(rule.walk(grow(chance), 0, TableView(p, chance)).tokens[:length])

    total: dict[tuple[int, ...], float] = defaultdict(float)
    for emitted, mass in distribution(run).items():
        for rest in product(range(len(p[()])), repeat=length - len(emitted)):
            tail = mass
            for i in range(len(rest)):
                tail *= float(p[emitted + rest[:i]][rest[i]])
            total[emitted + rest] += tail
    return total


def total_variation(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return sum(abs(one.get(cell, 0.0) - other.get(cell, 0.0)) for cell in one.keys() | other.keys()) / 2


def expected_accepted(rule: Rule, p: Table, grow: Callable[[Chance], DraftTree]) -> float:
    counts = distribution(lambda chance: len(rule.walk(grow(chance), 0, TableView(p, chance)).path) - 1)
    return sum(count * mass for count, mass in counts.items())


def sampled_tree(
    q: Table,
    *,
    widths: Sequence[int],
    expanded: int = 1,
    choose: Callable[[torch.Tensor, int, Chance], list[int]] | None = None,
) -> Callable[[Chance], DraftTree]:
    """Trees drawn level by level: widths[d] children of each expanded node; of a level the `expanded` likeliest grow on."""
    draw = choose or without_replacement

    def grow(chance: Chance) -> DraftTree:
        tokens, parents, log_q, q_row = [0], [-1], [], [-1]
        beam: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
        for width in widths:
            level = []
            for score, node, path in beam:
                q_row[node] = len(log_q)
                log_q.append(q[path].log())
                for token in draw(q[path], width, chance):
                    level.append((score + float(log_q[-1][token]), len(tokens), (*path, token)))
                    tokens.append(token)
                    parents.append(node)
                    q_row.append(-1)
            beam = sorted(level, key=lambda entry: -entry[0])[:expanded]
        return DraftTree.from_parents(
            torch.tensor([tokens]),
            torch.tensor([parents]),
            children="sampled",
            log_q_BEV=torch.stack(log_q)[None],
            q_row_BN=torch.tensor([q_row]),
        )

    return grow


def without_replacement(q_V: torch.Tensor, count: int, chance: Chance) -> list[int]:
    """Draws in order; once q is exhausted, fillers of probability 0, as Gumbel-top-k yields them."""
    weights, drawn = q_V.tolist(), list[int]()
    for _ in range(count):
        token = chance.pick(weights) if sum(weights) > 0 else min(set(range(len(weights))) - set(drawn))
        drawn.append(token)
        weights[token] = 0.0
    return drawn


def fixed_tree(
    tokens: Sequence[int], parents: Sequence[int], children: Children = "top"
) -> Callable[[Chance], DraftTree]:
    tree = DraftTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]), children=children)
    return lambda chance: tree


def top_tree(q: Table, *, widths: Sequence[int]) -> Callable[[Chance], DraftTree]:
    """The top-k of q below every node, best first."""
    tokens, parents, level = [0], [-1], [(0, ())]
    for width in widths:
        below: list[tuple[int, tuple[int, ...]]] = []
        for node, path in level:
            for token in q[path].topk(width).indices.tolist():
                below.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(node)
        level = below
    return fixed_tree(tokens, parents)
