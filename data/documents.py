"""Documents with the target's features, whoever computes them: what training reads.

Two sources: a feature store on disk (eagle/data/store.py), and the target in memory (eagle/data/online.py). T tokens,
H hidden, A = aux layers * H.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch

from eagle.errors import EagleError
from eagle.target.token_layers import TokenLayers


@dataclass(frozen=True, kw_only=True)
class Document:
    """One tokenised conversation with the target's features; T tokens."""

    id: str
    input_ids_T: torch.Tensor
    """int64 [T]"""
    loss_mask_T: torch.Tensor
    """bool [T], true where the token is the assistant's"""
    features_TH: torch.Tensor
    """[T, H] floating: the target's last hidden state, after its final norm"""
    aux_TA: torch.Tensor | None
    """[T, A] hidden states after the source's aux layers, side by side; None where it has none"""

    @property
    def states(self) -> torch.Tensor:
        """[T, X]: what a head that reads the source's layers sees of the target, the aux states or else the features."""
        return self.features_TH if self.aux_TA is None else self.aux_TA


class Documents(Protocol):
    """A source of documents, numbered as the rows of the prepared data are."""

    lengths: np.ndarray
    """int64 [documents]: tokens of each"""
    aux_layers: tuple[int, ...]
    """Layers whose states the documents carry (numbers of layers applied)"""

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def name(self) -> str:
        """For messages: "the feature store runs/x/features"."""
        ...

    @property
    def remedy(self) -> str:
        """What to do about features that are not finite."""
        ...

    @property
    def target_identity(self) -> dict[str, Any] | None:
        """`Target.identity()` of the target whose features these are."""
        ...

    def for_layers(self, aux_layers: Sequence[int]) -> Self:
        """The same documents for a head that reads these layers. Raises EagleError when they cannot be had."""
        ...

    def fingerprint(self) -> str:
        """A hash of what a run learns from."""
        ...

    def split(self, name: str) -> list[int]:
        """The numbers of the documents in split "train" or "validation", ascending."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Document: ...

    def read(self, numbers: Sequence[int]) -> list[Document]:
        """Several documents at once; their tensors may be on the target's device."""
        ...

    def ids_and_mask(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int64 [T] and loss_mask bool [T] of a document, without its features."""
        ...

    def token_layers(self) -> TokenLayers:
        """The target's frozen embedding and LM head."""
        ...


def only_layers(aux_TA: torch.Tensor, have: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """The blocks of the layers `wanted`, in that order, of [T, len(have) * H]."""
    if tuple(have) == tuple(wanted):
        return aux_TA
    blocks = aux_TA.unflatten(-1, (len(have), -1))
    return blocks[..., [list(have).index(layer) for layer in wanted], :].flatten(-2)


def require_in_vocabulary(ids_T: torch.Tensor, vocab_size: int, *, document: str) -> None:
    """Raises EagleError for a token id that the target has no embedding of."""
    beyond_T = (ids_T >= vocab_size).nonzero()[:, 0]
    if len(beyond_T):
        raise EagleError(
            f"document {document!r} has token {int(ids_T[beyond_T[0]])} at place {int(beyond_T[0])}, the target has embeddings "
            f"of {vocab_size}; prepare its data anew (`eagle data prepare RECIPE`), which names the row"
        )


def prompt_digest(ids_T: torch.Tensor, mask_T: torch.Tensor) -> bytes:
    """Of the tokens before the first answer (int64 [T], bool [T]): equal for documents that ask the same."""
    asked = int(mask_T.int().argmax()) if bool(mask_T.any()) else len(ids_T)
    return hashlib.sha256(ids_T[:asked].numpy().tobytes()).digest()


def leaked(source: Documents, *, trained_on: Sequence[int], held_out: Sequence[int]) -> int:
    """How many of the documents `held_out` ask what one of those `trained_on` asks."""
    if not held_out:
        return 0
    known = {prompt_digest(*source.ids_and_mask(number)) for number in trained_on}
    return sum(prompt_digest(*source.ids_and_mask(number)) in known for number in held_out)


def spread(total: int, count: int) -> list[int]:
    """`count` indices, evenly over 0 .. total - 1 (all of them where there are fewer)."""
    count = max(0, min(total, count))
    return [i * total // count for i in range(count)]
