"""What tree attention must move and multiply: the numerator of its roofline."""

from eagle.kernels.roofline import Cost


def cost(
    *, rows: int, heads: int, kv_heads: int, nodes: int, length: int, head_dim: int, element: int, splits: int = 1
) -> Cost:
    """One layer, `rows` rows with prefixes of `length` (under a sliding window: what it leaves of them).

    element: bytes per element. Keys and values of prefix and tree are read once, queries read, results written; partial
    results, with more than one split, are written and read as float32 with their log-sum-exps.
    """
    cache = 2 * rows * kv_heads * (length + nodes) * head_dim * element
    queries_and_results = 2 * rows * nodes * heads * head_dim * element
    partial = 2 * splits * rows * nodes * heads * (head_dim + 1) * 4 if splits > 1 else 0
    return Cost(
        bytes=cache + queries_and_results + partial, flops=4 * rows * heads * nodes * (length + nodes) * head_dim
    )
