"""Freed memory goes back to the system, and training asks for it."""

import platform
from pathlib import Path

import pytest
import torch

from eagle.memory import release_free_memory
from eagle.train import loop
from tests.train.stores import tiny_recipe, write_tiny_store

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")


def _held() -> int:
    """Bytes of this process's own memory."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@glibc
def test_holes_between_blocks_in_use_are_given_back() -> None:
    blocks = [torch.ones(24_000) for _ in range(2_000)]  # 96 kB each, below the size that glibc maps by itself
    kept = blocks[::20]
    del blocks
    before = _held()
    assert release_free_memory()
    assert before - _held() > 100_000_000
    assert all(bool((block == 1).all()) for block in kept)


def test_training_on_a_cpu_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loop, "RELEASE_EVERY", 3)
    monkeypatch.setattr(loop, "release_free_memory", lambda: asked.append(1))
    write_tiny_store(tmp_path)
    loop.train(tiny_recipe(tmp_path, epochs=2))  # eight steps
    assert len(asked) == 2
