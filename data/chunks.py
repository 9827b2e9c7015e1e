"""How many positions' logits are held at a time: what keeps memory at O(chunk * V) instead of O(T * V)."""

import torch

CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**26}
"""Logits per chunk: 32 MiB in float32 on the CPU, 256 MiB on a GPU; a few tensors of this size live at once."""


def chunk_rows(vocabulary: int, device: torch.device) -> int:
    """Positions per chunk for logits over `vocabulary` tokens."""
    return max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]) // vocabulary)
