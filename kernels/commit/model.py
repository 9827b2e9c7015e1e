"""What commit must move: the numerator of its roofline, and the bytes that its programs ask for."""

from eagle.kernels.roofline import Cost


def cost(*, buffers: int, rows: int, kv_heads: int, accepted: int, moved: int, head_dim: int, element: int) -> Cost:
    """Every byte once. buffers: keys and values of all layers. accepted: nodes of a row's path; moved: those of them that do not
    lie where they must already, each read and written. Besides: the path, its counts, the lengths, the buffers' addresses."""
    small = 8 * (buffers + rows * (accepted + 2))
    return Cost(bytes=_data(buffers, rows, kv_heads, moved, head_dim, element) + small)


def requested(*, buffers: int, rows: int, kv_heads: int, accepted: int, moved: int, head_dim: int, element: int) -> int:
    """Bytes loaded and stored: every program (buffer, row, head) reads its row's path anew, from the L2 cache but for the
    first."""
    small = 8 * buffers * rows * kv_heads * (accepted + 3)
    return _data(buffers, rows, kv_heads, moved, head_dim, element) + small


def _data(buffers: int, rows: int, kv_heads: int, moved: int, head_dim: int, element: int) -> int:
    return 2 * buffers * rows * kv_heads * moved * head_dim * element
