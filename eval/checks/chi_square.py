"""Do the lossless rules draw from the target's distribution?

One prompt is continued by many rows; the joint counts of the tokens behind the first new one (which no draft decides) are
tested against the target's exact probabilities, which a top-k filter makes few enough to enumerate. V vocabulary.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle.config import DecodeConfig
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Block, Chain, Coupled, Rejection, Tree
from eagle.eval.statistics import ChiSquare, chi_square
from eagle.progress import ProgressBar
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target

NEW_TOKENS = 4
MOST_KEPT = 8
"""Tokens kept (top_k) at most: MOST_KEPT ** NEW_TOKENS continuations are enumerated."""
LEVEL = 0.01
"""Family-wise error at which the table's verdict is given."""

_SMALL = Tree(budget=7, top_k=3, depth=2)
LOSSLESS: dict[str, DecodeConfig] = {
    "coupled": DecodeConfig(drafter=_SMALL, rule=Coupled()),
    "rejection, sampled tree": DecodeConfig(drafter=_SMALL, rule=Rejection(), children="sampled"),
    "rejection, sampled chain": DecodeConfig(drafter=Chain(depth=2), rule=Rejection(), children="sampled"),
    "rejection, top-k tree": DecodeConfig(drafter=_SMALL, rule=Rejection(), children="top"),
    "block, sampled chain": DecodeConfig(drafter=Chain(depth=3), rule=Block()),
}
"""Rules that promise the target's distribution, over small trees."""

Joint = dict[tuple[int, ...], float]


@torch.inference_mode()
def exact_joint(target: Target, ids_1T: torch.Tensor, sampling: Sampling, *, tokens: int) -> Joint:
    """Probability of every continuation of `tokens` tokens that the filters allow."""
    sampler = RowSampler(sampling=sampling)
    cells: Joint = {(): 1.0}
    for _ in range(tokens):
        prefixes = list(cells)
        grown: Joint = {}
        for start in range(0, len(prefixes), 64):
            block = prefixes[start : start + 64]
            prefix_BT = torch.tensor(block, dtype=torch.int64, device=ids_1T.device)
            ids_BT = torch.cat([ids_1T.expand(len(block), -1), prefix_BT], dim=1)
            features_BTH, _ = target.features(ids_BT)
            for prefix, p_V in zip(block, sampler.probabilities(target.logits(features_BTH[:, -1]).float()).cpu()):
                for token in p_V.nonzero().flatten().tolist():
                    grown[(*prefix, token)] = cells[prefix] * float(p_V[token])
        cells = grown
    return cells


def continuations(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, sampling: Sampling, *, rows: int, batch: int, bar: ProgressBar
) -> list[tuple[int, ...]]:
    """NEW_TOKENS tokens of `rows` rows, each with a seed of its own."""
    found: list[tuple[int, ...]] = []
    for start in range(0, rows, batch):
        count = min(batch, rows - start)
        out = decoder.generate(
            ids_1T.expand(count, -1),
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=[sampling.seed + start + row for row in range(count)],
        )
        found += [tuple(row) for row in out.sequences[:, ids_1T.shape[1] :].tolist()]
        bar.advance(count)
    return found


def chi_squares(found: Sequence[tuple[int, ...]], exact: Joint) -> dict[str, ChiSquare]:
    """Chi-square tests of tokens 2-3 and 2-4, their joint distribution."""
    values = {}
    for last in (3, 4):
        expected: Joint = defaultdict(float)
        for cell, mass in exact.items():
            expected[cell[1:last]] += mass
        seen = Counter(tokens[1:last] for tokens in found)
        cells = [*expected, *(seen.keys() - expected.keys())]
        values[f"tokens 2-{last}"] = chi_square([seen[c] for c in cells], [expected[c] for c in cells])
    return values


def p_values(found: Sequence[tuple[int, ...]], exact: Joint) -> dict[str, float]:
    """The p-values of `chi_squares`."""
    return {name: test.p_value for name, test in chi_squares(found, exact).items()}


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment: the family-wise error of rejecting what lies below a level is at most that level."""
    adjusted, running = {}, 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        running = max(running, min(1.0, (len(values) - rank) * values[name]))
        adjusted[name] = running
    return adjusted


def not_tested(names: Sequence[str], remedy: str) -> str:
    """The sentence about variants whose tests had a single cell; "" of none."""
    if not names:
        return ""
    return (
        f"NOT TESTED: {'; '.join(names)}: what expects fewer than 5 rows is pooled, and every chi-square test was left with a "
        f"single cell; {remedy}"
    )


def degrees_text(line: Mapping[str, Any]) -> str:
    """The degrees of freedom of a line's tests, in their order."""
    return ", ".join(map(str, line["degrees_of_freedom"].values()))
