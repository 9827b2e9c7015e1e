"""From the host to a device, without waiting for it."""

import torch


def sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on the device.

    From the host (memory that is not pinned) nothing waits: the contents are set aside at the call, and may change behind it.
    To the host it is a read like any other: everything before it on the device is waited for.
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def fill(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes a tensor (broadcast) into one that lies elsewhere or here; waits for nothing, as `sent`."""
    into.copy_(tensor, non_blocking=tensor.device.type == "cpu")
