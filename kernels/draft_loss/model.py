"""What draft_loss must move and multiply: the numerator of its rooflines, and the bytes that its programs ask for.

C positions of a chunk, D tokens, K of the top-k term (0: without it), H hidden.
"""

from eagle.kernels.roofline import Cost


def logits_cost(*, rows: int, tokens: int, element: int, top: int = 0) -> Cost:
    """The kernel, every byte once: both logits are read, the slopes and the losses written; the top ids are read."""
    return Cost(bytes=rows * (3 * tokens * element + 4 + (8 * top + 4 if top else 0)))


def logits_requested(*, rows: int, tokens: int, element: int, top: int = 0) -> int:
    """Bytes loaded and stored: both logits in each of two sweeps. The second finds a row in the L2 cache while the rows in
    flight fit into it: 2 * D * element bytes each."""
    return rows * (5 * tokens * element + 4 + (top * (8 + 3 * element) + 4 if top else 0))


def features_cost(*, positions: int, hidden: int, tokens: int, element: int, chunk: int) -> Cost:
    """Loss and gradient of features: three matrix products per chunk, each of which reads the head, and the logits of both
    and the slopes, which are written by one and read by the next."""
    chunks = -(-positions // chunk)
    head, features, logits = 3 * chunks * tokens * hidden, 3 * positions * hidden, 6 * positions * tokens
    return Cost(bytes=element * (head + features + logits), flops=3 * 2 * positions * hidden * tokens)
