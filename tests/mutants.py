"""Broken verification, on purpose, and the tests of eagle/eval/checks/chi_square.py on it and on the lossless rules.

Each is a context manager under which decoders misbehave in one way, with the settings under which that matters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from eagle.config import DecodeConfig
from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft import children as draft_sampling
from eagle.draft import sampled_tree
from eagle.draft.by_level import LevelDrafter
from eagle.draft.tree import DraftTree
from eagle.eval.checks.chi_square import LEVEL, LOSSLESS, NEW_TOKENS, chi_squares, continuations, exact_joint, holm
from eagle.eval.statistics import ChiSquare
from eagle.heads.eagle1 import DraftHead
from eagle.progress import ProgressBar
from eagle.sample import sampling
from eagle.sample.noise import DRAFTS, gumbel
from eagle.sample.sampling import Sampling
from eagle.target.target import Target
from eagle.verify import rejection as verify_rejection
from eagle.verify.coupled import NodeView, Walk
from eagle.verify.node_view import TargetView


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """broken: the context; decode: what it breaks; rows: how many times the usual rows it takes to show."""

    broken: Callable[[], Any]
    decode: DecodeConfig
    rows: int = 1


@contextmanager
def _unrenormalised() -> Iterator[None]:
    def kept_mass(weights_V: torch.Tensor, token: int) -> torch.Tensor:
        return weights_V.index_fill(0, torch.tensor([token], device=weights_V.device), 0.0)

    with patch.object(verify_rejection, "without", kept_mass):
        yield


@contextmanager
def _shared_noise() -> Iterator[None]:
    """The residual is drawn with the Gumbel noise that the rejected drafts were drawn with (vllm 54282)."""

    def draw(view: TargetView, weights_V: torch.Tensor, accepted: list[int]) -> int:
        root = len(view.row.tokens) - 1
        position = root + 1 + len(accepted)
        noise_V = gumbel(view.row.sampler.sampling.seed, position, len(weights_V), stream=DRAFTS, cycle=root)
        return int((weights_V.log() + noise_V.to(weights_V.device)).argmax())

    with patch.object(TargetView, "draw", draw):
        yield


@contextmanager
def _pruned() -> Iterator[None]:
    """Two more children are drawn than the tree takes; the likeliest stay, in draw order."""
    whole = sampled_tree._draw

    def draw(
        draft: LevelDrafter, predictions_BNH: torch.Tensor, *, depth: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens_BM, log_q_BM, log_q_BNV = whole(draft, predictions_BNH, depth=depth, count=count + 2)
        rows, nodes = log_q_BNV.shape[:2]
        tokens_BNc, log_q_BNc = tokens_BM.view(rows, nodes, -1), log_q_BM.view(rows, nodes, -1)
        kept_BNc = log_q_BNc.topk(count, dim=-1).indices.sort(dim=-1).values
        return tokens_BNc.gather(-1, kept_BNc).flatten(1), log_q_BNc.gather(-1, kept_BNc).flatten(1), log_q_BNV

    with patch.object(sampled_tree, "_draw", draw):
        yield


@contextmanager
def _untempered_bonus() -> Iterator[None]:
    """The token behind a leaf ignores the temperature (the filters it obeys)."""
    walk_right = verify_rejection.Rejection.walk

    def walk(rule: verify_rejection.Rejection, tree: DraftTree, row: int, view: NodeView) -> Walk:
        walk = walk_right(rule, tree, row, view)
        if walk.at_leaf:
            node, emitted = walk.path[-1], walk.tokens[:-1]
            untempered_V = view.processed(node, emitted).double().softmax(-1)
            walk.tokens[-1] = view.draw(untempered_V * (view.probabilities(node, emitted) > 0), emitted)
        return walk

    with patch.object(verify_rejection.Rejection, "walk", walk):
        yield


@contextmanager
def _untempered() -> Iterator[None]:
    """The temperature reaches the draft, not the target (vllm 10198); filters reach both."""
    tempered = TargetView.probabilities

    def probabilities(view: TargetView, node: int, accepted: list[int]) -> torch.Tensor:
        kept_V = tempered(view, node, accepted) > 0
        return view.processed(node, accepted).double().masked_fill(~kept_V, float("-inf")).softmax(-1)

    with patch.object(TargetView, "probabilities", probabilities):
        yield


@contextmanager
def _one_noise() -> Iterator[None]:
    """The sampler draws its noise once, for all positions."""
    with patch.object(sampling, "gumbel", lambda seed, position, tokens: gumbel(seed, 0, tokens)):
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    with patch.object(draft_sampling, "gumbel", lambda seed, position, tokens, **streams: torch.zeros(tokens)):
        yield


MUTANTS: dict[str, Mutant] = {
    "q not renormalised": Mutant(broken=_unrenormalised, decode=LOSSLESS["rejection, sampled tree"]),
    "drafts' noise in the residual": Mutant(broken=_shared_noise, decode=LOSSLESS["rejection, sampled tree"], rows=6),
    "children pruned after the draw": Mutant(broken=_pruned, decode=LOSSLESS["rejection, sampled tree"]),
    "bonus token without temperature": Mutant(
        broken=_untempered_bonus, decode=LOSSLESS["rejection, sampled tree"], rows=4
    ),
    "target without temperature": Mutant(broken=_untempered, decode=LOSSLESS["rejection, sampled tree"]),
    "top-k children as if drawn": Mutant(broken=_deterministic, decode=LOSSLESS["rejection, sampled tree"]),
    "one noise tensor for all steps": Mutant(broken=_one_noise, decode=LOSSLESS["coupled"]),
}


def measure(
    target: Target,
    head: DraftHead,
    ids_1T: torch.Tensor,
    sampling: Sampling,
    *,
    rows: int,
    batch: int = 128,
    variants: Sequence[str] | None = None,
) -> dict[str, dict[str, ChiSquare]]:
    """Tests of every variant (default: all of LOSSLESS and MUTANTS) on the target's exact joint distribution."""
    exact = exact_joint(target, ids_1T, sampling, tokens=NEW_TOKENS)
    names = [*LOSSLESS, *MUTANTS] if variants is None else variants
    result = {}
    shares = {name: MUTANTS[name].rows if name in MUTANTS else 1 for name in names}
    with ProgressBar("chi-square", total=rows * sum(shares.values()), unit="rows") as bar:
        for name in names:
            mutant = MUTANTS.get(name)
            decode: DecodeConfig = LOSSLESS[name] if mutant is None else mutant.decode
            decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
            with nullcontext() if mutant is None else mutant.broken():
                found = continuations(decoder, ids_1T, sampling, rows=rows * shares[name], batch=batch, bar=bar)
            result[name] = chi_squares(found, exact)
    return result


def verdict(result: Mapping[str, Mapping[str, ChiSquare]]) -> dict[str, dict[str, Any]]:
    """Holm over all tests of the lossless rules, and over those of the mutants: what is told apart at LEVEL.

    A variant whose tests had no degree of freedom is not tested: nothing is said of it, neither good nor bad.
    """
    lines: dict[str, dict[str, Any]] = {}
    for family in (LOSSLESS, MUTANTS):
        flat = {
            f"{name}|{test}": one.p_value for name in result if name in family for test, one in result[name].items()
        }
        adjusted = holm(flat)
        for name in result:
            if name in family:
                tests = result[name]
                low = min(adjusted[f"{name}|{test}"] for test in tests)
                degrees = {test: one.degrees for test, one in tests.items()}
                lines[name] = {
                    **{test: one.p_value for test, one in tests.items()},
                    "holm": low,
                    "told apart": low < LEVEL,
                    "lossless": family is LOSSLESS,
                    "degrees_of_freedom": degrees,
                    "tested": any(degrees.values()),
                }
    return lines
