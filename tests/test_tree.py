"""DraftTree and the choice of its nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.draft.tree import DraftTree, best_connected
from tests.kernels.test_tree_attention import random_parents


@pytest.mark.slow
@given(candidates=st.integers(1, 80), count=st.integers(1, 80), seed=st.integers(0, 10_000), ties=st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_chosen_node_lacks_its_parent_even_with_ties(candidates: int, count: int, seed: int, ties: bool) -> None:
    # Candidates are numbered parents first; a child's confidence is its parent's times a probability, often exactly 1.
    parents = [p - 1 for p in (random_parents(1, candidates + 1, seed)[0, 1:]).tolist()]  # -1: the root itself
    generator = torch.Generator().manual_seed(seed)
    scores: list[float] = []
    for parent in parents:
        log_q = (
            0.0
            if ties and torch.rand(1, generator=generator) < 0.7
            else float(torch.rand(1, generator=generator).log())
        )
        scores.append((scores[parent] if parent >= 0 else 0.0) + log_q)
    chosen = best_connected(torch.tensor([scores]), min(count, candidates))[0].tolist()
    assert chosen == sorted(set(chosen))
    assert all(parents[node] < 0 or parents[node] in chosen for node in chosen)
    left_out = [scores[i] for i in range(candidates) if i not in chosen]
    assert not left_out or max(left_out) <= min(scores[i] for i in chosen)


def test_a_tree_cut_at_a_depth_keeps_what_is_above() -> None:
    tree = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 1, 3]]))
    assert tree.depths_BN.tolist() == [[0, 1, 1, 2, 3]]
    assert tree.up_to_depth(1).tokens_BN.tolist() == [[5, 6, 7]]
    assert tree.up_to_depth(3) is tree
    assert DraftTree.roots(torch.tensor([3, 4])).ancestors_BNW.tolist() == [[[1]], [[1]]]
