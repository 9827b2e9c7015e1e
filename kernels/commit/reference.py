"""Commit in plain PyTorch: accepted keys and values move down to the end of their rows' prefixes.

B rows, K nodes to move, k key/value heads, S cache slots, d head dim.
"""

from collections.abc import Sequence

import torch


def move_slots(buffers_BkSd: Sequence[torch.Tensor], *, source_BK: torch.Tensor, target_BK: torch.Tensor) -> None:
    """Slots target_BK of every row of every buffer take what slots source_BK hold, all read before any is written.

    int64 [B, K]; the targets of a row are distinct.
    """
    for buffer in buffers_BkSd:
        device = buffer.device
        row_B1 = torch.arange(len(buffer), device=device)[:, None]
        buffer[row_B1, :, target_BK.to(device)] = buffer[row_B1, :, source_BK.to(device)]


def slots_of_path(
    path_BK: torch.Tensor, counts_B: torch.Tensor, lengths_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree nodes path_BK[b, :counts_B[b]] -> (source slots, target slots) [B, K]; what does not move is its own source."""
    step_K = torch.arange(path_BK.shape[1], device=path_BK.device)
    target_BK = lengths_B[:, None] + step_K
    return torch.where(step_K < counts_B[:, None], lengths_B[:, None] + path_BK, target_BK), target_BK
