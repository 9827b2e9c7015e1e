"""DraftTree: the tokens a target verifies in one forward, and how they hang together.

B rows, N nodes, W = ceil(N / 64), E nodes whose q is recorded, V vocabulary. Node 0 is the root: the last
committed token. Parents come before their children.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from eagle.decode_config import Children
from eagle.kernels.placement import sent
from eagle.kernels.tree_build.op import ancestry


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One tree per row, stacked. Its tensors lie together: where the draft's logits do, so that growing it asks a device for
    nothing, or on the CPU (tokens that come from the host)."""

    tokens_BN: torch.Tensor
    """int64 token ids."""
    parents_BN: torch.Tensor
    """int64 index of the parent node; -1 for the root."""
    depths_BN: torch.Tensor
    """int64 distance from the root; a node's position is L_b + depth."""
    log_confidence_BN: torch.Tensor
    """float32 log of the product of draft probabilities along the path; 0 for the root."""
    ancestors_BNW: torch.Tensor
    """int64 bits: bit j of row i says that node j is i or an ancestor of i."""
    children: Children = "top"
    """How the children were chosen."""
    log_q_BEV: torch.Tensor | None = None
    """float32, on the draft's device; sampled trees: the log-probabilities that an expanded node's children were drawn from
    (-inf: never drawn; such a child is a filler, there because q had fewer tokens than children were wanted)."""
    q_row_BN: torch.Tensor | None = None
    """int64; sampled trees: a node's place in log_q_BEV; -1 for a node that was not expanded."""
    widest: int | None = None
    """Children of one node at most, where the host knows it without reading the tree."""

    @property
    def nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @classmethod
    def from_parents(
        cls,
        tokens_BN: torch.Tensor,
        parents_BN: torch.Tensor,
        log_confidence_BN: torch.Tensor | None = None,
        *,
        children: Children = "top",
        log_q_BEV: torch.Tensor | None = None,
        q_row_BN: torch.Tensor | None = None,
        widest: int | None = None,
        ends_BN: torch.Tensor | None = None,
    ) -> "DraftTree":
        """Derives depths and ancestor bits. Parents must come before their children.

        ends_BN: bool; nodes that end their row, and so have no children: what was drafted behind them goes, or, on a device
        that would have to be asked how much that is, stays as padding: roots of their own, which no walk gets to.
        """
        assert (children == "sampled") == (log_q_BEV is not None) == (q_row_BN is not None)
        if ends_BN is not None:
            cut_BN = ends_BN.gather(1, parents_BN.clamp_min(0)) & (parents_BN >= 0)
            parents_BN = parents_BN.masked_fill(cut_BN, -1)
        depths_BN, ancestors_BNW = ancestry(parents_BN)
        if log_confidence_BN is None:
            log_confidence_BN = torch.zeros(tokens_BN.shape, device=tokens_BN.device)
        tree = cls(
            tokens_BN=tokens_BN,
            parents_BN=parents_BN,
            depths_BN=depths_BN,
            log_confidence_BN=log_confidence_BN,
            ancestors_BNW=ancestors_BNW,
            children=children,
            log_q_BEV=log_q_BEV,
            q_row_BN=q_row_BN,
            widest=widest,
        )
        return tree if ends_BN is None else tree._marked()._compacted()

    @property
    def below_root(self) -> torch.Tensor:
        """bool [B, N]: what hangs on the root; the rest is padding."""
        return (self.ancestors_BNW[..., 0] & 1).bool()

    def _marked(self) -> "DraftTree":
        """The tree with confidence 0 in what does not hang on the root."""
        log_confidence_BN = self.log_confidence_BN.masked_fill(~self.below_root, float("-inf"))
        return dataclasses.replace(self, log_confidence_BN=log_confidence_BN)

    def _compacted(self) -> "DraftTree":
        """The tree without what does not hang on the root, as far as all rows have such; on a device as it is."""
        below_BN = self.below_root
        if below_BN.device.type != "cpu" or bool(below_BN.all()):
            return self
        count = int(below_BN.sum(dim=1).max())
        order_BN = (~below_BN).sort(dim=1, stable=True).indices[:, :count]
        place_BN = torch.zeros_like(self.parents_BN).scatter(1, order_BN, torch.arange(count).expand(len(order_BN), -1))
        parents_BN = self.parents_BN.gather(1, order_BN)
        hangs_BN = below_BN.gather(1, order_BN) & (parents_BN >= 0)
        return DraftTree.from_parents(
            self.tokens_BN.gather(1, order_BN),
            torch.where(hangs_BN, place_BN.gather(1, parents_BN.clamp_min(0)), -1),
            self.log_confidence_BN.gather(1, order_BN),
            children=self.children,
            log_q_BEV=self.log_q_BEV,
            q_row_BN=None if self.q_row_BN is None else self.q_row_BN.gather(1, order_BN),
            widest=self.widest,
        )

    def on(self, device: torch.device | str) -> "DraftTree":
        """The tree with its tensors (log_q_BEV included) on a device."""
        if all(one.device == torch.device(device) for one in (self.tokens_BN, self.log_q_BEV) if one is not None):
            return self
        moved: dict[str, Any] = {
            name: sent(one, device) for name, one in vars(self).items() if isinstance(one, torch.Tensor)
        }
        return dataclasses.replace(self, **moved)

    @property
    def most_children(self) -> int:
        """Children of one node, at most."""
        if self.widest is not None:
            return min(self.widest, self.nodes - 1)
        return int(torch.nn.functional.one_hot(self.parents_BN + 1, self.nodes + 1)[..., 1:].sum(1).max())

    def up_to_depth(self, depth: int) -> "DraftTree":
        """The tree without the nodes below `depth`; nodes must be ordered by depth, padding aside, as drafters make them.
        Reads the tree where it has enough nodes to be deeper.

        Where the rows' trees differ in shape, all keep as many nodes as the one with the fewest down there. Of trees of one
        shape whole levels go, whatever was drawn: a sampled tree remains one.
        """
        if depth >= self.nodes - 1:
            return self
        deeper_BN = self.depths_BN > depth
        if not bool(deeper_BN.any()):
            return self
        count = int((deeper_BN.int().cumsum(dim=1) == 0).sum(dim=1).min())
        return DraftTree.from_parents(
            self.tokens_BN[:, :count],
            self.parents_BN[:, :count],
            self.log_confidence_BN[:, :count],
            children=self.children,
            log_q_BEV=self.log_q_BEV,
            q_row_BN=None if self.q_row_BN is None else self.q_row_BN[:, :count],
            widest=self.widest,
        )

    def children_of(self, row: int) -> list[list[int]]:
        """The children of every node of a row, ascending (of a sampled tree: in the order they were drawn)."""
        children: list[list[int]] = [[] for _ in range(self.nodes)]
        for node, parent in enumerate(self.parents_BN[row].tolist()):
            if parent >= 0:
                children[parent].append(node)
        return children

    def q_after(self, row: int, node: int) -> torch.Tensor:
        """float64 [V]: what the children of an expanded node of a sampled tree were drawn from."""
        assert self.log_q_BEV is not None
        assert self.q_row_BN is not None
        place = int(self.q_row_BN[row, node])
        assert place >= 0, f"node {node} has children and no recorded q"
        return self.log_q_BEV[row, place].double().softmax(-1)

    @classmethod
    def roots(cls, tokens_B: torch.Tensor) -> "DraftTree":
        """Trees of one node: verifying them is plain decoding."""
        return cls.from_parents(tokens_B[:, None], torch.full_like(tokens_B, -1)[:, None], widest=0)


def best_connected(log_confidence_BM: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most confident of M candidates, as ascending indices int64 [B, count].

    Candidates are listed parents first and a child is never more confident than its parent. A stable sort resolves ties
    in favour of the earlier one, so the choice never holds a child without its parent, even where a draft probability
    of exactly 1 makes them equal.
    """
    order_BM = log_confidence_BM.sort(dim=1, descending=True, stable=True).indices
    return order_BM[:, :count].sort(dim=1).values
