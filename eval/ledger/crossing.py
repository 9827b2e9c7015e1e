"""Where a curve of speed-ups against batch size stands to 1, in words that claim no more than was measured."""

from collections.abc import Sequence

from eagle.eval.statistics import falls_through_one


def against_one(points: Sequence[tuple[float, float | None]]) -> str:
    """The end of a sentence about the curve, such as "falls through 1 at batch 2.7"; "" of one that was measured nowhere.

    points: (batch size, speed-up) by ascending size; None where it is not known: not measured there, or not exact.
    """
    known = [(batch, ratio) for batch, ratio in points if ratio is not None]
    below = [batch for batch, ratio in known if ratio < 1]
    unknown = [batch for batch, ratio in points if ratio is None]
    falls = falls_through_one(points)
    if not known:
        return ""
    if falls is not None:
        dips = [batch for batch in below if batch < falls]
        but = [f"is below it at batch {_listed(dips)} too"] if dips else []
        but += [f"is not known at batch {_listed(unknown)}"] if unknown else []
        return f"falls through 1 at batch {falls:.1f}" + (f" for good, but {' and '.join(but)}" if but else "")
    if unknown:
        return f"is not known at batch {_listed(unknown)}, so nothing can be said of where it crosses 1"
    if not below:
        return "stays at or above 1 at all of these batch sizes"
    if len(below) == len(known):
        return "stays below 1 at all of these batch sizes"
    above = [batch for batch, ratio in known if ratio >= 1]
    return f"rises through 1 or dips: it is below 1 at batch {_listed(below)}, not at batch {_listed(above)}"


def _listed(batches: Sequence[float]) -> str:
    return ", ".join(f"{batch:g}" for batch in batches)
