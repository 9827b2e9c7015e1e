"""Walker's alias table, built in one sweep without a Python loop: for the sampler benchmark.

V tokens of average weight 1 share V cells of weight 1: cell v holds keep_V[v] of v, the rest of alias_V[v]. Light tokens
(weight <= 1) fill up from heavy ones in order; a heavy token that runs out in the middle of a light one's filling fills up
from the next heavy one. Who fills whom follows from two prefix sums (the sweep of Huebschle-Schneider & Sanders 2022).
"""

import torch


def build_alias(probabilities_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (float64 [V]) -> keep float64 [V], alias int64 [V]. O(V log V), O(V) but for two binary searches."""
    size = len(probabilities_V)
    weight_V = probabilities_V.double() * (size / probabilities_V.double().sum())
    keep_V, alias_V = torch.ones_like(weight_V), torch.arange(size, device=weight_V.device)
    light, heavy = (weight_V <= 1).nonzero().flatten(), (weight_V > 1).nonzero().flatten()
    if len(heavy) == 0:
        return keep_V, alias_V
    lacking, spare = 1 - weight_V[light], weight_V[heavy] - 1
    lacked, spared = lacking.cumsum(0), spare.cumsum(0)
    # A light token fills up from the heavy one that is in use when its turn comes.
    before = torch.cat([lacked.new_zeros(1), lacked])[:-1]
    giver = torch.searchsorted(spared, before).clamp_max(len(heavy) - 1)
    keep_V[light], alias_V[light] = weight_V[light], heavy[giver]
    # A heavy token is used up by the first light one that lacks more than what was spared so far.
    last = torch.searchsorted(lacked, spared[:-1], right=True)
    used = last < len(light)
    keep_V[heavy[:-1][used]] = 1 + spared[:-1][used] - lacked[last[used]]
    alias_V[heavy[:-1][used]] = heavy[1:][used]
    return keep_V, alias_V


def draw_alias(keep_V: torch.Tensor, alias_V: torch.Tensor) -> int:
    """One token, from torch's global generator. O(1)."""
    place = float(torch.rand((), dtype=torch.float64)) * len(keep_V)
    cell = int(place)
    return cell if place - cell < float(keep_V[cell]) else int(alias_V[cell])
