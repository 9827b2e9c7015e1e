"""The sampler benchmark: its alias table is exact; a method that draws wrongly costs it its ratios."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.eval.checks import bench_sampler
from eagle.eval.checks.alias_table import build_alias


@settings(max_examples=100, deadline=None, derandomize=True)
@given(size=st.integers(1, 300), seed=st.integers(0, 1000), spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]))
def test_an_alias_table_holds_exactly_the_distribution(size: int, seed: int, spread: float) -> None:
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    if seed % 3 == 0:
        logits_V = logits_V.round()
    if seed % 2:
        logits_V[: size // 2] = -float("inf")
    probabilities_V = logits_V.softmax(-1)
    keep_V, alias_V = build_alias(probabilities_V)
    assert bool(((keep_V > -1e-9) & (keep_V < 1 + 1e-9)).all())
    held_V = keep_V.clone().index_add_(0, alias_V, 1 - keep_V) / size
    assert float((held_V - probabilities_V).abs().max()) < 1e-12


def run(capsys: pytest.CaptureFixture[str], **methods: bench_sampler.Method) -> tuple[int, str, dict[str, object]]:
    code = bench_sampler.main(["--vocab", "64", "--rounds", "3"], {**bench_sampler.METHODS, **methods})
    printed = capsys.readouterr().out
    return code, printed, json.loads(printed.splitlines()[-1])


def test_every_method_draws_rightly_and_the_alias_tables_loss_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, result = run(capsys)
    assert (code, result["correct"]) == (0, True)
    assert "construction" in printed
    assert "paid for a single draw" in printed
    assert "1.00" in printed


def test_a_wrong_method_is_named_and_no_ratio_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, result = run(capsys, greedy=lambda logits_V, number: int(logits_V.argmax()))
    assert (code, result["correct"]) == (1, False)
    assert "No ratios: greedy did not pass" in printed
    assert "1.00" not in printed
    assert "loses" not in printed
