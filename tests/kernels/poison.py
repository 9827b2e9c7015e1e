"""Scratch memory that holds the worst: what a kernel reads without having written it shows."""

from typing import Any

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, large negative integers and True."""
    empty = torch.empty

    def poison(*shape: Any, **arguments: Any) -> torch.Tensor:
        tensor = empty(*shape, **arguments)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return tensor.fill_(True) if tensor.dtype == torch.bool else tensor.fill_(-77_777_777)

    monkeypatch.setattr(torch, "empty", poison)
