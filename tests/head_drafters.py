"""Drafters of a head, as eagle/drafters.py makes them, without a target's checks."""

from collections.abc import Sequence
from typing import Literal

from eagle.dynamic_tree import DynamicTree
from eagle.head_drafter import HeadDrafter
from eagle.heads import DraftHead
from eagle.level_drafter import TreeShape
from eagle.sampled_tree import SampledTree
from eagle.static_tree import PUBLISHED, RankPath, StaticTree
from eagle.token_layers import TokenLayers
from eagle.tree import Children


def eagle2_drafter(
    head: DraftHead,
    tokens: TokenLayers,
    *,
    budget: int = 60,
    top_k: int = 10,
    depth: int = 6,
    children: Children = "coupled",
    level_cost: float = 0.0,
) -> HeadDrafter:
    """The dynamic tree; children "sampled": the sampled one."""
    shape: TreeShape
    if children == "sampled":
        shape = SampledTree(budget=budget, top_k=top_k, depth=depth)
    else:
        shape = DynamicTree(budget=budget, top_k=top_k, depth=depth, children=children, level_cost=level_cost)
    return HeadDrafter(head, tokens, shape)


def static_drafter(
    head: DraftHead,
    tokens: TokenLayers,
    paths: Sequence[RankPath] = PUBLISHED,
    *,
    children: Literal["coupled", "top"] = "coupled",
) -> HeadDrafter:
    """A static tree."""
    return HeadDrafter(head, tokens, StaticTree(paths, children=children))
