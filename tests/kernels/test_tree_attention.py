"""Tree attention's reference: against attention computed path by path, where no mask is needed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.kernels.tree_attention.reference import masked_attention, own_bits, tree_mask, unpack_bits
from eagle.kernels.tree_build.reference import ancestry
from eagle.target.attention import TreeStep
from tests.exact import same


def random_parents(rows: int, nodes: int, seed: int) -> torch.Tensor:
    """Parents come first; node 0 is the root."""
    generator = torch.Generator().manual_seed(seed)
    parents = [
        [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)] for _ in range(rows)
    ]
    return torch.tensor(parents)


def path_to_root(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@given(nodes=st.integers(1, 130), rows=st.integers(1, 3), seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_ancestor_bits_name_exactly_the_path_to_the_root(nodes: int, rows: int, seed: int) -> None:
    parents_BN = random_parents(rows, nodes, seed)
    depths_BN, ancestors_BNW = ancestry(parents_BN)
    seen_BNN = unpack_bits(ancestors_BNW, nodes)
    for row in range(rows):
        for node in range(nodes):
            path = path_to_root(parents_BN[row].tolist(), node)
            assert seen_BNN[row, node].nonzero().flatten().tolist() == sorted(path)
            assert int(depths_BN[row, node]) == len(path) - 1


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_every_node_attends_as_if_its_path_were_the_whole_text(
    window: int | None, softcap: float | None, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(0)
    rows, nodes, d = 3, 9, 8
    lengths = [0, 3, 11]
    parents_BN = random_parents(rows, nodes, seed=5)
    depths_BN, ancestors_BNW = ancestry(parents_BN)
    slots = max(lengths) + nodes
    query = torch.randn(rows, heads, nodes, d)
    key, value = torch.randn(rows, kv_heads, slots, d), torch.randn(rows, kv_heads, slots, d)
    step = TreeStep(lengths_B=torch.tensor(lengths), depths_BN=depths_BN, ancestors_BNW=ancestors_BNW)
    got = step.attend(query, key, value, scaling=0.3, window=window, softcap=softcap)
    for row, length in enumerate(lengths):
        for node in range(nodes):
            path = path_to_root(parents_BN[row].tolist(), node)
            visible = list(range(length)) + [length + j for j in path]
            if window is not None:  # the path IS the text: the last `window` tokens of it
                visible = visible[-window:]
            k = key[row, :, visible].repeat_interleave(heads // kv_heads, dim=0)
            v = value[row, :, visible].repeat_interleave(heads // kv_heads, dim=0)
            scores = torch.einsum("hd,hsd->hs", query[row, :, node], k) * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            expected = torch.einsum("hs,hsd->hd", scores.softmax(-1), v)
            assert same(got[row, :, node], expected)


def test_a_causal_chunk_behind_a_prefix_is_a_chain() -> None:
    torch.manual_seed(0)
    length, nodes = 5, 70  # more than one 64-bit word
    step = TreeStep(lengths_B=torch.tensor([length]), depths_BN=torch.arange(nodes)[None], ancestors_BNW=None)
    q, k, v = torch.randn(1, 2, nodes, 4), torch.randn(1, 2, length + nodes, 4), torch.randn(1, 2, length + nodes, 4)
    mask = torch.ones(nodes, length + nodes).tril(length).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(step.attend(q, k, v, scaling=0.5), expected)


def test_garbage_in_unused_slots_changes_nothing() -> None:
    torch.manual_seed(0)
    lengths, nodes, slots = torch.tensor([2, 6]), 3, 9
    depths_BN, ancestors_BNW = ancestry(torch.tensor([[-1, 0, 0], [-1, 0, 1]]))
    q, k, v = torch.randn(2, 2, nodes, 4), torch.randn(2, 2, slots, 4), torch.randn(2, 2, slots, 4)
    step = TreeStep(lengths_B=lengths, depths_BN=depths_BN, ancestors_BNW=ancestors_BNW)
    before = step.attend(q, k, v, scaling=0.5)
    k[0, :, 5:], v[0, :, 5:] = 1e9, 1e9  # behind the short row's tree
    torch.testing.assert_close(step.attend(q, k, v, scaling=0.5), before)


def test_mask_marks_prefix_own_bits_and_nothing_else() -> None:
    mask = tree_mask(
        lengths_B=torch.tensor([2]),
        ancestors_BNW=own_bits(3, 1)[None],
        query_depths_BN=torch.zeros(1, 3, dtype=torch.int64),
        column_depths_BC=torch.zeros(1, 3, dtype=torch.int64),
        slots=6,
    )
    assert mask[0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0]]


def test_masked_attention_without_a_mask_sees_everything() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), scale=0.2
    )
    torch.testing.assert_close(masked_attention(q, k, v, bias_BgNS=None, scaling=0.2), expected)
