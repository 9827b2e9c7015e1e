"""Drafters by name: what `decode.drafter` and its options stand for."""

import dataclasses
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from eagle.config import DecodeConfig
from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import TreeShape
from eagle.draft.by_model import ModelDrafter
from eagle.draft.by_ngram import NgramDrafter
from eagle.draft.drafter import Drafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import PUBLISHED, StaticTree, read_paths
from eagle.draft.sampled_tree import SampledTree
from eagle.draft.timed_trees import timed_trees
from eagle.draft.tree import Children
from eagle.draft.tuned import TunedDrafter
from eagle.draft.tuning import TunedTrees, tuned_for
from eagle.errors import EagleError
from eagle.formats.checkpoint import check_fits, load_head
from eagle.formats.zoo.catalogue import other_weights
from eagle.heads.eagle1 import DraftHead
from eagle.progress import console
from eagle.target.engine import packed_copy
from eagle.target.fixed_forward import StaticForward
from eagle.target.target import Target
from eagle.verify.coupled import Coupled, Rule, check_tree

BUDGET, TOP_K = 60, 10
"""The published trees' nodes (the root included), and children per expanded node."""
DEPTHS = {"eagle1": 6, "eagle3": 8}
"""Levels below the root where decode.depth names none, by the head's version; drafters without a head take EAGLE-1's."""
NEEDS_HEAD = ("eagle2", "static", "chain")
"""Drafters that need a draft head."""

_TREE = ("budget", "top_k", "depth", "level_cost")

# Options that only some drafters read: setting them for another is an error, not a silence.
_OWN: dict[str, tuple[str, ...]] = {
    "budget": ("eagle2", "chain", "model", "ngram"),
    "depth": ("eagle2", "chain", "model", "ngram"),
    "top_k": ("eagle2", "model"),
    "level_cost": ("eagle2", "chain", "model"),
    "tree_file": ("static",),
    "draft_model": ("model",),
    "ngram_min": ("ngram",),
    "ngram_max": ("ngram",),
    "ngram_continuations": ("ngram",),
}


def with_drafter(decode: DecodeConfig, drafter: str) -> DecodeConfig:
    """The same settings for another drafter; options that only other drafters read go back to their defaults."""
    values: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(decode) if drafter not in _OWN.get(f.name, (drafter,))
    }
    values["drafter"] = drafter
    return dataclasses.replace(decode, **values)


def published(decode: DecodeConfig) -> DecodeConfig:
    """The settings with what they leave open of the tree as it was published, as far as the drafter reads it; depth, which
    depends on the head, stays open."""
    values: dict[str, Any] = {"budget": BUDGET, "top_k": TOP_K, "level_cost": 0.0}
    left = {
        name: value
        for name, value in values.items()
        if getattr(decode, name) is None and decode.drafter in _OWN.get(name, (decode.drafter,))
    }
    return dataclasses.replace(decode, **left)


def left_open(decode: DecodeConfig) -> DecodeConfig:
    """The settings for eagle2 with nothing said of its tree: tuned, or published."""
    return _without_sizes(with_drafter(decode, "eagle2"))


def _without_sizes(decode: DecodeConfig) -> DecodeConfig:
    return dataclasses.replace(decode, budget=None, top_k=None, depth=None, level_cost=None)


def make_drafter(
    target: Target,
    rule: Rule,
    decode: DecodeConfig,
    *,
    head: str | Path | DraftHead | None = None,
    draft_model: str | Path | PreTrainedModel | Target | None = None,
) -> Drafter | None:
    """The drafter that `decode` names, its trees fit for `rule`; None: plain decoding.

    head: folder, zoo name, hub id or loaded head, for the drafters in NEEDS_HEAD. draft_model: path, hub id, .gguf file, loaded
    model or Target, for "model" (default: decode.draft_model). Without a head "eagle2", the default, is plain decoding.
    Where `decode` leaves the tree open, the head's tuned trees of this machine are taken, or else the published one.
    Raises EagleError for what is missing, does not fit the target or the rule, or would have no effect.
    """
    asked, decode = decode, published(decode)
    source = "published" if decode == published(_without_sizes(decode)) else "given"
    if decode.drafter == "none":
        return None
    _refuse_idle_options(asked, draft_model)
    if decode.drafter == "eagle2" and head is None:
        return None
    if decode.drafter == "ngram":
        _children(decode, rule, only=("top",), chain=decode.ngram_continuations == 1)
        return NgramDrafter(
            depth=_depth(decode),
            budget=_budget(decode),
            shortest=decode.ngram_min,
            longest=decode.ngram_max,
            continuations=decode.ngram_continuations,
        )
    if decode.drafter == "model":
        shape = _shape(decode, rule, depth=_depth(decode))
        by_model = ModelDrafter(_load_draft_model(decode, draft_model, target), target, shape)
        by_model.tree_source = f"{source}: {shape}"
        return by_model
    if head is None:
        raise EagleError(f'the drafter "{decode.drafter}" needs a draft head; give its folder, zoo name or hub id')
    loaded = head if isinstance(head, DraftHead) else load_head(head)
    shape = _shape(decode, rule, depth=_depth(decode, loaded.version))
    check_fits(loaded, target)
    notice = other_weights(loaded.folder, target)
    if notice is not None:
        console.print(notice, markup=False, soft_wrap=True)
    loaded = loaded.to(device=target.device, dtype=target.dtype)
    if target.engine == "compiled":
        loaded = packed_copy(loaded)
    static = None
    if target.engine == "cudagraph":
        static = StaticForward(layers=1, device=target.device, capture=target.capture)
    drafter = HeadDrafter(loaded, target.tokens, shape, static=static)
    drafter.tree_source = f"{source}: {shape}"
    tuned = _tuned(drafter, target, rule, asked)
    return drafter if tuned is None else TunedDrafter(drafter, tuned)


