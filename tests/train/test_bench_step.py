"""The training step's benchmark: its plain form is the same mathematics, its table compares only what agrees."""

import functools
import json
import os
from typing import Any

import pytest
import torch

from eagle.train import bench_step
from eagle.train.draftable import Draftable
from eagle.train.objective import Objective
from eagle.train.step import batch_losses

SHAPE = {
    "vocab": 60,
    "steps": 3,
    "hidden": 16,
    "intermediate": 24,
    "heads": 2,
    "kv-heads": 1,
    "repeats": 1,
    "warmup": 0,
}
TINY = [f"--{name}={value}" for name, value in {**SHAPE, "device": "cpu"}.items()]


@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
@pytest.mark.parametrize("draft", [[], ["--draft-vocab", "25"]])
@pytest.mark.parametrize("checkpointing", ["none", "steps"])
def test_the_plain_step_has_the_loss_and_gradients_of_training(
    version: str, draft: list[str], checkpointing: Any
) -> None:
    options = bench_step.parse([*TINY, *draft, "--version", version])
    head, tokens = bench_step.make_head(options, torch.device("cpu"))
    batch = bench_step.make_batch(head, rows=2, tokens=9, vocabulary=60, device=torch.device("cpu"))
    objective = Objective(
        steps=3,
        decay=0.8,
        between="detach" if version == "eagle1" else "flow",
        regression_weight=1.0 if version == "eagle1" else 0.0,
        checkpointing=checkpointing,
    )
    found = []
    for losses in (bench_step.plain_losses, batch_losses):
        work = functools.partial(losses, batch=batch, objective=objective, tokens=tokens, draftable=Draftable(tokens))
        total, _ = work(head)
        total.backward()
        found.append(
            (total.detach(), {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None})
        )
        head.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert len(found[0][1]) == len(list(head.parameters()))


def _result(method: str, tokens: int, **values: float) -> dict[str, Any]:
    result = dict(method=method, tokens=tokens, peak_bytes=2**30, tokens_per_second=100.0, median_seconds=1.0)
    return {**result, "loss": 2.0, "grad_norm": 0.5, **values}


def test_ratios_are_to_the_plain_step_of_the_same_length_and_refused_where_results_differ() -> None:
    lines = bench_step.table(
        [
            _result("plain", 8),
            _result("ours", 8, peak_bytes=2**29, tokens_per_second=300.0),
            _result("plain", 16),
            _result("ours", 16, grad_norm=0.6),
        ]
    )
    assert lines[2].split()[-2:] == ["0.50x", "3.00x"]
    assert lines[4].split()[-2:] == ["differs", "-"]


def test_there_is_no_ratio_without_the_plain_step_but_the_rest_is_compared() -> None:
    lines = bench_step.table(
        [_result("ours", 8), _result("checkpointed", 8), _result("ours", 16), _result("checkpointed", 16, loss=3.0)]
    )
    assert [line.split()[-2:] for line in lines[1:]] == [["-", "-"], ["-", "-"], ["-", "-"], ["differs", "-"]]
    lines = bench_step.table([_result("ours", 8, tokens_per_second=200.0), _result("plain", 8)])
    assert lines[1].split()[-1] == "2.00x", "whatever the order"


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a peak that can be reset")
def test_the_peak_of_what_came_before_does_not_count() -> None:
    cpu = torch.device("cpu")
    large = torch.ones(2**25)
    del large
    before = bench_step._memory_now(cpu)
    assert bench_step._memory_peak(cpu) - before < 2**25
    large = torch.ones(2**25)
    del large
    assert bench_step._memory_peak(cpu) - before > 2**26


def test_a_case_without_result_is_reported_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(options: Any, *, method: str, tokens: int) -> dict[str, Any] | None:
        return None if method == "plain" else _result(method, tokens)

    monkeypatch.setattr(bench_step, "in_its_own_process", case)
    assert bench_step.main([*TINY, "--tokens", "8"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missing"] == [{"method": "plain", "tokens": 8}]
    assert last["agree"] is False


@pytest.mark.slow
def test_the_command_prints_a_table_and_one_json_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench_step.main([*TINY, "--tokens", "9", "--methods", "plain", "ours"]) == 0
    lines = capfd.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["agree"] is True
    assert [(case["method"], case["tokens"]) for case in result["results"]] == [("plain", 9), ("ours", 9)]
    assert {"commit", "hardware", "vocab", "steps"} <= result.keys()
