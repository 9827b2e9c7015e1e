"""StaticCache does what TreeCache does, in buffers that are lent, taken back and lent again."""

import weakref

import pytest
import torch

from eagle.target.cache import TreeCache
from eagle.target.cuda_graph import Recorder
from eagle.target.fixed_cache import BufferPool, StaticCache, bucket, fixed_count


def pool() -> BufferPool:
    return BufferPool(layers=2, recorder=Recorder(torch.device("cpu"), "none"))


@torch.inference_mode()
def write(cache: TreeCache, values_BN: torch.Tensor) -> None:
    states = values_BN.float()[:, None, :, None].expand(-1, 2, -1, 4)
    for layer in range(2):
        cache.update(states + 1000 * layer, -states - 1000 * layer, layer)


def committed(cache: TreeCache) -> list[list[float]]:
    """Every layer's and row's committed keys and values."""
    return [
        tensor[row, 1, : int(cache.lengths_B[row]), 2].tolist()
        for layer in cache.layers
        for tensor in layer.tensors
        for row in range(cache.rows)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_operations_ends_as_in_a_tree_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle.target.fixed_cache.SMALLEST", 8)  # it grows
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    tree, static = TreeCache(layers=2, rows=3, capacity=8), StaticCache(pool(), rows=3, capacity=8)
    for step in range(12):
        rows, nodes = tree.rows, random(1, 7)
        values_BN = torch.arange(rows * nodes).view(rows, nodes) + 100 * step
        paths = [
            torch.randperm(nodes - 1, generator=generator)[: random(0, nodes)].sort().values + 1 for _ in range(rows)
        ]
        path_BK = torch.zeros(rows, nodes, dtype=torch.int64)
        for row, path in enumerate(paths):
            path_BK[row, 1 : 1 + len(path)] = path
        counts_B = torch.tensor([1 + len(path) for path in paths])
        moved = [random(0, rows) for _ in range(random(1, 5))] if step % 4 == 3 else None
        for cache in (tree, static):
            cache.reserve(fixed_count(nodes))
            write(cache, values_BN)
            cache.commit(path_BK, counts_B)
            if moved is not None:
                cache.reorder(moved)
        assert committed(static) == committed(tree)
    assert static.capacity > 8


def test_buffers_come_back_when_a_cache_is_gone_and_are_blank() -> None:
    lender = pool()
    cache = StaticCache(lender, rows=2, capacity=8)
    write(cache, torch.full((2, 3), float("nan")))
    where = cache.layers[1].keys.data_ptr()
    other = StaticCache(lender, rows=2, capacity=8)  # while the first is in use
    write(other, torch.ones(2, 3))
    assert other.layers[1].keys.data_ptr() != where
    del cache
    smaller = StaticCache(lender, rows=1, capacity=8)
    assert smaller.layers[1].keys.data_ptr() == where
    assert smaller.layers[1].keys.shape[0] == 1
    assert not bool(smaller.buffers.keys[1].isnan().any())  # type: ignore[union-attr]


def test_growing_keeps_what_is_not_committed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's first levels lie behind the committed tokens when the next one needs more room."""
    monkeypatch.setattr("eagle.target.fixed_cache.SMALLEST", 8)
    caches = TreeCache(layers=2, rows=2, capacity=8), StaticCache(pool(), rows=2, capacity=8)
    for cache in caches:
        write(cache, torch.tensor([[1, 2, 3], [4, 5, 6]]))
        cache.commit(torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.tensor([3, 1]))
        write(cache, torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]]))
        cache.reserve(20)
        cache.commit(torch.tensor([[0, 2, 3], [1, 3, 3]]), torch.tensor([3, 2]))
    assert committed(caches[1]) == committed(caches[0])
    assert committed(caches[1])[:2] == [[1, 2, 3, 7, 9, 10], [4, 12, 14]]


def test_buffers_with_too_few_rows_are_gone_before_larger_ones_are_made() -> None:
    lender = pool()
    cache = StaticCache(lender, rows=1, capacity=8)
    write(cache, torch.ones(1, 3))
    small = weakref.ref(cache.buffers)
    del cache
    assert small() is not None, "it is kept for the next cache"
    cache = StaticCache(lender, rows=2, capacity=8)
    assert small() is None
    assert all(keys is None for keys in cache.buffers.keys), "larger ones are made at the first write"


def test_rows_that_leave_do_not_move_the_buffers() -> None:
    cache = StaticCache(pool(), rows=3, capacity=8)
    write(cache, torch.tensor([[1, 2], [3, 4], [5, 6]]))
    cache.commit(torch.tensor([[0, 1], [0, 1], [0, 1]]), torch.tensor([2, 1, 2]))
    where = cache.layers[0].keys.data_ptr()
    cache.keep_rows([0, 2])
    cache.keep_rows([1])
    assert cache.layers[0].keys.data_ptr() == where
    assert cache.layers[0].keys[0, 0, :2, 0].tolist() == [5, 6]
    assert cache.lengths_B.tolist() == [2]


def test_shapes_come_in_few_sizes() -> None:
    assert [fixed_count(n) for n in (1, 2, 8, 9, 60)] == [1, 8, 8, 16, 64]
    assert [bucket(n) for n in (1, 256, 257, 1024, 5000)] == [256, 256, 512, 1024, 8192]
