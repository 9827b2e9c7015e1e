"""Tree attention in Triton (interpreted without a GPU) against the reference in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import EagleError
from eagle.kernels.dispatch import record, using
from eagle.kernels.tree_attention.model import cost
from eagle.kernels.tree_attention.op import tree_attention
from eagle.kernels.tree_attention.tiling import splits_for, tiling
from eagle.kernels.tree_build.reference import ancestry
from tests.kernels.counting import counted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Inputs are standard normal; the reference computes from the same rounded inputs in float64.
TOLERANCE = {
    torch.float32: 2e-6,  # sums of a few hundred float32 products
    torch.float16: 2e-3,  # weights rounded to fp16 (2^-11) before they multiply values of size ~4; result rounded once
    torch.bfloat16: 2.5e-2,  # the same with 2^-8; the interpreter cuts where hardware rounds
}


@dataclass(kw_only=True)
class Problem:
    """Inputs of one call; everything that no node may see is NaN."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]

    def run(self, *, splits: int | None = None) -> torch.Tensor:
        moved = {name: tensor.to(DEVICE) for name, tensor in self.tensors.items()}
        query, key, value = (moved.pop(name) for name in ("query", "key", "value"))
        return tree_attention(query, key, value, **moved, **self.options, backend="triton", splits=splits).cpu()

    def expected(self) -> torch.Tensor:
        """The reference in float64; what was NaN is 0 here."""
        clean = {n: t.double().nan_to_num() if t.is_floating_point() else t for n, t in self.tensors.items()}
        query, key, value = (clean.pop(name) for name in ("query", "key", "value"))
        return tree_attention(query, key, value, **clean, **self.options, backend="reference")


def random_parents(rows: int, nodes: int, generator: torch.Generator) -> torch.Tensor:
    picks = torch.rand(rows, nodes, generator=generator)
    return torch.cat([torch.full((rows, 1), -1), (picks[:, 1:] * torch.arange(1, nodes)).long()], dim=1)


