"""What a measurement was made on: hardware, library versions, commit, peak memory."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "numpy", "triton")


def hardware() -> dict[str, Any]:
    """CPU name, the cores this process may use, torch's threads, GPUs, memory in bytes."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": _cpu_name(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of the libraries whose code runs in a measurement."""
    found = {"python": platform.python_version(), "eagle": package_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def package_version() -> str:
    """The installed version of this package."""
    try:
        return importlib.metadata.version("eagle-draft-toolkit")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


def git_commit() -> str | None:
    """The commit of the checkout that this code lies in, "-dirty" appended when files differ; None when installed."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory() -> dict[str, int]:
    """Peak resident memory of this process, and of each GPU's allocator, in bytes."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    for i in range(torch.cuda.device_count()):
        peak[f"cuda{i}_bytes"] = torch.cuda.max_memory_allocated(i)
    return peak


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return run.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
