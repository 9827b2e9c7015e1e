"""Attention for CPUs: a node's result is right, and the same bits whatever stands beside it."""

import pytest
import torch

from eagle.kernels.tree_attention import steady
from eagle.kernels.tree_attention.reference import additive, masked_attention
from eagle.kernels.tree_attention.split_sum import edges_of
from eagle.kernels.tree_attention.steady import steady_attention

SHAPES = [(9, 3, 64), (8, 8, 32), (4, 2, 16), (16, 2, 128)]


@pytest.fixture(params=["narrow products", "split sums"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The products of the machine at hand, and those that stand in on others."""
    if request.param == "split sums":
        monkeypatch.setattr(steady, "narrow_rows", lambda: 0)
    elif steady.narrow_rows() == 0:
        pytest.skip("this machine's library adds no narrow product in order")
    return str(request.param)


def case(heads: int, kv_heads: int, head_dim: int, *, slots: int, nodes: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, 1, slots, kv_heads, head_dim, generator=generator).transpose(2, 3).unbind(0)
    mask_BNS = torch.rand(1, nodes, slots, generator=generator) < 0.7
    mask_BNS[..., : slots - nodes - 64] = True
    mask_BNS[..., 0] = True
    return {
        "query": torch.randn(1, heads, nodes, head_dim, generator=generator),
        "key": keys,
        "value": values,
        "mask": mask_BNS,
    }


def attend(one: dict[str, torch.Tensor], positions: list[int], softcap: float | None = None) -> torch.Tensor:
    bias_BNS = torch.zeros(one["mask"].shape).masked_fill_(~one["mask"], float("-inf"))
    return steady_attention(
        one["query"],
        one["key"],
        one["value"],
        bias_BNS=bias_BNS,
        positions_BN=torch.tensor(positions)[None].expand(len(one["query"]), -1),
        scaling=one["query"].shape[-1] ** -0.5,
        softcap=softcap,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_it_is_attention(shape: tuple[int, int, int], softcap: float | None) -> None:
    one = case(*shape, slots=320, nodes=23)
    exact = masked_attention(
        one["query"].double(),
        one["key"].double(),
        one["value"].double(),
        bias_BgNS=additive(one["mask"], groups=shape[0] // shape[1], dtype=torch.float64),
        scaling=shape[2] ** -0.5,
        softcap=softcap,
    )
    got = attend(one, [200, 300] * 11 + [200], softcap)
    assert (got - exact).abs().max() < 2e-6, "a sum of 320 terms of size 1 in float32"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_node_has_the_same_bits_alone_and_among_others(shape: tuple[int, int, int]) -> None:
    one, positions = case(*shape, slots=320, nodes=60), [200, 300] * 30
    whole = attend(one, positions)
    for chosen in ([0], [7], [59], [0, 1], [3, 40, 41, 58], list(range(17))):
        some = {**one, "query": one["query"][:, :, chosen], "mask": one["mask"][:, chosen]}
        assert torch.equal(attend(some, [positions[i] for i in chosen]), whole[:, :, chosen]), chosen


@pytest.mark.parametrize("shape", SHAPES)
def test_slots_that_a_node_does_not_see_change_no_bit(shape: tuple[int, int, int]) -> None:
    """Its path lies together once it is committed, and among other nodes in a tree."""
    one = case(*shape, slots=384, nodes=1)
    together = {name: tensor.clone() for name, tensor in one.items()}
    seen = one["mask"][0, 0].nonzero().flatten()
    behind = seen[seen >= 128]
    for name in ("key", "value"):
        moved = one[name].transpose(1, 2).clone()
        moved[:, 128 : 128 + len(behind)] = one[name].transpose(1, 2)[:, behind]
        together[name] = moved.transpose(1, 2)
    together["mask"] = torch.arange(384)[None, None] < 128 + len(behind)
    one["mask"][..., :128] = True
    assert torch.equal(attend(together, [300]), attend(one, [300]))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_batch_do_not_change_one_another(shape: tuple[int, int, int]) -> None:
    cases = [case(*shape, slots=320, nodes=nodes, seed=seed) for seed, nodes in enumerate([5, 5, 5])]
    batch = {name: torch.cat([one[name] for one in cases]) for name in cases[0]}
    whole = attend(batch, [200, 300, 310, 200, 290])
    for b, one in enumerate(cases):
        assert torch.equal(attend(one, [200, 300, 310, 200, 290]), whole[b : b + 1])


def test_the_border_of_the_two_sums_lies_in_what_every_tree_has_committed() -> None:
    positions = torch.arange(2000)
    edges = edges_of(positions[None], kv_heads=1)[0]
    assert ((edges == 0) | ((positions - 128 - 127 <= edges) & (edges <= positions - 128))).all()