def problem(
    *,
    lengths: Sequence[int],
    nodes: int,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    softcap: float | None = None,
    offset: int = 0,
    spare: int = 5,
    seed: int = 0,
) -> Problem:
    """The last `nodes` of a random tree of offset + nodes ask; the cache has `spare` slots and columns never written."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = len(lengths), offset + nodes
    depths_BC, ancestors_BCW = ancestry(random_parents(rows, columns, generator))
    slots = max(lengths) + columns + spare
    query, key, value = (
        torch.randn(rows, slots if cached else nodes, kv_heads if cached else heads, head_dim, generator=generator)
        .to(dtype)
        .transpose(1, 2)  # as models and some caches lay them out
        for cached in (False, True, True)
    )
    for row, length in enumerate(lengths):
        key[row, :, length + columns :] = float("nan")
        value[row, :, length + columns :] = float("nan")
        if columns - nodes > 1 and not (ancestors_BCW[row, offset:, 0] & 2).any():  # a column none of these nodes sees
            key[row, :, length + 1], value[row, :, length + 1] = float("nan"), float("nan")
    column_depths_BC = torch.cat([depths_BC, torch.full((rows, 3), 10**6)], dim=1)  # columns of levels still to come
    words = -(-column_depths_BC.shape[1] // 64)
    ancestors_BCW = torch.nn.functional.pad(ancestors_BCW, (0, words - ancestors_BCW.shape[2]))
    return Problem(
        tensors={
            "query": query,
            "key": key,
            "value": value,
            "lengths_B": torch.tensor(lengths),
            "ancestors_BNW": ancestors_BCW[:, offset:],
            "query_depths_BN": depths_BC[:, offset:],
            "column_depths_BC": column_depths_BC,
        },
        options={"offset": offset, "scaling": head_dim**-0.5, "window": window, "softcap": softcap},
    )


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[got.dtype])


SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtypes", "splits"),
    [
        (dict(lengths=[0], nodes=1), (SINGLE, HALF, BRAIN), 1),  # nothing but itself
        (dict(lengths=[0], nodes=1), (SINGLE, HALF, BRAIN), 3),  # two of three splits see nothing
        (dict(lengths=[63], nodes=1, heads=1, head_dim=64), (SINGLE, BRAIN), 1),
        (dict(lengths=[64], nodes=63, heads=1, head_dim=64), (HALF, BRAIN), 1),  # whole tiles and a tree of odd size
        (dict(lengths=[0, 1, 63, 64, 70], nodes=7, heads=3, head_dim=80), (SINGLE, BRAIN), 2),  # ragged, padded dims
        (dict(lengths=[90], nodes=70, heads=2, head_dim=96), (HALF,), 2),  # two words of bits, several blocks of rows
        (dict(lengths=[33], nodes=9, heads=2, kv_heads=2, head_dim=128), (SINGLE, HALF), 4),
        (dict(lengths=[9, 2], nodes=3, offset=90), (SINGLE,), 2),  # a draft's level: columns of earlier steps before it
        (dict(lengths=[20, 3], nodes=5, head_dim=256), (SINGLE, BRAIN), 2),
        (dict(lengths=[9], nodes=129, heads=1, head_dim=24), (HALF,), 1),  # three words; a head dim of no power of two
    ],
)
def test_odd_shapes(shape: dict[str, Any], dtypes: Sequence[torch.dtype], splits: int) -> None:
    for dtype in dtypes:
        given_problem = problem(**shape, dtype=dtype)
        close(given_problem.run(splits=splits), given_problem.expected())


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (9, 5.0), (70, None), (10**6, 1.0)])
def test_windows_count_positions_and_scores_are_capped(window: int | None, softcap: float | None, splits: int) -> None:
    given_problem = problem(lengths=[0, 3, 70], nodes=14, window=window, softcap=softcap)
    close(given_problem.run(splits=splits), given_problem.expected())


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    nodes=st.integers(1, 30),
    offset=st.integers(0, 40),
    group=st.integers(1, 3),
    window=st.none() | st.integers(1, 60),
    splits=st.none() | st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=10, deadline=None)
def test_any_tree_behind_any_prefixes(
    lengths: list[int], nodes: int, offset: int, group: int, window: int | None, splits: int | None, seed: int
) -> None:
    """Columns written by earlier steps (a draft's levels) included."""
    given_problem = problem(
        lengths=lengths, nodes=nodes, offset=offset, heads=group, head_dim=8, window=window, seed=seed
    )
    close(given_problem.run(splits=splits), given_problem.expected())


def test_views_of_a_cache_and_a_layout_by_tokens() -> None:
    """[B, k, capacity, d] cut to the slots in use, and keys and values interleaved in one tensor."""
    given_problem = problem(lengths=[40, 7], nodes=12, heads=4, kv_heads=2)
    expected = given_problem.expected()
    both = torch.full((2, 2, 80, 2, 16), float("nan"))
    both[:, :, :57, 0], both[:, :, :57, 1] = given_problem.tensors["key"], given_problem.tensors["value"]
    given_problem.tensors |= {"key": both[:, :, :57, 0], "value": both[:, :, :57, 1]}
    close(given_problem.run(splits=2), expected)


def test_scratch_memory_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: real_empty(*args, **kwargs).fill_(float("nan")))
    given_problem = problem(lengths=[0, 100], nodes=6)
    close(given_problem.run(splits=5), given_problem.expected())


@pytest.mark.parametrize("splits", [1, 2])
def test_a_node_that_sees_nothing_yields_zeros(splits: int) -> None:
    """What fixed shapes are padded with."""
    given_problem = problem(lengths=[0], nodes=3)
    given_problem.tensors["ancestors_BNW"] = torch.tensor([[[1], [3], [0]]])
    assert torch.equal(given_problem.run(splits=splits)[:, :, 2], torch.zeros(1, 2, 16))


