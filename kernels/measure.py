"""How kernels are measured: the result is checked first, and a wrong one gets no time.

A kernel's bench.py yields `Case`s; `measured` turns one into a `Measurement`; `report` prints them and ends in one JSON line. On
a CPU the kernels run in Triton's interpreter and only correctness is told.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle.files import atomic_path, write_json
from eagle.kernels.dispatch import interpreting
from eagle.kernels.roofline import Cost, device_named

Call = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: a kernel on given inputs, against its reference and against what others offer."""

    kernel: str
    name: str
    dtype: torch.dtype
    cost: Cost
    run: Call
    """The Triton version: returns a tensor, or several."""
    reference: Call
    """What it must return."""
    tolerance: float
    """Largest absolute difference allowed."""
    baselines: Mapping[str, Call] = field(default_factory=dict)
    """Other implementations of the same result, timed beside it on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What came out. Times are medians in microseconds; None where nothing was timed."""

    kernel: str
    case: str
    correct: bool
    error: float | None
    """Largest absolute difference from the reference; None where one of them is not finite, or nothing came out."""
    problem: str = ""
    """Why nothing came out."""
    bytes: int
    """What the call must move (model.py of the kernel)."""
    flops: int
    """What it must multiply."""
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    roofline_us: float | None = None
    roofline_share: float | None = None
    """Roofline time over measured time: 1 is the best there can be."""
    bound: str | None = None
    baselines_us: Mapping[str, float | str] = field(default_factory=dict)
    """A text says why a baseline has no time."""


def interpret_without_gpu() -> torch.device:
    """The device to measure on. Without a GPU kernels run in the interpreter from here on: call it before triton is imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def measured(case: Case) -> Measurement:
    """Checks the case; on a GPU, when it is right, times it and its baselines. What raises is a finding, of this case alone."""
    about: dict[str, Any] = dict(
        kernel=case.kernel, case=case.name, bytes=case.cost.bytes, flops=case.cost.flops, correct=False, error=None
    )
    try:
        expected = case.reference()
        error = difference(case.run(), expected)
        row = Measurement(
            **{**about, "correct": error <= case.tolerance, "error": error if error < float("inf") else None}
        )
        if not row.correct or interpreting() or not torch.cuda.is_available():
            return row
        fast, median, slow = microseconds(case.run)
    except Exception as problem:
        return Measurement(**about, problem=_told(problem))
    timed: dict[str, Any] = {"us": median, "us_p20": fast, "us_p80": slow}
    limits = device_named(torch.cuda.get_device_name())
    if limits is not None:
        floor = limits.seconds(case.cost, case.dtype) * 1e6
        timed |= {"roofline_us": floor, "roofline_share": floor / median, "bound": limits.bound(case.cost, case.dtype)}
    baselines: dict[str, float | str] = {}
    for name, call in case.baselines.items():
        try:
            wrong = difference(call(), expected)
            baselines[name] = microseconds(call)[1] if wrong <= case.tolerance else f"wrong by {wrong:.2g}"
        except Exception as problem:  # it may not take this case, or not have the memory
            baselines[name] = _told(problem)
    return Measurement(**{**asdict(row), **timed, "baselines_us": baselines})


def _told(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0][:80] if str(problem) else ''}"


def difference(got: Any, wanted: Any) -> float:
    """Largest absolute difference; infinite where one of them is not finite."""
    if not isinstance(got, torch.Tensor):
        return max(difference(one, other) for one, other in zip(got, wanted, strict=True))
    if got.numel() == 0:
        return 0.0
    worst = float((got.double() - wanted.double()).abs().max())
    return worst if worst == worst else float("inf")


def microseconds(call: Call, *, warm_ups: int = 10, repeats: int = 50) -> tuple[float, float, float]:
    """20 %, 50 % and 80 % quantiles of the GPU time of one call, its inputs not in the L2 cache."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(warm_ups):
        call()
    starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
    for start, end in zip(starts, ends):
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = torch.tensor([start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends)])
    fast, median, slow = times.quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return fast, median, slow


def markdown(rows: Sequence[Measurement]) -> str:
    """The table. A ratio stands only beside a correct result."""
    lines = [
        "| kernel | case | error | time us | roofline us | share | bound | others us (speed-up) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row.correct:
            found = row.problem or ("WRONG: not finite" if row.error is None else f"WRONG by {row.error:.2g}")
            lines.append(f"| {row.kernel} | {row.case} | {found} | | | | | |")
            continue
        us = "" if row.us is None else f"{row.us:.1f}"
        floor = "" if row.roofline_us is None else f"{row.roofline_us:.1f}"
        share = "" if row.roofline_share is None else f"{row.roofline_share:.0%}"
        others = ", ".join(
            f"{name} {other}"
            if isinstance(other, str) or row.us is None
            else f"{name} {other:.1f} ({other / row.us:.2f}x)"
            for name, other in row.baselines_us.items()
        )
        lines.append(
            f"| {row.kernel} | {row.case} | {row.error:.2g} | {us} | {floor} | {share} | {row.bound or ''} | {others} |"
        )
    return "\n".join(lines)


def report(cases: Iterable[Case], *, output: Path | None = None) -> int:
    """Measures the cases, prints the table and one JSON line. -> exit code: 1 when a result is wrong.

    output: the table as markdown, and the JSON beside it, with the suffix .json.
    """
    rows = []
    for case in cases:
        rows.append(measured(case))
        if sys.stderr.isatty():
            print(f"{len(rows)}: {case.kernel} {case.name}", file=sys.stderr)
    table, setting = markdown(rows), environment()
    wrong = [f"{row.kernel} {row.case}" for row in rows if not row.correct]
    summary = {**setting, "cases": len(rows), "wrong": wrong, "rows": [asdict(row) for row in rows]}
    print(table)
    if output is not None:
        told = "\n".join(f"- {name}: {value}" for name, value in setting.items())
        with atomic_path(output) as temporary:
            temporary.write_text(f"# Kernel benchmarks\n\n{told}\n\n{table}\n", encoding="utf-8")
        write_json(output.with_suffix(".json"), summary)
    print(json.dumps(summary))
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    """What the numbers were taken on. The commit says so when kernels have changed since."""
    import triton

    def git(*command: str) -> str:
        root = Path(__file__).resolve().parent.parent
        return subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "kernels/*.py")
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, Triton's interpreter: no times",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "commit": (git("rev-parse", "--short", "HEAD") or "unknown") + " with changes" * bool(changed),
    }
