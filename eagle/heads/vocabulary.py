"""The reduced draft vocabulary: the few thousand most frequent tokens, so that drafting's LM head costs Vd, not V.

V target vocabulary, D (Vd) draft vocabulary, X any leading shape. Draft id i is the i-th of the chosen target ids (ascending
where this project chooses them). Files keep it as published heads do: `d2t` int64 [D] holds OFFSETS, target_id =
draft_id + d2t[draft_id]; `t2d` bool [V] says which target ids have a draft id.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import torch

from eagle.errors import EagleError
from eagle.target.token_layers import TokenLayers


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftVocabulary:
    """A subset of the target's tokens."""

    target_ids_D: torch.Tensor
    """int64 [D] on the CPU, each id once."""
    target_size: int
    """V."""
    coverage: float = 1.0
    """Share of the counted tokens that are draft tokens: drafting's softmax leaves out the others' probability, so its
    confidences are multiplied by this."""

    def __post_init__(self) -> None:
        if not 0 < self.coverage <= 1:
            raise EagleError(
                f"a draft vocabulary's coverage is {self.coverage}, expected a share above 0 and at most 1"
            )

    @property
    def size(self) -> int:
        return len(self.target_ids_D)

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [D]: target id minus draft id."""
        return self.target_ids_D - torch.arange(self.size)

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]: whether the target id has a draft id."""
        t2d_V = torch.zeros(self.target_size, dtype=torch.bool)
        t2d_V[self.target_ids_D] = True
        return t2d_V

    @classmethod
    def most_frequent(cls, counts_V: torch.Tensor, size: int, *, always: Collection[int] = ()) -> "DraftVocabulary":
        """The `size` tokens with the largest counts (int64 [V]); among equals, those never seen included, lower ids first.

        always: ids that are among them whatever their counts, as the target's EOS ids, which end every answer.
        """
        if not 1 <= size <= len(counts_V):
            raise EagleError(
                f"head.draft_vocab_size is {size}, expected 1 to {len(counts_V)} (the target's vocabulary), or null for all"
            )
        if len(always) > size:
            raise EagleError(
                f"head.draft_vocab_size is {size}, expected at least {len(always)}: the target's EOS ids {sorted(always)} are "
                "always drafted"
            )
        ranks_V = counts_V.clone()
        ranks_V[list(always)] = counts_V.max() + 1
        order_V = ranks_V.sort(descending=True, stable=True).indices
        chosen_D = order_V[:size].sort().values
        coverage = float(counts_V[chosen_D].sum()) / max(1.0, float(counts_V.sum()))
        return cls(target_ids_D=chosen_D, target_size=len(counts_V), coverage=coverage or 1.0)

    def without(self, ids: Collection[int]) -> list[int]:
        """Those of the target's ids that have no draft id, ascending."""
        return sorted(set(ids) - set(self.target_ids_D.tolist()))

    @classmethod
    def from_tensors(
        cls, d2t_D: torch.Tensor, t2d_V: torch.Tensor, *, coverage: float = 1.0, where: str
    ) -> "DraftVocabulary":
        """Reads the two tensors of a head's file. Raises EagleError, naming `where`, unless they describe one subset."""

        def broken(reason: str) -> EagleError:
            return EagleError(f"{where}: {reason}; the file is damaged or not a draft head's: fetch or train it again")

        if d2t_D.dtype != torch.int64 or d2t_D.ndim != 1 or t2d_V.dtype != torch.bool or t2d_V.ndim != 1:
            raise broken(
                f"d2t is {d2t_D.dtype} {tuple(d2t_D.shape)} and t2d {t2d_V.dtype} {tuple(t2d_V.shape)}, expected int64 [Vd] "
                "and bool [V]"
            )
        draft_size, target_size = len(d2t_D), len(t2d_V)
        ids_D = d2t_D.cpu() + torch.arange(draft_size)
        if draft_size == 0 or int(ids_D.min()) < 0 or int(ids_D.max()) >= target_size:
            span = f"{int(ids_D.min())} .. {int(ids_D.max())}" if draft_size else "none"
            raise broken(f"d2t leads to the target ids {span}, expected 0 .. {target_size - 1}")
        sorted_D, order_D = ids_D.sort(stable=True)
        repeats = (sorted_D[1:] == sorted_D[:-1]).nonzero().flatten()
        if len(repeats):
            first, second = order_D[repeats[0]], order_D[repeats[0] + 1]
            raise broken(
                f"d2t repeats target ids ({len(repeats)} times): draft ids {int(first)} and {int(second)} both stand for "
                f"{int(ids_D[first])} (are its entries ids instead of offsets?)"
            )
        vocabulary = cls(target_ids_D=ids_D, target_size=target_size, coverage=coverage)
        differing = (vocabulary.t2d != t2d_V.cpu()).nonzero().flatten()
        if len(differing):
            blank = "d2t is all zeros, as if never filled: it" if not bool(d2t_D.any()) else "d2t"
            raise broken(
                f"{blank} and t2d disagree on {len(differing)} tokens, the first being target id {int(differing[0])} "
                f"(t2d has {int(t2d_V.sum())} draft tokens, d2t {draft_size})"
            )
        return vocabulary


