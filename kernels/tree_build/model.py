"""What tree build must read and write, and the bytes that its programs ask for. B rows, N nodes, W words of bits."""

from eagle.kernels.roofline import Cost


def cost(*, rows: int, nodes: int, links: bool = True) -> Cost:
    """Every byte once: parents are read, depths and bits written; with links also lengths, positions, children and siblings."""
    words = -(-nodes // 64)
    return Cost(bytes=8 * rows * (nodes * (2 + words) + (3 * nodes + 1 if links else 0)))


def requested(*, rows: int, nodes: int, total_depth: int, block: int, links: bool = True) -> int:
    """Bytes loaded and stored. total_depth: sum of the depths of all rows' nodes (a node at depth d asks for d + 1 parents on
    its way up). block: nodes of a program; for the links each program reads its row's parents and length."""
    words, programs = -(-nodes // 64), rows * -(-nodes // block)
    climbing = rows * nodes + total_depth
    plain = rows * nodes + climbing + rows * nodes * (1 + words)
    return 8 * (plain + (programs * (nodes + 1) + 3 * rows * nodes if links else 0))
