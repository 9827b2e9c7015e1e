"""TreeCache: ragged rows, compaction, growth."""

import pytest
import torch

from eagle.target.cache import TreeCache


def write(cache: TreeCache, values_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes keys whose every component is the given number, and values of its negative, to both layers."""
    states = values_BN.float()[:, None, :, None].expand(-1, 2, -1, 4)
    out = [cache.update(states + 100 * layer, -states - 100 * layer, layer) for layer in range(2)]
    return out[0]


def committed(cache: TreeCache, row: int, layer: int = 0) -> list[float]:
    return cache.layers[layer].keys[row, 0, : int(cache.lengths_B[row]), 0].tolist()


def test_accepted_nodes_follow_the_prefix_in_every_row_and_layer() -> None:
    cache = TreeCache(layers=2, rows=3, capacity=16)
    write(cache, torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    cache.commit(torch.tensor([[0, 1, 2], [0, 1, 0], [0, 0, 0]]), torch.tensor([3, 2, 1]))  # ragged from here on
    write(cache, torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]))
    cache.commit(torch.tensor([[0, 3, 0], [0, 1, 3], [0, 0, 0]]), torch.tensor([2, 3, 0]))
    assert committed(cache, 0) == [1, 2, 3, 10, 13]
    assert committed(cache, 1) == [4, 5, 20, 21, 23]
    assert committed(cache, 2) == [7]
    assert committed(cache, 1, layer=1) == [104, 105, 120, 121, 123]
    assert cache.layers[0].values[0, 1, :5, 3].tolist() == [-1, -2, -3, -10, -13]


def test_uncommitted_nodes_are_overwritten_by_the_next_tree() -> None:
    cache = TreeCache(layers=2, rows=1, capacity=8)
    write(cache, torch.tensor([[1, 2, 3]]))
    cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    keys, _ = write(cache, torch.tensor([[7]]))
    assert keys[0, 0, :, 0].tolist() == [1, 7]


def test_growth_keeps_contents_and_happens_only_when_needed() -> None:
    cache = TreeCache(layers=2, rows=2, capacity=4)
    write(cache, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    cache.commit(torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([3, 2]))
    buffer = cache.layers[0].keys.data_ptr()
    cache.reserve(1)
    assert cache.layers[0].keys.data_ptr() == buffer
    cache.reserve(2)
    assert cache.capacity == 8
    assert committed(cache, 0) == [1, 2, 3]
    assert committed(cache, 1) == [4, 5]


def test_writing_past_the_capacity_is_caught() -> None:
    cache = TreeCache(layers=2, rows=1, capacity=2)
    with pytest.raises(AssertionError, match="reserve"):
        write(cache, torch.tensor([[1, 2, 3]]))


def test_a_row_of_another_cache_can_be_taken_over() -> None:
    source, cache = TreeCache(layers=2, rows=2, capacity=8), TreeCache(layers=2, rows=2, capacity=8)
    write(source, torch.tensor([[1, 2], [3, 4]]))
    source.commit(torch.tensor([[0, 1], [0, 0]]), torch.tensor([2, 1]))
    cache.copy_row(1, source, 0)
    assert cache.lengths_B.tolist() == [0, 2]
    assert committed(cache, 1, layer=1) == [101, 102]


@pytest.mark.parametrize("rows", [[2, 0, 0], [1, 1, 0, 2, 2], [2], [0, 1, 2]])
def test_rows_can_be_reordered_repeated_and_dropped(rows: list[int]) -> None:
    cache = TreeCache(layers=2, rows=3, capacity=8)
    write(cache, torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))
    cache.commit(torch.tensor([[0, 1, 2], [0, 1, 0], [0, 0, 0]]), torch.tensor([3, 2, 1]))
    before = [(committed(cache, row), committed(cache, row, layer=1)) for row in range(3)]
    row_bytes = cache.row_bytes
    cache.reorder(rows)
    assert [(committed(cache, i), committed(cache, i, layer=1)) for i in range(len(rows))] == [before[r] for r in rows]
    assert (cache.rows, cache.row_bytes) == (len(rows), row_bytes)
    # each copy goes its own way
    with torch.inference_mode():
        write(cache, torch.arange(50, 50 + len(rows))[:, None])
    cache.commit(torch.zeros(len(rows), 1, dtype=torch.int64), torch.ones(len(rows), dtype=torch.int64))
    assert [committed(cache, i) for i in range(len(rows))] == [[*before[r][0], 50 + i] for i, r in enumerate(rows)]


def test_a_rows_memory_is_its_reserved_keys_and_values() -> None:
    cache = TreeCache(layers=2, rows=3, capacity=8)
    assert cache.row_bytes == 0
    write(cache, torch.tensor([[1], [2], [3]]))
    assert cache.row_bytes == 2 * 2 * (2 * 8 * 4) * 4  # layers, K and V, heads x slots x components, bytes
