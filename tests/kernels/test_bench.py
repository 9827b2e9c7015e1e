"""Benchmarks: complete, honest about what is wrong, and not stopped by one failure."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.kernels import bench, compile_table, measure
from eagle.kernels.measure import Case, measured, report
from eagle.kernels.roofline import Cost, device_named


def case(run: Callable[[], Any], **baselines: Callable[[], Any]) -> Case:
    """Whose right answer is 1."""
    return Case(
        kernel="k",
        name="n",
        dtype=torch.bfloat16,
        cost=Cost(bytes=4_800_000),
        run=run,
        reference=lambda: torch.ones(3),
        tolerance=0.1,
        baselines=baselines,
    )


def fail(text: str) -> Callable[[], Any]:
    def call(*_: Any) -> None:
        raise RuntimeError(text)

    return call


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 4 us on an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(measure, "interpreting", lambda: False)
    monkeypatch.setattr(measure, "microseconds", lambda call: (3.0, 4.0, 5.0))


def test_every_kernel_has_a_benchmark_and_a_model() -> None:
    assert bench.folders() == compile_table.folders()
    root = Path(bench.__file__).parent
    assert [folder for folder in bench.folders() if not (root / folder / "model.py").exists()] == []


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA H100 PCIe", 2.0e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100-SXM4-40GB", 1.555e12),
        ("NVIDIA A100-PCIE-40GB", 1.555e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA L4", None),
    ],
)
def test_a_device_has_the_limits_of_its_own_name_alone(name: str, bandwidth: float | None) -> None:
    found = device_named(name)
    assert (None if found is None else found.bandwidth) == bandwidth


@pytest.mark.usefixtures("pretended_gpu")
def test_a_baseline_that_fails_or_is_wrong_is_told_and_the_rest_is_timed() -> None:
    row = measured(
        case(lambda: torch.ones(3), works=lambda: torch.ones(3), wrong=lambda: torch.zeros(3), breaks=fail("no\nmore"))
    )
    assert row.us == 4.0
    assert row.roofline_us == pytest.approx(1.0)
    assert row.roofline_share == pytest.approx(0.25)
    assert row.baselines_us == {"works": 4.0, "wrong": "wrong by 1", "breaks": "RuntimeError: no"}
    assert "works 4.0 (1.00x), wrong wrong by 1" in measure.markdown([row])


@pytest.mark.usefixtures("pretended_gpu")
@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda: torch.zeros(3), "WRONG by 1"),
        (lambda: torch.full((3,), float("nan")), "WRONG: not finite"),
        (fail("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_what_is_wrong_gets_no_time_and_does_not_stop_the_others(
    run: Callable[[], Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "table.md"
    assert report([case(run), case(lambda: torch.ones(3))], output=output) == 1
    table = output.read_text()
    assert f"| k | n | {told} | | | | | |" in table
    assert "| k | n | 0 | 4.0 | 1.0 | 25% | memory |  |" in table
    assert "- device: NVIDIA H200" in table
    summary = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=fail("not JSON"))
    assert summary == json.loads((tmp_path / "table.json").read_text())
    assert summary["wrong"] == ["k n"]
    assert [row["us"] for row in summary["rows"]] == [None, 4.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU's cases")
def test_without_a_gpu_the_cases_are_checked_and_nothing_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--kernel", "tree_build", "--kernel", "commit", "--kernel", "noise"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {row["kernel"] for row in summary["rows"]} == {"tree_build", "commit", "noise"}
    assert all(row["correct"] and row["us"] is None for row in summary["rows"])
    assert "no times" in summary["device"]
