"""What verification must move. B rows, N nodes, R = B * N, V vocabulary."""

from eagle.kernels.roofline import Cost
from eagle.kernels.sample import model as sampling


def walk_cost(*, rows: int, nodes: int, visited: int, by_token: bool) -> Cost:
    """Every byte once: a tree's tokens and parents, the emitted tokens (and followers, unless children are found by their
    token) of the nodes that the walks visit, `visited` in all rows; paths, tokens, counts and flags are written."""
    return Cost(bytes=16 * rows * nodes + 8 * visited * (3 if by_token else 4) + 9 * rows)


def sweeps_cost(
    *, swept: int, sampled: int, accepted: int, accepted_sampled: int, vocab_size: int, element: int
) -> Cost:
    """The logits and the recorded q (float32) that the rejection rule looks at, once each.

    swept: nodes that do not accept their first child: all of their logits; sampled: those of them with a recorded q.
    accepted, accepted_sampled: nodes that do; they look at that child alone.
    """
    logits = (swept * vocab_size + accepted) * element
    return Cost(bytes=logits + 4 * (sampled * vocab_size + accepted_sampled))


def cost(*, rows: int, nodes: int, expanded: int, width: int, vocab_size: int, element: int) -> Cost:
    """Sampling, decisions and the walk, at most: the logits of all nodes and the recorded q of the expanded ones (0 for the
    coupled rule and for children chosen without chance) once, and walks of `width` nodes."""
    sampled = sampling.cost(rows=rows * nodes, vocab_size=vocab_size, element=element)
    walks = walk_cost(rows=rows, nodes=nodes, visited=rows * width, by_token=expanded == 0)
    return sampled + Cost(bytes=4 * rows * expanded * vocab_size) + walks
