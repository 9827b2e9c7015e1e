"""Commit in Triton (interpreted without a GPU) against its reference: accepted rows of all layers, in place, in one launch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import EagleError
from eagle.kernels.commit.op import commit, move_slots
from eagle.kernels.commit.reference import slots_of_path
from eagle.kernels.dispatch import record

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def buffers(*, count: int, rows: int, heads: int, slots: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every element is a number of its own, so that a row that went astray shows."""
    size = rows * heads * slots * dim
    return [
        (torch.arange(size) + size * i).to(torch.float64).to(dtype).reshape(rows, heads, slots, dim).to(DEVICE)
        for i in range(count)
    ]


def kept_by_hand(
    before: torch.Tensor, path_BK: torch.Tensor, counts_B: torch.Tensor, lengths_B: torch.Tensor
) -> torch.Tensor:
    after = before.clone()
    for b, (length, count) in enumerate(zip(lengths_B.tolist(), counts_B.tolist())):
        for i, node in enumerate(path_BK[b, :count].tolist()):
            after[b, :, length + i] = before[b, :, length + node]
    return after


paths = st.lists(st.lists(st.integers(0, 39), max_size=20, unique=True).map(sorted), min_size=1, max_size=3)


@given(paths=paths, seed=st.integers(0, 99), backend=st.sampled_from(["triton", "reference"]))
@settings(max_examples=25, deadline=None)
def test_accepted_nodes_move_and_nothing_else_does(paths: list[list[int]], seed: int, backend: str) -> None:
    """Paths longer than a chunk and overlapping ones included."""
    rows, longest = len(paths), max(1, max(map(len, paths)))
    path_BK = torch.full((rows, longest), 10**6, device=DEVICE)  # what lies behind a path may be anything
    for b, path in enumerate(paths):
        path_BK[b, : len(path)] = torch.tensor(path, dtype=torch.int64)
    counts_B = torch.tensor([len(path) for path in paths], device=DEVICE)
    lengths_B = torch.randint(0, 9, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    layers = buffers(count=2, rows=rows, heads=1, slots=50, dim=6, dtype=torch.float32)
    expected = [kept_by_hand(layer, path_BK, counts_B, lengths_B) for layer in layers]
    commit(layers, path_BK=path_BK, counts_B=counts_B, lengths_B=lengths_B, backend=backend)  # type: ignore[arg-type]
    for layer, wanted in zip(layers, expected):
        assert torch.equal(layer, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [1, 5, 80])  # words of 1 element to 8 bytes
def test_views_of_larger_buffers_of_every_type(dtype: torch.dtype, dim: int) -> None:
    whole = [torch.randn(3, 2, 40, dim).to(DEVICE, dtype) for _ in range(4)]
    views = [one[:2, :, :33] for one in whole]
    path_BK = torch.tensor([[0, 2, 5], [1, 3, 4]], device=DEVICE)
    counts_B, lengths_B = torch.tensor([3, 2], device=DEVICE), torch.tensor([7, 0], device=DEVICE)
    expected = [torch.cat([kept_by_hand(one[:2], path_BK, counts_B, lengths_B), one[2:]]) for one in whole]
    with record() as calls:
        source_BK, target_BK = slots_of_path(path_BK, counts_B, lengths_B)
        move_slots(views, source_BK=source_BK, target_BK=target_BK, backend="triton")
    assert calls == {("commit", "triton"): 1}
    assert all(torch.equal(one, wanted) for one, wanted in zip(whole, expected))


def test_layers_of_different_shape_are_moved_in_groups() -> None:
    layers = [torch.randn(shape, device=DEVICE) for shape in ((1, 2, 9, 4), (1, 1, 9, 8), (1, 2, 9, 4))]
    numbers = {"path_BK": [[1, 3]], "counts_B": [2], "lengths_B": [2]}
    arguments = {name: torch.tensor(value, device=DEVICE) for name, value in numbers.items()}
    expected = [kept_by_hand(layer, **arguments) for layer in layers]
    with record() as calls:
        commit(layers, **arguments, backend="triton")
    assert calls == {("commit", "triton"): 2}
    assert all(torch.equal(layer, wanted) for layer, wanted in zip(layers, expected))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    layer, two = torch.zeros(2, 1, 4, 2, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(EagleError, match="counts and lengths of shape"):
        commit([layer], path_BK=torch.zeros(2, 3, dtype=torch.int64, device=DEVICE), counts_B=two[:1], lengths_B=two)
    with pytest.raises(EagleError, match="the 1 rows of the path"):
        commit(
            [layer], path_BK=torch.zeros(1, 3, dtype=torch.int64, device=DEVICE), counts_B=two[:1], lengths_B=two[:1]
        )
    with pytest.raises(EagleError, match="head dim of the buffers is not contiguous"):
        commit(
            [layer.transpose(2, 3)],
            path_BK=torch.zeros(2, 1, dtype=torch.int64, device=DEVICE),
            counts_B=two,
            lengths_B=two,
            backend="triton",
        )
