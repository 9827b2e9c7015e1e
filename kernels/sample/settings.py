"""How the rows of a batch choose their tokens, as tensors on the logits' device. B rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle.errors import EagleError
from eagle.kernels.placement import sent

TEMPERATURES = "0 (greedy), or from 1e-37 to 1e37"
"""What a temperature may be, in words."""


def is_temperature(value: float) -> bool:
    """Whether sampling can divide by it in float32 (and multiply noise with it), or it is 0: anything smaller would be read
    as 0 in one place and not in another."""
    return value == 0 or 1e-37 <= value <= 1e37


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """One entry per row; fields as in eagle/sample/sampling.py. Build it with `of`: kernels trust the numbers."""

    temperature_B: torch.Tensor
    """float32; 0: greedy, and the filters mean nothing."""
    top_k_B: torch.Tensor
    """int32; 0: off."""
    top_p_B: torch.Tensor
    """float32; 1: off."""
    log_min_p_B: torch.Tensor
    """float32 logarithm of min-p; -inf: off."""
    joint_B: torch.Tensor
    """int32; 1: every filter sees the full distribution, 0: what the filter before left (Hugging Face)."""
    seed_B: torch.Tensor
    """int64: the 64 bits of the row's seed."""
    filtered: bool
    """Whether any row filters: known on the host, so that batches without filters skip the work without asking the device."""

    @property
    def rows(self) -> int:
        return len(self.seed_B)

    def part(self, first: int, end: int) -> "RowSettings":
        """Rows first .. end - 1: views."""
        tensors = {name: one[first:end] for name, one in vars(self).items() if isinstance(one, torch.Tensor)}
        return RowSettings(**tensors, filtered=self.filtered)

    @classmethod
    def of(
        cls,
        *,
        seeds: Sequence[int],
        temperature: Sequence[float],
        top_k: Sequence[int] | None = None,
        top_p: Sequence[float] | None = None,
        min_p: Sequence[float] | None = None,
        filter_order: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> "RowSettings":
        """One number per row and field; None: off (filter_order: sequential). Raises EagleError for a number out of its
        range or a field of another length than the seeds."""
        rows = len(seeds)
        top_k, top_p, min_p = top_k or [0] * rows, top_p or [1.0] * rows, min_p or [0.0] * rows
        orders = filter_order or ["sequential"] * rows
        fields = {
            "temperature": (temperature, is_temperature, TEMPERATURES),
            "top_k": (top_k, lambda x: x >= 0, "0 (off) or more"),
            "top_p": (top_p, lambda x: 0 <= x <= 1, "from 0 (the best token) to 1 (off)"),
            "min_p": (min_p, lambda x: 0 <= x <= 1, "from 0 (off) to 1"),
            "filter_order": (orders, lambda x: x in ("sequential", "joint"), "sequential or joint"),
        }
        for name, (values, fits, expected) in fields.items():
            if len(values) != rows:
                raise EagleError(f"{len(values)} values of {name} for {rows} seeds; give one per row")
            for value in values:
                if not fits(value):
                    raise EagleError(f"{name} is {value!r}, expected {expected}")
        off = zip(temperature, top_k, top_p, min_p)
        signed = [(seed & (2**64 - 1)) - (seed & 2**63) * 2 for seed in seeds]
        tensors = {
            "temperature_B": torch.tensor(temperature, dtype=torch.float32),
            "top_k_B": torch.tensor([min(k, 2**31 - 1) for k in top_k], dtype=torch.int32),
            "top_p_B": torch.tensor(top_p, dtype=torch.float32),
            "log_min_p_B": torch.tensor(min_p, dtype=torch.float32).log(),
            "joint_B": torch.tensor([order == "joint" for order in orders], dtype=torch.int32),
            "seed_B": torch.tensor(signed, dtype=torch.int64),
        }
        return cls(
            **{name: sent(tensor, device) for name, tensor in tensors.items()},
            filtered=any(t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in off),
        )