def doubt_of_d2t(d2t_D: torch.Tensor, target_size: int) -> str | None:
    """Why a d2t without a t2d beside it may not hold the offsets of the draft tokens; None: it can only be those.

    A map that was never filled is all zeros. A list of target ids, 0 .. D-1 among them, has different numbers everywhere;
    offsets repeat wherever two draft tokens are neighbours in the vocabulary.
    """
    size = len(d2t_D)
    if 0 < size < target_size and not bool(d2t_D.any()):
        return f"d2t is zero at all {size} draft ids, as if never filled: right only if the draft tokens are the first ones"
    low, high = (int(d2t_D.min()), int(d2t_D.max())) if size else (0, 0)
    if size > 1 and low >= 0 and high < target_size and len(d2t_D.unique()) == size:
        return f"d2t has {size} different numbers, {low} .. {high}, as a list of target ids has: offsets (id minus place) repeat"
    return None


class DraftTokens:
    """What a head's predictions mean: logits over its draft vocabulary, and which target tokens those are.

    vocabulary None: all of the target's tokens, under their own ids. The LM head's rows are copied once, contiguous,
    when `logits` first needs them: heads with an LM head of their own never do. device: where draft logits lie, and so the
    ids; None: on the target's LM head's.
    """

    def __init__(
        self,
        tokens: TokenLayers,
        vocabulary: DraftVocabulary | None = None,
        *,
        device: torch.device | None = None,
    ):
        self.full, self.vocabulary = tokens, vocabulary
        if vocabulary is None:
            self.target_ids_D, self._inside_V = None, None
            return
        if vocabulary.target_size != tokens.vocab_size:
            raise EagleError(
                f"the head's draft vocabulary is a part of {vocabulary.target_size} tokens, the target has "
                f"{tokens.vocab_size}: it was made for another model; use that one"
            )
        device = tokens.lm_head_VH.device if device is None else device
        self.target_ids_D = vocabulary.target_ids_D.to(device)
        self._inside_V = vocabulary.t2d.to(device)

    @cached_property
    def layers(self) -> TokenLayers:
        """The target's layers with an LM head for the draft tokens alone."""
        return self.full if self.target_ids_D is None else self.full.restricted(self.target_ids_D)

    @property
    def size(self) -> int:
        """D."""
        return self.full.vocab_size if self.vocabulary is None else self.vocabulary.size

    @property
    def log_coverage(self) -> float:
        return 0.0 if self.vocabulary is None else math.log(self.vocabulary.coverage)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., D]."""
        return self.layers.logits(features)

    def to_target(self, draft_ids_X: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft ids."""
        return draft_ids_X if self.target_ids_D is None else self.target_ids_D[draft_ids_X]

    def ids(self, device: torch.device) -> torch.Tensor:
        """int64 [D]: the target's ids of all draft ids."""
        return torch.arange(self.size, device=device) if self.target_ids_D is None else self.target_ids_D

    def restrict(self, values_XV: torch.Tensor) -> torch.Tensor:
        """[..., V] over the target's tokens (V: D or more) -> [..., D]: the draft tokens' values."""
        return (
            values_XV[..., : self.size] if self.target_ids_D is None else values_XV.index_select(-1, self.target_ids_D)
        )

    def holds(self, target_ids_X: torch.Tensor) -> torch.Tensor:
        """bool: whether each of the target's ids is a draft token."""
        if self._inside_V is None:
            return torch.ones_like(target_ids_X, dtype=torch.bool)
        return self._inside_V[target_ids_X]
