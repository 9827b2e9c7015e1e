"""Verifier: a batch's trees against the target, by kernels for all rows at once, or by the rule, row by row on the host.

B rows, N tree nodes, H hidden, V vocabulary, K nodes of the longest path.

On the device: the LM head on every node, `sample` (and for rejection `decide`), `walk`, and one read of the result block:
which nodes and tokens of each row were accepted. That read is the only moment at which a cycle waits for the device; the
stop conditions, the caches' lengths and the streamer need what it says. (A draft that stops early, level_cost above
0, reads one number a level more.)
On the host: what kernels cannot express, and everything where they do not run, as on CPUs (eagle/kernels/dispatch.py): the
walk asks for a few nodes' logits only, which is quick there.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from eagle.decode_config import check_tree
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.kernels.dispatch import chosen, count
from eagle.kernels.placement import sent
from eagle.kernels.sample.op import DTYPES, sample
from eagle.kernels.sample.op import NAME as SAMPLE
from eagle.kernels.sample.reference import NOTHING
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.verify.op import LARGEST_TREE, coupled_walk, rejection_walk
from eagle.kernels.verify.op import NAME as VERIFY
from eagle.kernels.verify.reference import Tree, Walks
from eagle.sample.row import Row
from eagle.sample.sampling import row_settings
from eagle.target.target import Target
from eagle.verify.coupled import Coupled, Rule, Walk
from eagle.verify.node_view import Clock, views
from eagle.verify.rejection import Rejection

MOST_LOGITS = 2**27
"""Logits held at a time on the device's path, at most (one row's tree always); 256 MB in 16 bits."""

NO_DRAFT = -2
"""In place of a walk's first token: the row's tree has a confidence of nan."""


class Verifier:
    """Verifies the trees of `rows` (the batch, in its order) with a rule.

    Raises EagleError, with the reason, when kernels were asked for explicitly and cannot do it.
    """

    def __init__(self, rule: Rule, target: Target, rows: Sequence[Row]):
        self.rule, self.target, self.rows = rule, target, list(rows)
        for row in self.rows:
            row.sampler.looks_ahead = rule.looks_ahead
        self._refusal = why_not_sampled(target, self.rows)
        self._settings: RowSettings | None = None
        chosen(SAMPLE, self._device, refusal=self._refusal)

    def first(self, features_BH: torch.Tensor) -> list[int]:
        """The token that plain sampling emits after each row. features_BH: the target's, at the rows' last tokens."""
        if chosen(SAMPLE, self._device, refusal=self._refusal) == "triton":
            positions_B = torch.tensor([len(row.tokens) for row in self.rows])
            tokens_B = sample(
                self.target.logits(features_BH),
                positions_R=sent(positions_B, self._device),
                settings=self._device_settings(),
            )
            tokens = [int(token) for token in tokens_B.tolist()]
            return [
                self._chosen_on_host(b, features_BH[b], []) if token == NOTHING else token
                for b, token in enumerate(tokens)
            ]
        count(SAMPLE, "reference")
        roots = DraftTree.roots(torch.tensor([row.tokens[-1] for row in self.rows]))
        return [view.choose(0, []) for view in views(self.rows, self.target, roots, features_BH[:, None])]

    def walks(self, tree: DraftTree, features_BNH: torch.Tensor, clock: Clock = nullcontext) -> list[Walk]:
        """What each row's verification accepts. features_BNH: the target's at the nodes. clock: for the LM head's time."""
        if chosen(VERIFY, self._device, refusal=self._refusal or why_not_walked(self.rule, tree)) == "triton":
            walks = unpacked(self._block(tree.on(self._device), features_BNH, clock))
            return [self._checked(b, walk, tree, features_BNH) for b, walk in enumerate(walks)]
        for kernel in (SAMPLE, VERIFY):
            count(kernel, "reference")
        tree = tree.on("cpu")
        for b in tree.log_confidence_BN.isnan().any(dim=1).nonzero().flatten().tolist():
            self._refuse_draft(b, tree)
        return [
            self.rule.walk(tree, b, view)
            for b, view in enumerate(views(self.rows, self.target, tree, features_BNH, clock))
        ]

    def _checked(self, b: int, walk: Walk, tree: DraftTree, features_BNH: torch.Tensor) -> Walk:
        """Raises EagleError where the kernels found nothing to choose from, unless the row stops before that."""
        if walk.tokens[0] == NO_DRAFT:
            self._refuse_draft(b, tree.on("cpu"))
        if walk.tokens[-1] != NOTHING:
            return walk
        emitted = walk.tokens[:-1]
        token = 0 if self.rows[b].stops(emitted) else self._chosen_on_host(b, features_BNH[b, walk.path[-1]], emitted)
        return replace(walk, tokens=[*emitted, token])

    def _chosen_on_host(self, b: int, features_H: torch.Tensor, emitted: list[int]) -> int:
        """Chooses again what the kernels could not, for the host's error."""
        row = self.rows[b]
        processed_V = row.sampler.processed(self.target.logits(features_H), row.tokens, emitted)
        return row.sampler.choose(processed_V, len(row.tokens) + len(emitted))

    def _refuse_draft(self, b: int, tree: DraftTree) -> None:
        """Raises EagleError for a tree that has a confidence of nan."""
        node = int(tree.log_confidence_BN[b].isnan().nonzero()[0])
        step = len(self.rows[b].new_tokens) + int(tree.depths_BN[b, node])
        token = int(tree.tokens_BN[b, int(tree.parents_BN[b, node])])
        raise EagleError(
            f"step {step}: the drafter's logits after token {token} hold nan or inf (or are all -inf), so that no child can be "
            "chosen; its weights are damaged or overflow: load it in another dtype, mend it, or decode without it"
        )

    def _block(self, tree: DraftTree, features_BNH: torch.Tensor, clock: Clock) -> torch.Tensor:
        """See `packed`. As many rows at a time as their logits find room."""
        if tree.nodes > 1:
            check_tree(self.rule, children=tree.children, chain=False)
        rows, nodes = tree.tokens_BN.shape
        lengths_B = sent(torch.tensor([len(row.tokens) for row in self.rows]), self._device)
        positions_BN = lengths_B[:, None] + tree.depths_BN
        each = max(1, MOST_LOGITS // (nodes * self.target.vocab_size))
        blocks = []
        for first in range(0, rows, each):
            end = min(first + each, rows)
            with clock():
                logits_BNV = self.target.logits(features_BNH[first:end])
            walks = self._kernels(logits_BNV, tree, positions_BN, first, end)
            no_draft_B = tree.log_confidence_BN[first:end].isnan().any(dim=1)
            walks.tokens_BK[:, 0].masked_fill_(no_draft_B, NO_DRAFT)
            blocks.append(packed(walks))
        return torch.cat(blocks) if len(blocks) > 1 else blocks[0]

    def _kernels(
        self, logits_BNV: torch.Tensor, tree: DraftTree, positions_BN: torch.Tensor, first: int, end: int
    ) -> Walks:
        """Walks of the rows first .. end - 1."""
        settings = self._device_settings().part(first, end)
        tokens_BN, parents_BN = tree.tokens_BN[first:end], tree.parents_BN[first:end]
        positions_BN = positions_BN[first:end]
        if isinstance(self.rule, Coupled):
            return coupled_walk(
                logits_BNV,
                tree=Tree(tokens_BN, parents_BN),
                positions_BN=positions_BN,
                settings=settings,
                width=tree.nodes,
            )
        drawn = None if tree.log_q_BEV is None else tree.log_q_BEV[first:end]
        places = None if tree.q_row_BN is None else tree.q_row_BN[first:end]
        return rejection_walk(
            logits_BNV,
            tree=Tree(tokens_BN, parents_BN, drawn, places),
            positions_BN=positions_BN,
            settings=settings,
            most_children=tree.most_children,
            width=tree.nodes,
        )

    @property
    def _device(self) -> torch.device:
        """The logits'."""
        return self.target.tokens.lm_head_VH.device

    def _device_settings(self) -> RowSettings:
        """Made once: they come from the host."""
        if self._settings is None:
            self._settings = row_settings([row.sampler.sampling for row in self.rows], self._device)
        return self._settings


def why_not_sampled(target: Target, rows: Sequence[Row]) -> str | None:
    """Why kernels cannot choose these rows' tokens; None when they can."""
    for row in rows:
        if row.sampler.processors:
            names = ", ".join(type(processor).__name__ for processor in row.sampler.processors)
            return f"logits processors ({names}) read every node's own prefix on the host"
        if row.keeps_scores:
            return "output_scores wants the scores of every emitted token on the host"
    dtype = target.tokens.lm_head_VH.dtype
    return None if dtype in DTYPES else f"logits are {dtype}, not fp16, bf16 or fp32"


def why_not_walked(rule: Rule, tree: DraftTree) -> str | None:
    """Why the kernels cannot verify this tree with this rule; None when they can."""
    too_large = f"{tree.nodes} nodes are more than {LARGEST_TREE}" if tree.nodes > LARGEST_TREE else None
    return why_not_rule(rule) or too_large


def why_not_rule(rule: Rule) -> str | None:
    """Why there is no kernel for the rule; None when there is one."""
    return None if type(rule) in (Coupled, Rejection) else f'the rule "{rule.name}" runs on the host only'


def packed(walks: Walks) -> torch.Tensor:
    """int64 [B, 2K + 2]: nodes, tokens, their number, whether it ends at a leaf: one tensor, so that one read suffices."""
    return torch.cat([walks.path_BK, walks.tokens_BK, walks.counts_B[:, None], walks.at_leaf_B[:, None].long()], dim=1)


def unpacked(block_BX: torch.Tensor) -> list[Walk]:
    """Reads the block: the host waits here for the device, once a cycle."""
    width = block_BX.shape[1] // 2 - 1
    return [
        Walk(path=row[: row[-2]], tokens=row[width : width + row[-2]], at_leaf=bool(row[-1]))
        for row in block_BX.tolist()
    ]
