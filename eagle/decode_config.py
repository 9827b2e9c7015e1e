"""The `decode` section of a recipe: what drafts, how it is verified, and what runs both.

A drafter and a verification rule are one of several kinds, each a dataclass with the options that it reads and no others.
What holds for drafter and rule together is checked in `check`, before anything is loaded. No torch here: recipes are read
without it.
"""

import dataclasses
import difflib
from typing import ClassVar, Literal

from eagle.errors import EagleError, check_choices

Children = Literal["coupled", "sampled", "top"]
"""How a tree's children were chosen, which decides what rules may verify it. coupled: with the noise that the coupled walk
emits with. sampled: drawn without replacement from a recorded q, with noise of their own; siblings lie in draw order, and
all that were drawn are there. top: without chance (the top-k of q, an n-gram's continuation, a fixed list)."""
Noise = Literal["coupling", "independent"]
"""What a rule's chance comes from. coupling: the noise plain sampling chooses with, which drafting may share. independent:
coins and final draws that no draft has seen; drafts made with the coupling noise would not be what their q says."""

BUDGET, TOP_K = 60, 10
"""The published trees' nodes (the root included), and children per expanded node."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What proposes."""

    name: ClassVar[str]
    reads_head: ClassVar[bool] = False
    makes: ClassVar[tuple[Children, ...]] = ("coupled", "top", "sampled")
    """How it can choose children."""

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(DrafterOptions):
    """eagle2: the head, in a tree of its most confident guesses (EAGLE-2's and EAGLE-3's).

    With all of it left open it is the tree that `eagle tune` stored beside the head for this machine, engine and dtype, else
    a small one after a few seconds of timing (on a CPU, rule coupled), else the published one. Where any of it is given, the
    rest is as published.
    """

    name = "eagle2"
    reads_head = True

    budget: int | None = None
    """Nodes per verification, the root included; null: tuned, or 60 as published."""
    top_k: int | None = None
    """Children per expanded node, and nodes expanded per level; null: tuned, or 10 as published."""
    depth: int | None = None
    """Levels below the root; null: tuned, or 6 (8 for an EAGLE-3 head) as published."""
    level_cost: float | None = None
    """Dynamic depth: no further level is drafted when what it can be expected to add, in accepted tokens, is below this. Worth
    while: about tau times the share of a cycle that one draft forward takes. 0: the full depth; null: tuned, or 0 as
    published."""

    @property
    def open(self) -> bool:
        """Whether nothing is said of the tree."""
        return self == Tree()

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1

    def as_published(self) -> "Tree":
        """With the published sizes in place of what is open, but the depth, which depends on the head."""
        return Tree(
            budget=BUDGET if self.budget is None else self.budget,
            top_k=TOP_K if self.top_k is None else self.top_k,
            depth=self.depth,
            level_cost=0.0 if self.level_cost is None else self.level_cost,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(DrafterOptions):
    """static: the head, in a tree of fixed shape (EAGLE-1's)."""

    name = "static"
    reads_head = True
    makes = ("coupled", "top")

    tree_file: str | None = None
    """A JSON list of child-rank paths, [[0], [1], [0, 0], ...]; null: the 25 published for EAGLE-1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(DrafterOptions):
    """chain: the head, one guess after the other."""

    name = "chain"
    reads_head = True

    @property
    def is_chain(self) -> bool:
        return True

    depth: int | None = None
    """Guesses, at most; null: 6 (8 for an EAGLE-3 head)."""
    level_cost: float = 0.0
    """Dynamic length, as eagle2's level_cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallModel(DrafterOptions):
    """model: a small language model, in eagle2's tree (top_k 1: a chain)."""

    name = "model"

    model: str | None = None
    """A folder, hub id or .gguf file with the target's tokenizer."""
    budget: int = BUDGET
    """Nodes per verification, the root included."""
    top_k: int = TOP_K
    """Children per expanded node, and nodes expanded per level."""
    depth: int = 6
    """Levels below the root."""
    level_cost: float = 0.0
    """As eagle2's level_cost."""

    @property
    def is_chain(self) -> bool:
        return self.top_k == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ngram(DrafterOptions):
    """ngram: what followed the last tokens where they occurred before (prompt lookup)."""

    name = "ngram"
    makes = ("top",)

    shortest: int = 1
    """Shortest suffix looked up, in tokens."""
    longest: int = 4
    """Longest one, tried first."""
    continuations: int = 1
    """Different continuations per tree; 1: a chain."""
    depth: int = 6
    """Tokens of a continuation, at most."""
    budget: int = BUDGET
    """Nodes per verification, the root included."""

    @property
    def is_chain(self) -> bool:
        return self.continuations == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(DrafterOptions):
    """none: plain decoding, without drafts."""

    name = "none"

    @property
    def is_chain(self) -> bool:
        return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleOptions:
    """What is known of a verification rule before it walks. One's own: a subclass that walks."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    """Whether the output is distributed exactly as the target's."""
    noise: ClassVar[Noise] = "coupling"
    children: ClassVar[tuple[Children, ...]] = ("coupled", "top", "sampled")
    """How a tree's children may have been chosen; the first is what drafts best for the rule."""
    chains_only: ClassVar[bool] = False
    """Whether a node may have no more than one child."""
    looks_ahead: ClassVar[bool] = False
    """Whether it asks for the target after tokens that are then not emitted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coupled(RuleOptions):
    """coupled: plain decoding's text, token for token, at temperature 0 and above."""

    name = "coupled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rejection(RuleOptions):
    """rejection: the target's distribution, for chains and trees (speculative sampling)."""

    name = "rejection"
    noise = "independent"
    children = ("sampled", "top")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(RuleOptions):
    """block: the target's distribution, a chain accepted as one block."""

    name = "block"
    noise = "independent"
    children = ("sampled",)
    chains_only, looks_ahead = True, True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(RuleOptions):
    """top_k, lossy: a draft is accepted among the target's k most likely tokens (of its processed logits)."""

    name = "top_k"
    lossless = False
    children = ("top", "coupled", "sampled")

    k: int = 3
    """How many; 1 at temperature 0 is lossless."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise EagleError(f"decode.rule.k is {self.k}, expected 1 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical(RuleOptions):
    """typical, lossy: typical acceptance (Medusa, arXiv 2401.10774).

    x is accepted when p(x) > min(epsilon, delta * exp(-entropy of p)).
    """

    name = "typical"
    lossless = False
    children = ("top", "coupled", "sampled")

    epsilon: float = 0.3
    """Probability that is always enough."""
    delta: float = 0.09
    """Factor of exp(-entropy): flat distributions accept less likely tokens."""

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 <= getattr(self, name) <= 1:
                raise EagleError(f"decode.rule.{name} is {getattr(self, name)}, expected 0 to 1")


DRAFTERS: dict[str, type[DrafterOptions]] = {
    kind.name: kind for kind in (Tree, Published, Chain, SmallModel, Ngram, Plain)
}
RULES: dict[str, type[RuleOptions]] = {kind.name: kind for kind in (Coupled, Rejection, Block, TopK, Typical)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How drafts are made and verified.

    drafter and rule are a name (`drafter: chain`), or a section with its options (`drafter: {kind: chain, depth: 4}`).
    """

    drafter: DrafterOptions = Tree()
    """What proposes."""
    rule: RuleOptions = Coupled()
    """How it is verified."""
    children: Literal["auto", "coupled", "sampled", "top"] = "auto"
    """How children are chosen: with verification's noise, drawn without replacement, or the top-k; auto: as the rule wants."""
    engine: Literal["auto", "eager", "compiled", "cudagraph"] = "auto"
    """auto: cudagraph where it can be captured, else compiled where it can be packed, else eager. eager: PyTorch as it is.
    compiled: linear layers by the product that is fastest here (CPU, float32; a second copy of the weights), and attention
    whose result for a token does not depend on its neighbours. cudagraph: forwards of fixed shapes, captured as CUDA graphs
    and replayed (one CUDA device)."""
    kernels: Literal["auto", "reference", "triton"] = "auto"
    """What runs tree attention and commits. auto: Triton on CUDA devices, where it takes the tensors, else PyTorch; reference:
    PyTorch; triton: Triton, or an error that says why it cannot."""

    def __post_init__(self) -> None:
        check_choices(self, "decode")
        check(self)

    @property
    def chosen_children(self) -> Children:
        """How children are chosen: as `children` says, else the rule's favourite of those that the drafter can make."""
        if self.children != "auto":
            return self.children
        return next((kind for kind in self.rule.children if kind in self.drafter.makes), self.rule.children[0])

    def kind(self, drafter: str) -> DrafterOptions:
        """The options of that drafter: what is said here where it is this one, else its defaults."""
        return self.drafter if self.drafter.name == drafter else DRAFTERS[drafter]()

    def kind_of_rule(self, rule: str) -> RuleOptions:
        """The options of that rule, likewise. Raises EagleError for an unknown name."""
        if rule not in RULES:
            near = difflib.get_close_matches(rule, RULES, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(RULES)}"
            raise EagleError(f'unknown rule "{rule}"; {hint}')
        return self.rule if self.rule.name == rule else RULES[rule]()

    def as_published(self) -> "DecodeConfig":
        """With the published tree in place of what the drafter leaves open; its depth, which depends on the head, stays open."""
        if not isinstance(self.drafter, Tree):
            return self
        return dataclasses.replace(self, drafter=self.drafter.as_published())


def check(decode: DecodeConfig) -> None:
    """All that holds for a drafter and a rule together. Raises EagleError for sizes out of range, children that the drafter
    cannot make or the rule cannot verify, and trees where the rule takes chains."""
    drafter, rule = decode.drafter, decode.rule
    for name, least in _LEAST.items():
        value = getattr(drafter, name, None)
        if value is not None and value < least:
            raise EagleError(f"decode.drafter.{name} is {value}, expected {least} or more")
    level_cost = getattr(drafter, "level_cost", None) or 0.0
    if not 0 <= level_cost <= 1:
        raise EagleError(
            f"decode.drafter.level_cost is {level_cost}, expected accepted tokens, from 0 (always the full depth) to 1 "
            "(the most that a level can add)"
        )
    if isinstance(drafter, Ngram) and drafter.longest < drafter.shortest:
        raise EagleError(
            f"decode.drafter.longest is {drafter.longest}, below decode.drafter.shortest {drafter.shortest}; suffixes of "
            f"{drafter.shortest} tokens or more are looked up"
        )
    if isinstance(drafter, Plain):
        return
    children = decode.chosen_children
    if children not in drafter.makes:
        raise EagleError(
            f'the drafter "{drafter.name}" cannot choose children "{children}", only {" or ".join(drafter.makes)}; the rule '
            f'"{rule.name}" takes {" or ".join(rule.children)}: change decode.children, decode.rule or decode.drafter'
        )
    check_tree(rule, children=children, chain=drafter.is_chain)
    if level_cost and rule.noise == "independent" and rule.lossless:
        raise EagleError(
            f'decode.drafter.level_cost is {level_cost}, but under the rule "{rule.name}" a text depends on its trees, whose '
            "depth would depend on the batch; set level_cost to 0, or the rule to coupled"
        )


_LEAST = {"budget": 1, "top_k": 1, "depth": 1, "shortest": 1, "continuations": 1}


def check_tree(rule: RuleOptions, *, children: Children, chain: bool) -> None:
    """Raises EagleError unless the rule can verify trees (or chains) with children chosen that way."""
    if children not in rule.children:
        raise EagleError(
            f'the rule "{rule.name}" got a tree whose children are "{children}", expected {_either(rule.children)}: '
            f"{_WHY[rule.noise]}; draft with children={_either(rule.children)}"
        )
    if rule.chains_only and not chain:
        raise EagleError(
            f'the rule "{rule.name}" got a tree with siblings, expected a chain; take the drafter chain (or top_k 1), or another '
            "rule"
        )


_WHY = {
    "coupling": "its noise is plain sampling's",
    "independent": "its acceptance holds only for children chosen apart from the noise that verification draws with",
}


def _either(names: tuple[Children, ...]) -> str:
    return " or ".join(f'"{name}"' for name in names)
