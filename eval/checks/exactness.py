"""Are a method's tokens plain decoding's tokens? Where not, was it a numerical tie?"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from eagle.eval.answers import Request
from eagle.eval.checks.found import Exactness
from eagle.sample.sampling import RowSampler, Sampling, keep
from eagle.target.routers import RouterMargin, closest, routers_recorded
from eagle.target.target import Target

TIE_MARGIN_FLOAT32 = 1e-4
"""Two logits closer than this may swap places when the same sums are added in another order (float32)."""


GREEDY = Sampling()

FILTER_EDGE = 1e-5
"""A token this close to a filter's threshold may be kept in one summation order and dropped in another (float32; in half
precision: the margin of a tie)."""


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one of the two lacks); None when equal."""
    for i, (token, expected) in enumerate(zip(tokens, reference, strict=False)):
        if token != expected:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def tie_margin(dtype: torch.dtype, top_logit: float) -> float:
    """The top-2 logit margin below which a divergence counts as a tie.

    float32: 1e-4. Half precision: two spacings of numbers of the top logit's size, since matrix products of other
    shapes round differently there.
    """
    return TIE_MARGIN_FLOAT32 if dtype == torch.float32 else 2.0 * torch.finfo(dtype).eps * max(abs(top_logit), 1.0)


@torch.inference_mode()
def divergence(
    target: Target,
    *,
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    reference: Sequence[int],
    versus: str,
    sampling: Sampling = GREEDY,
    alike: int = 0,
) -> dict[str, Any] | None:
    """Where `tokens` leave `reference`, with the reference's top-2 margin there; None when they are equal.

    Of a mixture of experts also the smallest margin of any router on the way there: where that is a tie, rounding may have
    chosen another expert, and all that follows differs by more than rounding. alike: leading tokens that both computed in the
    same forward (the prompt of two loops that prefill alike): their routers chose alike too.
    sampling: what both were made with. The margin is that of the scores the emitted token is the best of: the logits, or
    logits / temperature + noise over the tokens that the filters keep. A token at a filter's very edge is a tie too: rounding
    decides whether it is kept.
    """
    index = first_difference(tokens, reference)
    if index is None:
        return None
    ids_1T = torch.tensor([[*prompt_ids, *reference[:index]]], device=target.device)
    with routers_recorded(target.model) as routers:
        logits_V = target.logits(target.features(ids_1T)[0][0, -1]).float()
    scores_V = RowSampler(sampling=sampling).contest(logits_V, position=len(prompt_ids) + index)
    top = torch.topk(scores_V, k=2)
    margin = float(top.values[0] - top.values[1])
    limit = tie_margin(target.dtype, float(logits_V.max())) / (sampling.temperature or 1.0)
    both = index < len(tokens) and index < len(reference)
    tie = both and margin < limit and {tokens[index], reference[index]} <= set(top.indices.tolist())
    if both and not tie and not sampling.greedy:
        edge = FILTER_EDGE if target.dtype == torch.float32 else limit
        tie = any(at_filters_edge(logits_V, sampling, token, edge=edge) for token in (tokens[index], reference[index]))
    expert = closest(routers, start=alike)
    router_tie = both and not tie and expert is not None and expert.tie
    return {
        "versus": versus,
        "index": index,
        "token": tokens[index] if index < len(tokens) else None,
        "expected": reference[index] if index < len(reference) else None,
        "margin": margin,
        "tie_below": limit,
        "tie": tie or router_tie,
        "kind": "router tie" if router_tie else "tie" if tie else "different",
        **({"router": _router(expert)} if routers else {}),
    }


def _router(expert: RouterMargin | None) -> dict[str, Any]:
    """The closest choice between two experts, as JSON; margin None: these routers' margins are not known."""
    if expert is None:
        return {"margin": None, "tie_below": None, "said": "no router's margins are known on the way there"}
    return {"margin": expert.margin, "tie_below": expert.tie_below, "said": str(expert)}


def at_filters_edge(logits_V: torch.Tensor, sampling: Sampling, token: int, *, edge: float = FILTER_EDGE) -> bool:
    """Whether the filters keep the token or not depends on `edge`: of its score, or of a probability mass.

    A shift of a score by e moves a mass p by at most e * p * (1 - p), a quarter of e.
    """
    scores_V = sampling.tempered(logits_V)
    kept = set()
    for score_edge in (-edge, edge):
        moved_V = scores_V.clone()
        moved_V[token] += score_edge
        mass_edge = score_edge if edge == FILTER_EDGE else score_edge / 4
        top_p = sampling.top_p if sampling.top_p == 1 else min(max(sampling.top_p + mass_edge, 0.0), 1.0)
        kept.add(bool(keep(moved_V, dataclasses.replace(sampling, top_p=top_p))[token]))
    return len(kept) == 2


def exactness(requests: Sequence[Request], method: str) -> Exactness:
    """Counts equal, tied and different answers of `method` from the divergences noted when they were made."""
    found: list[Mapping[str, Any]] = [r.divergences[method] for r in requests if method in r.divergences]
    ties = sum(bool(entry["tie"]) for entry in found)
    return Exactness(
        requests=len(requests),
        equal=len(requests) - len(found),
        ties=ties,
        router_ties=sum(entry.get("kind") == "router tie" for entry in found),
        different=len(found) - ties,
    )
