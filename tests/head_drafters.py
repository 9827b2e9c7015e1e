"""Drafters of a head, as eagle/decode/make.py makes them, without a target's checks."""

from collections.abc import Sequence
from typing import Literal

from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import TreeShape
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import PUBLISHED, RankPath, StaticTree
from eagle.draft.sampled_tree import SampledTree
from eagle.draft.tree import Children
from eagle.heads.eagle1 import DraftHead
from eagle.target.token_layers import TokenLayers


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
