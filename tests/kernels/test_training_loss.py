"""The training loss by the draft_loss kernel, interpreted, against plain PyTorch: losses, and gradients of a head's weights."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.data import chunks
from eagle.errors import EagleError
from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.dispatch import record, using
from eagle.train.draftable import Draftable
from eagle.train.loop import train
from eagle.train.objective import Objective
from eagle.train.step import batch_losses
from tests.kernels.interpreted import INTERPRETED
from tests.kernels.poison import poisoned
from tests.train.batch_cases import random_batch, small_head, small_tokens
from tests.train.stores import tiny_recipe, write_tiny_store
from tests.train.test_step import metrics_of

pytestmark = INTERPRETED

__all__ = ["poisoned"]
PLAIN = Objective(steps=1)
HASS = Objective(steps=3, decay=0.7, classification_weight=0.3, distill_weight=0.4, distill_top_k=5)
TEST_TIME = Objective(steps=4, decay=0.8, between="flow", regression_weight=0.0, classification_weight=1.0)


def losses_and_gradients(
    backend: Any, *, version: str, reduced: bool, rows: Sequence[Sequence[int]], objective: Objective
) -> tuple[dict[str, torch.Tensor], Counter[Any]]:
    """By name: the loss, the sums, and the gradient of every parameter of the head. float32; what ran."""
    head, batch, tokens = (
        small_head(version, reduced=reduced).float(),
        random_batch(rows),
        small_tokens(reduced=reduced),
    )
    tokens = DraftTokens(tokens.full.float(), tokens.vocabulary)
    floats = {name: getattr(batch, name).float() for name in ("states_BTX", "features_BTH")}
    if version == "eagle3":
        floats["states_BTX"] = floats["states_BTX"].repeat(1, 1, 3)
    with using(backend), record() as calls:
        total, sums_3K = batch_losses(
            head,
            batch=dataclasses.replace(batch, **floats),
            objective=objective,
            tokens=tokens,
            draftable=Draftable(tokens),
        )
        total.backward()
    gradients = {name: weight.grad for name, weight in head.named_parameters() if weight.grad is not None}
    return {"total": total.detach(), "sums": sums_3K, **gradients}, calls


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("version", "reduced", "rows", "objective", "chunk_rows"),
    [
        ("eagle1", False, [[13], [7, 4]], PLAIN, 5),
        ("eagle1", True, [[4, 7, 1], [12], [2, 3]], HASS, 4),
        ("eagle3", True, [[63]], TEST_TIME, 17),
        ("eagle3", False, [[3], [9], [5], [1], [6]], HASS, 100),
        ("eagle1", False, [[3]], HASS, 1),
    ],
)
def test_the_kernel_trains_as_plain_pytorch_does(
    version: str,
    reduced: bool,
    rows: Sequence[Sequence[int]],
    objective: Objective,
    chunk_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(chunks.CHUNK_ELEMENTS, "cpu", chunk_rows * small_tokens(reduced=reduced).size)
    case: dict[str, Any] = dict(version=version, reduced=reduced, rows=rows, objective=objective)
    expected, plain_calls = losses_and_gradients("reference", **case)
    found, calls = losses_and_gradients("triton", **case)
    assert {path for _, path in plain_calls} == {"reference"}
    assert calls["draft_loss", "triton"] == plain_calls["draft_loss", "reference"] > 0
    assert calls["draft_loss", "reference"] == 0
    assert expected.keys() == found.keys()
    assert expected["total"] != 0
    for name, wanted in expected.items():
        torch.testing.assert_close(
            found[name], wanted, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_has_no_kernel_takes_the_reference_or_is_refused() -> None:
    case: dict[str, Any] = dict(version="eagle1", reduced=False, rows=[[9]])
    objective = dataclasses.replace(PLAIN, divergence="kl")
    _, calls = losses_and_gradients("auto", objective=objective, **case)
    assert {path for kernel, path in calls if kernel == "draft_loss"} == {"reference"}
    with pytest.raises(EagleError, match=r"cannot run: train\.divergence is kl, which has no kernel"):
        losses_and_gradients("triton", objective=objective, **case)


def test_a_run_says_what_ran_and_learns_the_same(tmp_path: Path) -> None:
    runs = {}
    for kernels in ("reference", "triton"):
        write_tiny_store(tmp_path / kernels)
        recipe = tiny_recipe(tmp_path / kernels, max_steps=2, kernels=kernels, precision="fp32")
        train(recipe)
        lines = [line for line in metrics_of(recipe) if "loss" in line]
        assert all(set(line["kernels"]["draft_loss"]) == {kernels} for line in lines)
        runs[kernels] = [line["loss"] for line in lines]
    assert runs["triton"] == pytest.approx(runs["reference"], rel=1e-5)


def test_triton_where_it_cannot_run_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, kernels="triton")
    with pytest.raises(EagleError, match=r"train\.kernels is triton, but train\.divergence is js, which has no kernel"):
        train(tiny_recipe(tmp_path, kernels="triton", divergence="js"))
    with pytest.raises(EagleError, match=r"but train\.distill_top_k is 65, the kernel takes 64 at most"):
        train(tiny_recipe(tmp_path, kernels="triton", distill_weight=1.0, distill_top_k=65))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EagleError, match=r"train\.kernels is triton, which cannot run: .* set it to auto or reference"):
        train(recipe)
