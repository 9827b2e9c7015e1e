"""Per-turn loss flags: which assistant turns a row says are not to be learnt from.

Other trainers' files say it beside the turn (`weight` 0 or 1, `train` or `loss` true or false ...) or for the whole row
(`loss_mask`, one flag per turn). What says more than yes or no (a weight of 0.5, parts of a turn) is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle.data.sources import RowError

FLAGS = ("loss_mask", "weight", "train", "training", "loss", "loss_weight", "loss_scale")
"""Keys of a turn; each true, false, 1 or 0."""
PARTS = ("train_detail", "training_detail")
"""Keys of a turn that flag parts of it."""
NOT_FOLLOWED = "a loss flag on a turn that is not the assistant's was not followed"


def of_turn(turn: Mapping[str, Any], position: int) -> bool | None:
    """Whether the turn is to be learnt from; None: nothing is said. Raises RowError."""
    parts = next((key for key in PARTS if turn.get(key) is not None), None)
    if parts is not None:
        raise RowError(f"{parts} flags parts of a turn", f"turn {position}; expected a flag for the whole turn")
    said = {key: _flag(turn[key], key, position) for key in FLAGS if turn.get(key) is not None}
    if len(set(said.values())) > 1:
        raise RowError("loss flags that disagree", f"turn {position}: {', '.join(said)}")
    return next(iter(said.values()), None)


def spread_over(flags: Any, turns: Sequence[Any]) -> list[Any]:
    """The turns, each with its flag of a row's `loss_mask` where there is one. Raises RowError."""
    if flags is None:
        return list(turns)
    if not isinstance(flags, Sequence) or isinstance(flags, str):
        raise RowError("loss_mask is not a list", f"got {flags!r:.40}, expected one flag per turn")
    if len(flags) != len(turns):
        raise RowError("loss_mask does not fit the turns", f"{len(flags)} flags for {len(turns)} turns")
    known = [_flag(flag, "loss_mask", position) for position, flag in enumerate(flags, 1)]
    return [
        {**turn, "loss_mask": _agreeing(turn, flag, position)} if isinstance(turn, Mapping) else turn
        for position, (turn, flag) in enumerate(zip(turns, known, strict=True), 1)
    ]


def _agreeing(turn: Mapping[str, Any], flag: bool, position: int) -> bool:
    own = turn.get("loss_mask")
    if own is not None and _flag(own, "loss_mask", position) != flag:
        raise RowError("loss flags that disagree", f"turn {position}: the row's loss_mask and the turn's own")
    return flag


def _flag(value: Any, key: str, position: int) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise RowError("a loss flag that is neither 0 nor 1", f"{key} of turn {position} is {value!r:.40}")
