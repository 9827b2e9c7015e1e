"""Beam pruning by thresholds (Freitag & Al-Onaizan 2017, "Beam Search Strategies for Neural Machine Translation", section 3).

The thresholds speak of log scores, where a share r of the best probability is the margin -log r.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle.errors import EagleError


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Which of a step's candidates are dropped; every rule that is set must keep one. Raises EagleError for bad values."""

    relative: float | None = None
    """r in (0, 1): drop candidates whose score s <= max s + log r."""
    absolute: float | None = None
    """a > 0: drop candidates whose score s <= max s - a."""
    local: float | None = None
    """r in (0, 1): drop candidates whose last token's log-probability w <= max w + log r. (A margin a is r = exp(-a).)"""

    def __post_init__(self) -> None:
        for name in ("relative", "local"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise EagleError(f"prune_{name} is {share!r}, expected a share of the best probability between 0 and 1")
        if self.absolute is not None and not self.absolute > 0:
            raise EagleError(f"prune_absolute is {self.absolute!r}, expected a margin of log scores above 0")

    def keeps(self, scores: Sequence[float], local_scores: Sequence[float | None]) -> list[bool]:
        """One answer per candidate. local_scores: None for those without a last token of this step (they are exempt)."""
        floor = max(scores, default=0.0) - min(_margin(self.relative), self.absolute or math.inf)
        local_floor = max((w for w in local_scores if w is not None), default=0.0) - _margin(self.local)
        return [s > floor and (w is None or w > local_floor) for s, w in zip(scores, local_scores, strict=True)]


def _margin(share: float | None) -> float:
    return math.inf if share is None else -math.log(share)
