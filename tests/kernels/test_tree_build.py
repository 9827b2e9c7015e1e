"""A tree's links in Triton's interpreter against links read off the tree by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, record
from eagle.kernels.tree_attention.reference import unpack_bits
from eagle.kernels.tree_build.op import ancestry, tree_links

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@st.composite
def parents(draw: st.DrawFn) -> list[list[int]]:
    """Rows of trees; a node without a parent (a filler) is possible anywhere."""
    nodes, rows = draw(st.sampled_from([1, 2, 7, 33, 66])), draw(st.integers(1, 2))
    reach = draw(st.integers(1, 9))
    return [[-1, *(draw(st.integers(max(-1, i - reach), i - 1)) for i in range(1, nodes))] for _ in range(rows)]


@pytest.mark.slow
@given(rows=parents(), backend=st.sampled_from(["triton", "reference"]))
@settings(max_examples=12, deadline=None)
def test_links_are_those_read_off_the_tree(rows: list[list[int]], backend: Backend) -> None:
    lengths_B = torch.arange(len(rows), device=DEVICE) * 100
    links = tree_links(torch.tensor(rows, device=DEVICE), lengths_B, backend=backend)
    depths_BN, ancestors_BNW = ancestry(torch.tensor(rows, device=DEVICE), backend=backend)
    assert torch.equal(depths_BN, links.depths_BN)
    assert torch.equal(ancestors_BNW, links.ancestors_BNW)
    seen_BNN = unpack_bits(links.ancestors_BNW, len(rows[0]))
    for b, tree in enumerate(rows):
        for node, parent in enumerate(tree):
            path = [node]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            assert seen_BNN[b, node].nonzero().flatten().tolist() == sorted(path)
            assert links.depths_BN[b, node] == len(path) - 1
            assert links.positions_BN[b, node] == 100 * b + len(path) - 1
            children = [j for j, above in enumerate(tree) if above == node]
            assert links.first_child_BN[b, node] == (children[0] if children else -1)
            later = [j for j in range(node + 1, len(tree)) if tree[j] == parent and parent >= 0]
            assert links.next_sibling_BN[b, node] == (later[0] if later else -1)


@pytest.mark.slow
def test_a_chain_of_130_nodes_and_a_star() -> None:
    """The deepest and the widest tree; bit 63 of a word is the sign of an int64."""
    chain, star = list(range(-1, 129)), [-1] + [0] * 129
    with record() as calls:
        got = tree_links(
            torch.tensor([chain, star], device=DEVICE), torch.tensor([3, 4], device=DEVICE), backend="triton"
        )
    assert calls == {("tree_build", "triton"): 1}
    wanted = tree_links(
        torch.tensor([chain, star], device=DEVICE), torch.tensor([3, 4], device=DEVICE), backend="reference"
    )
    for name, tensor in vars(wanted).items():
        assert torch.equal(getattr(got, name), tensor), name
    assert got.depths_BN[0].tolist() == list(range(130))
    assert got.next_sibling_BN[1, 1:].tolist() == [*range(2, 130), -1]


def test_other_types_are_refused() -> None:
    with pytest.raises(EagleError, match="int64 \\[B, N\\]"):
        tree_links(torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
