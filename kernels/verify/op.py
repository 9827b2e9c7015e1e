"""Verification of draft trees on the logits' device: checks, choice of implementation, call. Nothing waits for the device.

B rows, N nodes, V vocabulary, E nodes whose q is recorded, K the most nodes of a path (`width`): depth + 1. A walk that
would be longer ends there, with the right tokens.
"""

import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.sample.op import check_rows, sample, sample_and_describe, why_not_triton
from eagle.kernels.sample.reference import Choice
from eagle.kernels.sample.settings import RowSettings
from eagle.kernels.verify.reference import Decisions, Tree, Walks, decide_reference, walk_reference

NAME = "verify"
LARGEST_TREE = 256


def coupled_walk(
    logits_BNV: torch.Tensor,
    *,
    tree: Tree,
    positions_BN: torch.Tensor,
    settings: RowSettings,
    width: int,
    backend: Backend | None = None,
) -> Walks:
    """The coupled rule (greedy rows too): emit what plain sampling emits at every node, and follow it down the tree.

    logits_BNV: the target's at every node, processors applied; see sample.op. positions_BN: int64 index, in the unpadded
    row, of the token that each node emits. Raises EagleError on shapes that do not belong together and when "triton" was
    asked for and cannot run.
    """
    logits_RV, positions_R = _flat(logits_BNV, positions_BN, tree)
    emitted_R = sample(logits_RV, positions_R=positions_R, settings=settings, backend=backend)
    return walk(tree=tree, emitted_BN=emitted_R.view(positions_BN.shape), width=width, backend=backend)


def rejection_walk(
    logits_BNV: torch.Tensor,
    *,
    tree: Tree,
    positions_BN: torch.Tensor,
    settings: RowSettings,
    most_children: int,
    width: int,
    backend: Backend | None = None,
) -> Walks:
    """The rejection rule: chains and trees whose children were drawn without replacement (the tree has log_q), or chosen
    without chance. most_children: of any node. Otherwise as `coupled_walk`."""
    logits_RV, positions_R = _flat(logits_BNV, positions_BN, tree)
    choice = sample_and_describe(logits_RV, positions_R=positions_R, settings=settings, backend=backend)
    decisions = decide(
        logits_RV,
        tree=tree,
        choice=choice,
        positions_R=positions_R,
        settings=settings,
        most_children=most_children,
        backend=backend,
    )
    return walk(
        tree=tree,
        emitted_BN=decisions.emitted_BN,
        followers_BN=decisions.followers_BN,
        width=width,
        backend=backend,
    )


def walk(
    *,
    tree: Tree,
    emitted_BN: torch.Tensor,
    followers_BN: torch.Tensor | None = None,
    width: int,
    backend: Backend | None = None,
) -> Walks:
    """From the root to each node's follower, as far as there is one.

    emitted_BN: int64, the token of each node. followers_BN: int64 child, -1: none; None: the child whose token the node
    emitted.
    """
    shape = tuple(tree.tokens_BN.shape)
    for name, one in (("parents", tree.parents_BN), ("emitted tokens", emitted_BN), ("followers", followers_BN)):
        if one is not None and (tuple(one.shape) != shape or one.dtype != torch.int64):
            raise EagleError(f"{NAME}: {name} are {one.dtype} {tuple(one.shape)}, the tree wants int64 {shape}")
    if width < 1:
        raise EagleError(f"{NAME}: width is {width}, expected 1 (the root alone) or more")
    refusal = None if shape[1] <= LARGEST_TREE else f"{shape[1]} nodes are more than {LARGEST_TREE}"
    if choose(NAME, emitted_BN.device, backend=backend, refusal=refusal) == "triton" and shape[0]:
        from eagle.kernels.verify.triton import launch_walk

        with on(emitted_BN.device):
            return launch_walk(
                tree=_contiguous(tree),
                emitted_BN=emitted_BN.contiguous(),
                followers_BN=None if followers_BN is None else followers_BN.contiguous(),
                width=width,
            )
    return walk_reference(tree=tree, emitted_BN=emitted_BN, followers_BN=followers_BN, width=width)


def decide(
    logits_RV: torch.Tensor,
    *,
    tree: Tree,
    choice: Choice,
    positions_R: torch.Tensor,
    settings: RowSettings,
    most_children: int,
    backend: Backend | None = None,
) -> Decisions:
    """The rejection rule at every node, R = B * N of them. choice: `sample_and_describe`'s of the same logits."""
    rows = check_rows(NAME, logits_RV, positions_R, settings)
    batch, nodes = tree.tokens_BN.shape
    if rows != batch * nodes or settings.rows != batch:
        raise EagleError(
            f"{NAME}: {rows} rows of logits and {settings.rows} of settings for {batch} trees of {nodes} nodes; expected "
            f"{batch * nodes} and {batch}"
        )
    if (tree.log_q_BEV is None) != (tree.q_row_BN is None):
        raise EagleError(f"{NAME}: log_q and q_row belong together: give both (sampled children) or neither")
    if tree.log_q_BEV is not None and tree.log_q_BEV.shape[2] != logits_RV.shape[1]:
        raise EagleError(
            f"{NAME}: log_q is over {tree.log_q_BEV.shape[2]} tokens, the logits over {logits_RV.shape[1]}; expected the same"
        )
    refusal = why_not_triton(logits_RV)
    if nodes > LARGEST_TREE:
        refusal = f"{nodes} nodes are more than {LARGEST_TREE}"
    if choose(NAME, logits_RV.device, backend=backend, refusal=refusal) == "triton" and rows:
        from eagle.kernels.verify.triton import launch_decide

        with on(logits_RV.device):
            return launch_decide(
                logits_RV,
                tree=_contiguous(tree),
                choice=choice,
                positions_R=positions_R.contiguous(),
                settings=settings,
                most_children=most_children,
            )
    return decide_reference(logits_RV, tree=tree, choice=choice, positions_R=positions_R, settings=settings)


def _flat(logits_BNV: torch.Tensor, positions_BN: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_BNV.ndim != 3 or not logits_BNV.shape[:2] == positions_BN.shape == tree.tokens_BN.shape:
        raise EagleError(
            f"{NAME}: logits {tuple(logits_BNV.shape)}, positions {tuple(positions_BN.shape)} and tree "
            f"{tuple(tree.tokens_BN.shape)} do not belong together; expected [B, N, V], [B, N] and [B, N]"
        )
    return logits_BNV.flatten(0, 1), positions_BN.flatten()


def _contiguous(tree: Tree) -> Tree:
    return Tree(
        tokens_BN=tree.tokens_BN.contiguous(),
        parents_BN=tree.parents_BN.contiguous(),
        log_q_BEV=None if tree.log_q_BEV is None else tree.log_q_BEV.contiguous(),
        q_row_BN=None if tree.q_row_BN is None else tree.q_row_BN.contiguous(),
    )
