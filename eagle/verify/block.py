"""Block verification of a sampled chain (Sun et al. 2024, arXiv 2403.10444, algorithm 2): lossless in distribution.

The drafts are accepted as one block: a token that alone would be rejected may stand when those before it were likelier
under the target than under the draft. It accepts at least as much as Rejection does, token by token. V vocabulary.
"""

import torch

from eagle import decode_config
from eagle.decode_config import check_tree
from eagle.draft.tree import DraftTree
from eagle.verify.coupled import NodeView, Rule, Walk


class Block(decode_config.Block, Rule):
    """With weight w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the block's end is the last i whose coin accepts h_i:

    h_i = s_i / (s_i + 1 - w_i), s_i = sum_x max(0, w_i p(x | x_1..x_i) - q(x | x_1..x_i)); the last token's h is its w.
    Then a token from p (the whole chain was accepted) or from norm(max(0, w p - q)) at the block's end.

    A coin beyond the block's end is seen by the outcome too, so coins are counted from the ROOT's position, which no two
    cycles share, and the drafter's noise must be fresh in every cycle for the same reason.
    """

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        children, tokens = tree.children_of(row), tree.tokens_BN[row].tolist()
        if tree.nodes > 1:
            check_tree(self, children=tree.children, chain=all(len(siblings) <= 1 for siblings in children))
        path, drafted = [0], list[int]()
        while children[path[-1]]:
            path.append(children[path[-1]][0])
            drafted.append(tokens[path[-1]])
        weight, end = 1.0, 0
        target_V = view.probabilities(0, [])
        draft_V = self._draft(tree, row, path, 0, like_V=target_V)
        rest_V = target_V if draft_V is None else _rest(target_V, draft_V, weight)
        for i in range(1, len(path)):
            assert draft_V is not None
            token = drafted[i - 1]
            weight = min(1.0, weight * float(target_V[token]) / float(draft_V[token]))
            if weight == 0:
                break  # and so are all that follow
            if view.ends(drafted[:i]):  # the chain's last, whatever was drafted behind it
                if view.accepts(weight, [], i):
                    return Walk(path=path[: i + 1], tokens=drafted[:i], at_leaf=True)
                break
            target_V = view.probabilities(path[i], drafted[:i])
            draft_V = self._draft(tree, row, path, i, like_V=target_V)
            left_V = target_V if draft_V is None else _rest(target_V, draft_V, weight)
            if view.accepts(weight if draft_V is None else _chance(weight, float(left_V.sum())), [], i):
                end, rest_V = i, left_V if float(left_V.sum()) > 0 else target_V
        emitted = drafted[:end]
        final = view.draw(rest_V, emitted)
        return Walk(path=path[: end + 1], tokens=[*emitted, final], at_leaf=end == len(drafted))

    @staticmethod
    def _draft(tree: DraftTree, row: int, path: list[int], i: int, *, like_V: torch.Tensor) -> torch.Tensor | None:
        """What the i-th draft's successor was drawn from, on like_V's device; None: the chain ends there."""
        return tree.q_after(row, path[i]).to(like_V.device) if i < len(path) - 1 else None


def _rest(target_V: torch.Tensor, draft_V: torch.Tensor, weight: float) -> torch.Tensor:
    """max(0, w p - q), not normalised. float64 [V]."""
    return (weight * target_V - draft_V).clamp_min(0)


def _chance(weight: float, left: float) -> float:
    """h_i; weight 1 makes it 1 even where nothing is left (p = q)."""
    return 1.0 if weight == 1 else left / (left + 1 - weight)
