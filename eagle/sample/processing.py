"""Running a row's logits processors as Hugging Face does, and telling which of them left nothing to choose from.

M rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle.errors import EagleError

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Hugging Face's protocol: (input_ids int64 [M, T], scores float32 [M, V]) -> scores [M, V]. It may keep a state, and may
write into the scores that it gets."""


class UnsoundScoresError(EagleError):
    """No token can be chosen from these scores."""


def process(
    processors: Sequence[Processor],
    ids_MT: torch.Tensor,
    scores_MV: torch.Tensor,
    *,
    step: int,
    fits: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The scores after all processors, which get a copy. float32 [M, V].

    step: number of the new token. fits: whether a token can be chosen, from the rows' best scores [M] (nan: there is one).
    Raises UnsoundScoresError, naming step, token and the processor at fault, unless it can in every row.
    """
    scores_MV = scores_MV.to(torch.float32, copy=bool(processors))
    sound = [fits(scores_MV.amax(-1)).all()]
    for processor in processors:
        scores_MV = processor(ids_MT, scores_MV)
        sound.append(fits(scores_MV.amax(-1)).all())
    if not bool(sound[-1]):
        broken = len(sound) - next((i for i, one in enumerate(reversed(sound)) if bool(one)), len(sound))
        culprit = "the target" if broken == 0 else name_of(processors[broken - 1])
        raise UnsoundScoresError(_complaint(scores_MV, step=step, culprit=culprit))
    return scores_MV


def _complaint(scores_MV: torch.Tensor, *, step: int, culprit: str) -> str:
    wrong = (scores_MV.isnan() | (scores_MV == float("inf"))).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        found = f"the logit of token {token} is {float(scores_MV[row, token])}"
    else:
        found = "the logit of every token is -inf"
    remedy = f"mend {culprit}"
    if culprit == "the target":
        remedy = "its weights are damaged or overflow: load it in another dtype, or set remove_invalid_values=True"
    return (
        f"step {step}: {found} after {culprit}, so that no token can be chosen; expected finite logits, or -inf for tokens that "
        f"may not be chosen; {remedy}"
    )


def name_of(processor: Any) -> str:
    """A processor's or criterion's name in messages."""
    return str(getattr(processor, "__qualname__", type(processor).__name__))


def own_copy(given: Any) -> Any:
    """A copy, state included, for a row of its own; models and tokenizers that it holds are shared.

    A function's state is its closure and defaults. Raises EagleError for what cannot be copied.
    """
    try:
        return _copied(given, {})
    except Exception as error:
        raise EagleError(
            f"{name_of(given)} cannot be copied ({error}), and every row wants one of its own, since it may keep a state; "
            "generate one row at a time, with the rule coupled, or give it a __deepcopy__"
        ) from error


def _copied(given: Any, memo: dict[int, Any]) -> Any:
    shared = (torch.nn.Module, PreTrainedTokenizerBase)
    if isinstance(given, shared) or id(given) in memo:
        return memo.get(id(given), given)
    if not isinstance(given, FunctionType):
        memo.update({id(held): held for held in getattr(given, "__dict__", {}).values() if isinstance(held, shared)})
        return copy.deepcopy(given, memo)
    cells = tuple(CellType() for _ in given.__closure__ or ())
    made = FunctionType(
        given.__code__, given.__globals__, given.__name__, copy.deepcopy(given.__defaults__, memo), cells
    )
    made.__kwdefaults__, made.__qualname__ = copy.deepcopy(given.__kwdefaults__, memo), given.__qualname__
    memo[id(given)] = made
    for cell, old in zip(cells, given.__closure__ or ()):
        cell.cell_contents = _copied(old.cell_contents, memo)
    return made
