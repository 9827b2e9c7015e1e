"""What noise of whole rows must move: all of it is written."""

from eagle.kernels.roofline import Cost


def cost(*, rows: int, tokens: int) -> Cost:
    """float32 noise; seeds, positions and cycles are read. Bounded by arithmetic (Philox), which a roofline does not know."""
    return Cost(bytes=rows * (4 * tokens + 24))
