"""What drafts, made from the options that name it (eagle/decode_config.py)."""

from pathlib import Path

from transformers import PreTrainedModel

from eagle.decode_config import Chain, DecodeConfig, Ngram, Plain, Published, SmallModel, Tree
from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import TreeShape
from eagle.draft.by_model import ModelDrafter
from eagle.draft.by_ngram import NgramDrafter
from eagle.draft.drafter import Drafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import PUBLISHED, StaticTree, read_paths
from eagle.draft.sampled_tree import SampledTree
from eagle.draft.timed_trees import timed_trees
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

DEPTHS = {"eagle1": 6, "eagle3": 8}
"""Levels below the root where the options name none, by the head's version."""


def make_drafter(
    target: Target,
    decode: DecodeConfig,
    *,
    head: str | Path | DraftHead | None = None,
    draft_model: str | Path | PreTrainedModel | Target | None = None,
) -> Drafter | None:
    """The drafter that `decode` names, its trees fit for its rule; None: plain decoding.

    head: folder, zoo name, hub id or loaded head, for the drafters that read one. draft_model: path, hub id, .gguf file, loaded
    model or Target, for SmallModel (default: its own `model`). Without a head Tree, the default, is plain decoding.
    Where `decode` leaves the tree open, the head's tuned trees of this machine are taken, or else the published one.
    Raises EagleError for what is missing, does not fit the target, or would have no effect.
    """
    options = decode.drafter
    if draft_model is not None and not isinstance(options, SmallModel):
        raise EagleError(
            f'a draft model was given, but decode.drafter is "{options.name}"; set it to model, or leave the model out'
        )
    if isinstance(options, Plain) or (isinstance(options, Tree) and head is None):
        return None
    if isinstance(options, Ngram):
        return NgramDrafter(
            depth=options.depth,
            budget=options.budget,
            shortest=options.shortest,
            longest=options.longest,
            continuations=options.continuations,
        )
    if isinstance(options, SmallModel):
        shape = _shape(decode, version="eagle1")
        by_model = ModelDrafter(_load_draft_model(options, draft_model, target), target, shape)
        by_model.tree_source = f"{_source(decode)}: {shape}"
        return by_model
    if head is None:
        raise EagleError(f'the drafter "{options.name}" needs a draft head; give its folder, zoo name or hub id')
    loaded = head if isinstance(head, DraftHead) else load_head(head)
    shape = _shape(decode, version=loaded.version)
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
    drafter.tree_source = f"{_source(decode)}: {shape}"
    tuned = _tuned(drafter, target, decode)
    return drafter if tuned is None else TunedDrafter(drafter, tuned)


def _source(decode: DecodeConfig) -> str:
    default = DecodeConfig(drafter=type(decode.drafter)()).as_published()
    return "published" if decode.as_published().drafter == default.drafter else "given"


def _tuned(drafter: HeadDrafter, target: Target, decode: DecodeConfig) -> TunedTrees | None:
    """What was tuned for this head on this machine: eagle2's trees, verified by the coupled rule. On a CPU where nothing was,
    what a few timed forwards say."""
    if decode.drafter != Tree() or decode.children != "auto" or decode.rule.name != "coupled":
        return None
    tuned = tuned_for(drafter.head.folder, device=target.device, engine=target.engine, dtype=target.dtype)
    if tuned is None and target.device.type == "cpu":
        tuned = timed_trees(target, drafter, target.engine)
    return tuned


def _shape(decode: DecodeConfig, *, version: str) -> TreeShape:
    options, children = decode.as_published().drafter, decode.chosen_children
    if isinstance(options, Published):
        paths = PUBLISHED if options.tree_file is None else read_paths(options.tree_file)
        return StaticTree(paths, children="top" if children == "top" else "coupled")
    assert isinstance(options, Tree | Chain | SmallModel)
    depth = DEPTHS[version] if options.depth is None else options.depth
    budget, top_k = (depth + 1, 1) if isinstance(options, Chain) else (options.budget, options.top_k)
    assert budget is not None
    assert top_k is not None
    if children == "sampled":
        return SampledTree(budget=budget, top_k=top_k, depth=depth)
    return DynamicTree(budget=budget, top_k=top_k, depth=depth, children=children, level_cost=options.level_cost or 0.0)


def _load_draft_model(
    options: SmallModel, model: str | Path | PreTrainedModel | Target | None, target: Target
) -> Target:
    model = options.model if model is None else model
    if model is None:
        raise EagleError(
            'the drafter "model" needs a draft model: set decode.drafter.model (a path, hub id or .gguf file)'
        )
    if isinstance(model, Target):
        return model
    where = {} if isinstance(model, PreTrainedModel) else {"device": str(target.device)}
    loaded = Target.from_pretrained(model if isinstance(model, PreTrainedModel) else str(model), **where)
    return loaded.on_engine(target.engine, capture=target.capture)
