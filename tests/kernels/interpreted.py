"""Tests that hand CPU tensors to Triton: its interpreter takes them, a machine with a GPU compiles and does not."""

import pytest
import torch

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here: CPU tensors are refused")