def test_the_path_is_chosen_by_name_counted_and_explained() -> None:
    given_problem = problem(lengths=[3], nodes=2, spare=0)
    query, key, value = (given_problem.tensors.pop(name).nan_to_num() for name in ("query", "key", "value"))
    arguments = {**given_problem.tensors, **given_problem.options}
    with record() as calls:
        automatic = tree_attention(query, key, value, **arguments)
        with using("triton"):
            interpreted = tree_attention(query, key, value, **arguments)
    if DEVICE == "cpu":
        assert calls == {("tree_attention", "reference"): 1, ("tree_attention", "triton"): 1}
    torch.testing.assert_close(automatic, interpreted)
    with pytest.raises(EagleError, match="cannot run: values have head dim 8, queries 16; take backend 'auto'"):
        tree_attention(query, key, value[..., :8], **arguments, backend="triton")
    with pytest.raises(EagleError, match="unknown kernel backend 'cuda'; expected one of auto"):
        tree_attention(query, key, value, **arguments, backend="cuda")  # type: ignore[arg-type]
    with pytest.raises(EagleError, match=r"lengths has shape \(2,\)"):
        tree_attention(query, key, value, **{**arguments, "lengths_B": torch.tensor([1, 2])})
    with pytest.raises(EagleError, match="expected offset"):
        tree_attention(query, key, value, **{**arguments, "offset": 9})


def test_without_the_interpreter_triton_refuses_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    given_problem = problem(lengths=[3], nodes=2)
    query, key, value = (given_problem.tensors.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(EagleError, match="the tensors are on the CPU and TRITON_INTERPRET=1 is not set"):
        tree_attention(query, key, value, **given_problem.tensors, **given_problem.options, backend="triton")


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter does")
@pytest.mark.parametrize("splits", [1, 2])
def test_the_model_of_bytes_and_flops_is_what_the_kernel_does(splits: int) -> None:
    """A shape of whole tiles and one block of rows, so that padding adds nothing."""
    rows, heads, kv_heads, nodes, length, head_dim = 2, 2, 1, 64, 192, 64
    given_problem = problem(
        lengths=[length] * rows, nodes=nodes, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float16
    )
    tile = tiling(nodes * heads, head_dim, torch.float16, 90)
    assert (tile.rows, length % tile.slots, nodes % tile.slots) == (128, 0, 0)
    model = cost(
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        nodes=nodes,
        length=length,
        head_dim=head_dim,
        element=2,
        splits=splits,
    )
    with counted(given_problem.tensors) as counts:
        given_problem.run(splits=splits)
    assert counts.flops == model.flops
    cache = 2 * rows * kv_heads * (length + nodes) * head_dim * 2
    queries = rows * nodes * heads * head_dim * 2
    assert counts.loaded["key"] + counts.loaded["value"] == cache
    assert counts.loaded["query"] == splits * queries  # every split reads them: from the L2 cache but for the first
    small = sum(counts.loaded[name] for name in ("lengths_B", "ancestors_BNW", "query_depths_BN", "column_depths_BC"))
    assert counts.bytes - small - (splits - 1) * queries == pytest.approx(model.bytes, rel=0.02)
    assert small < 0.05 * model.bytes


def test_splits_fill_the_device_without_drowning_it_in_partial_results() -> None:
    long = splits_for(programs=8, packed_rows=64, slots=131072, processors=132)
    assert 8 * long >= 2 * 132
    assert splits_for(programs=8, packed_rows=64, slots=512, processors=132) == 1  # nothing to split
    assert splits_for(programs=1000, packed_rows=64, slots=131072, processors=132) == 1  # full without
    wide = splits_for(programs=8, packed_rows=1024, slots=65536, processors=132)
    assert 2 * wide * 1024 / 65536 <= 0.25
