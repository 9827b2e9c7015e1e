"""What one answer used of the machine: processor time, memory, and how busy the GPU was."""

import dataclasses
import sys
import time
from pathlib import Path
from types import TracebackType

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What clear_refs takes to set a process's peak resident memory to its present one (Linux, proc(5))."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """Of one stretch of work. The whole process is seen: weights that lie in memory all along are in the peaks."""

    cpu_seconds: float = 0.0
    """Processor time of all threads of the process; a thread that spins while it waits counts."""
    threads: int = 1
    """torch's threads"""
    peak_rss_bytes: int | None = None
    """Peak resident host memory; None where the system keeps no peak that can be set back (not Linux)"""
    peak_cuda_bytes: int | None = None
    """Peak of the device's allocator; None on a CPU"""
    gpu_use: float | None = None
    """0..1, the driver's figure at the end (NVML: share of its last sampling period, at most a second, in which a kernel
    ran); None on a CPU and without pynvml"""


class Meter:
    """`with Meter(device) as meter: ...; meter.use`. Costs some 0.1 ms, outside of what answers time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.use = Use()

    def __enter__(self) -> "Meter":
        self._resets = _reset_peak_rss()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._start = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        cuda = self.device.type == "cuda"
        self.use = Use(
            cpu_seconds=time.process_time() - self._start,
            threads=torch.get_num_threads(),
            peak_rss_bytes=_peak_rss() if self._resets else None,
            peak_cuda_bytes=torch.cuda.max_memory_allocated(self.device) if cuda else None,
            gpu_use=gpu_use(self.device) if cuda else None,
        )


def gpu_use(device: torch.device) -> float | None:
    """NVML's utilisation, 0..1; None when pynvml is missing or does not know the device."""
    try:
        return torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError, ValueError, OSError):
        return None
    except Exception as error:  # pynvml's own NVMLError, which cannot be imported where it is missing
        if type(error).__module__.startswith("pynvml"):
            return None
        raise


def _reset_peak_rss() -> bool:
    if sys.platform != "linux":
        return False
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _peak_rss() -> int | None:
    try:
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