def _tuned(drafter: HeadDrafter, target: Target, rule: Rule, decode: DecodeConfig) -> TunedTrees | None:
    """What was tuned for this head on this machine: eagle2's trees, verified by the coupled rule. On a CPU where nothing was,
    what a few timed forwards say."""
    if any(getattr(decode, name) is not None for name in _TREE):
        return None
    if decode.drafter != "eagle2" or decode.children != "auto" or not isinstance(rule, Coupled):
        return None
    tuned = tuned_for(drafter.head.folder, device=target.device, engine=target.engine, dtype=target.dtype)
    if tuned is None and target.device.type == "cpu":
        tuned = timed_trees(target, drafter, target.engine)
    return tuned


def _budget(decode: DecodeConfig) -> int:
    assert decode.budget is not None
    return decode.budget


def _depth(decode: DecodeConfig, version: str = "eagle1") -> int:
    return DEPTHS[version] if decode.depth is None else decode.depth


def _shape(decode: DecodeConfig, rule: Rule, *, depth: int) -> TreeShape:
    if decode.drafter == "static":
        paths = PUBLISHED if decode.tree_file is None else read_paths(decode.tree_file)
        chain = all(rank == 0 for path in paths for rank in path)
        children = _children(decode, rule, only=("coupled", "top"), chain=chain)
        return StaticTree(paths, children="top" if children == "top" else "coupled")
    if decode.drafter == "chain":
        decode = dataclasses.replace(decode, top_k=1)
    children = _children(decode, rule, only=("coupled", "top", "sampled"), chain=decode.top_k == 1)
    assert decode.top_k is not None
    assert decode.level_cost is not None
    if decode.level_cost and rule.noise == "independent" and rule.lossless:
        raise EagleError(
            f'decode.level_cost is {decode.level_cost}, but under the rule "{rule.name}" a text depends on its trees, whose '
            "depth would depend on the batch; set level_cost to 0, or the rule to coupled"
        )
    if children == "sampled":
        return SampledTree(budget=_budget(decode), top_k=decode.top_k, depth=depth)
    return DynamicTree(
        budget=_budget(decode),
        top_k=decode.top_k,
        depth=depth,
        children=children,
        level_cost=decode.level_cost,
    )


def _children(decode: DecodeConfig, rule: Rule, *, only: tuple[Children, ...], chain: bool) -> Children:
    """How the drafter's children are chosen: as decode.children says, else the rule's favourite of those it can make."""
    children: Children = next((kind for kind in rule.children if kind in only), rule.children[0])
    if decode.children != "auto":
        children = decode.children
    if children not in only:
        raise EagleError(
            f'the drafter "{decode.drafter}" cannot choose children "{children}", only {" or ".join(only)}; '
            f'the rule "{rule.name}" takes {" or ".join(rule.children)}: change decode.children, decode.rule or decode.drafter'
        )
    check_tree(rule, children=children, chain=chain)
    return children


def _load_draft_model(
    decode: DecodeConfig, model: str | Path | PreTrainedModel | Target | None, target: Target
) -> Target:
    model = decode.draft_model if model is None else model
    if model is None:
        raise EagleError(
            'the drafter "model" needs a draft model: set decode.draft_model (a path, hub id or .gguf file)'
        )
    if isinstance(model, Target):
        return model
    where = {} if isinstance(model, PreTrainedModel) else {"device": str(target.device)}
    loaded = Target.from_pretrained(model if isinstance(model, PreTrainedModel) else str(model), **where)
    return loaded.on_engine(target.engine, capture=target.capture)


def _refuse_idle_options(decode: DecodeConfig, draft_model: object) -> None:
    for field in dataclasses.fields(DecodeConfig):
        owners = _OWN.get(field.name, (decode.drafter,))
        if decode.drafter not in owners and getattr(decode, field.name) != field.default:
            raise EagleError(
                f'decode.{field.name} is {getattr(decode, field.name)!r}, but only the drafter "{" or ".join(owners)}" reads it '
                f'and decode.drafter is "{decode.drafter}"; set decode.drafter to {" or ".join(owners)}, or leave it out'
            )
    if draft_model is not None and decode.drafter != "model":
        raise EagleError(
            f'a draft model was given, but decode.drafter is "{decode.drafter}"; set it to model, or leave the model out'
        )
