"""The least time a kernel can take: what it must move over what the memory can move, or what it must multiply over what the
tensor cores can multiply, whichever is longer."""

import re
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one call must do."""

    bytes: int
    """Read from and written to the device's memory."""
    flops: int = 0
    """Multiplications and additions of matrix products."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(bytes=self.bytes + other.bytes, flops=self.flops + other.flops)

    def times(self, count: int) -> "Cost":
        """Of `count` such calls."""
        return Cost(bytes=count * self.bytes, flops=count * self.flops)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device's limits, from its data sheet (dense, without sparsity)."""

    bandwidth: float
    """Bytes per second."""
    half: float
    """FLOP per second in fp16 and bf16."""
    tf32: float
    """FLOP per second in TF32; float32 products are made of three of these."""
    processors: int
    """Streaming multiprocessors."""
    capability: int
    """Compute capability: 80, 90, 100."""
    source: str
    """Where the numbers come from."""

    def rate(self, dtype: torch.dtype) -> float:
        return self.tf32 / 3 if dtype == torch.float32 else self.half

    def seconds(self, cost: Cost, dtype: torch.dtype) -> float:
        """The roofline: max(bytes / bandwidth, flops / rate)."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.rate(dtype))

    def bound(self, cost: Cost, dtype: torch.dtype) -> str:
        """Which of the two it is: "memory" or "compute"."""
        return "memory" if cost.bytes / self.bandwidth >= cost.flops / self.rate(dtype) else "compute"


_A100 = Device(
    bandwidth=2.039e12,
    half=312e12,
    tf32=156e12,
    processors=108,
    capability=80,
    source="NVIDIA A100 data sheet, 80 GB SXM",
)
DEVICES = {
    "B200": Device(
        bandwidth=8.0e12,
        half=2250e12,
        tf32=1125e12,
        processors=148,
        capability=100,
        source="NVIDIA DGX B200 data sheet",
    ),
    "H200": Device(
        bandwidth=4.8e12, half=989e12, tf32=494e12, processors=132, capability=90, source="NVIDIA H200 data sheet, SXM"
    ),
    "H100 NVL": Device(
        bandwidth=3.9e12, half=835e12, tf32=417e12, processors=132, capability=90, source="NVIDIA H100 data sheet, NVL"
    ),
    "H100 PCIe": Device(
        bandwidth=2.0e12, half=756e12, tf32=378e12, processors=114, capability=90, source="NVIDIA H100 data sheet, PCIe"
    ),
    "H100": Device(
        bandwidth=3.35e12, half=989e12, tf32=494e12, processors=132, capability=90, source="NVIDIA H100 data sheet, SXM"
    ),
    "A100-SXM4-40GB": replace(_A100, bandwidth=1.555e12, source="NVIDIA A100 data sheet, 40 GB SXM"),
    "A100-PCIE-40GB": replace(_A100, bandwidth=1.555e12, source="NVIDIA A100 data sheet, 40 GB PCIe"),
    "A100 80GB PCIe": replace(_A100, bandwidth=1.935e12, source="NVIDIA A100 data sheet, 80 GB PCIe"),
    "A100": _A100,
}
"""By words of torch's device name; the first that fits."""


def device_named(name: str) -> Device | None:
    """The limits of a device by torch's name for it; None when it is not listed, or is a part of one (MIG)."""
    words = set(re.split(r"[\s-]+", name))
    if "MIG" in words:
        return None
    return next((device for key, device in DEVICES.items() if set(re.split(r"[\s-]+", key)) <= words), None)
