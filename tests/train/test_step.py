"""One optimiser step against the recipe written out index by index, and its independence of how it is cut."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from eagle.config import HeadConfig, Recipe
from eagle.data.store import FeatureStore
from eagle.train import draftable, run
from eagle.train.loop import train
from tests.train.stores import tiny_recipe, write_tiny_store


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    write_tiny_store(directory)
    return directory


def _elsewhere(directory: Path, other: Path, **train_keys: Any) -> Recipe:
    """The recipe over `directory`'s store with an output folder of its own."""
    recipe = tiny_recipe(directory, **train_keys)
    (other / "run").mkdir()
    (other / "run" / "features").symlink_to(recipe.store_dir)
    return dataclasses.replace(recipe, output_dir=str(other / "run"))


def metrics_of(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.train_dir / "metrics.jsonl").read_text().splitlines()]


def weights_of(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.head_dir / "model.safetensors")


def test_loss_and_gradient_of_a_step_equal_the_recipe_written_out(directory: Path, tmp_path: Path) -> None:
    """Documents of several lengths in two micro-steps against loops over documents and indices, nothing shared."""
    recipe = _elsewhere(
        directory, tmp_path, max_steps=1, batch_size=4, gradient_accumulation=2, noise=0.0, clip="none",
        regression_weight=0.7, classification_weight=0.2,
    )  # fmt: skip
    train(recipe)
    store = FeatureStore.open(recipe.store_dir)
    tokens, head = store.token_layers(), run.build_head(recipe, hidden_size=32)
    regression, classification, count = torch.zeros(()), torch.zeros(()), 0
    for number in store.split("train"):
        document = store[number]
        f, e = document.features_TH, tokens.embed(document.input_ids_T[None])[0]
        predicted = head(f[None, :-1], e[None, 1:])[0]
        for i in range(len(f) - 2):
            if document.loss_mask_T[i + 2]:
                regression = regression + functional.smooth_l1_loss(predicted[i], f[i + 1])
                p_V = tokens.logits(f[i + 1]).softmax(-1)
                classification = classification - (p_V * tokens.logits(predicted[i]).log_softmax(-1)).sum()
                count += 1
    loss = (0.7 * regression + 0.2 * classification) / count
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in head.parameters()]).norm()  # type: ignore[union-attr]
    line = metrics_of(recipe)[0]
    assert line["supervised_tokens"] == count
    assert line["regression"] == pytest.approx(regression.item() / count, rel=1e-5)
    assert line["classification"] == pytest.approx(classification.item() / count, rel=1e-5)
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 2), (1, 4), (4, 1)])
def test_accumulation_changes_nothing_but_float_noise(
    batch_size: int, accumulation: int, directory: Path, tmp_path: Path
) -> None:
    """Also where the epoch's last step has fewer documents than micro-steps: 9 training documents, 4 a step."""
    other = tmp_path / "other"
    other.mkdir()
    write_tiny_store(tmp_path, documents=11)
    whole = tiny_recipe(tmp_path, batch_size=4, clip="norm", epochs=3)
    parts = _elsewhere(
        tmp_path, other, batch_size=batch_size, gradient_accumulation=accumulation, clip="norm", epochs=3
    )
    train(whole)
    train(parts)
    for ours, theirs in zip(metrics_of(parts), metrics_of(whole), strict=True):
        for key in ("loss", "grad_norm", "supervised_tokens", "val_loss", "val_tau"):
            assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=2e-4), (ours["step"], key)
    for name, weight in weights_of(parts).items():
        torch.testing.assert_close(weight, weights_of(whole)[name], rtol=1e-3, atol=2e-5)


def test_gradients_are_clipped_by_value_or_norm(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    for clip in ("none", "value", "norm"):
        (tmp_path / clip).mkdir()
        recipe = _elsewhere(directory, tmp_path / clip, max_steps=1, clip=clip, clip_threshold=1e-3)

        class Spy(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                seen[clip] = [p.grad.clone() for group in self.param_groups for p in group["params"]]  # noqa: B023
                return super().step(closure)

        with monkeypatch.context() as patch:
            patch.setattr(torch.optim, "AdamW", Spy)
            train(recipe)
    norm = torch.stack([gradient.norm() for gradient in seen["none"]]).norm()
    assert norm > 1e-2
    for raw, by_value, by_norm in zip(seen["none"], seen["value"], seen["norm"], strict=True):
        torch.testing.assert_close(by_value, raw.clamp(-1e-3, 1e-3))
        torch.testing.assert_close(by_norm, raw * (1e-3 / norm), rtol=1e-3, atol=1e-9)


def test_bf16_trains_float32_weights_close_to_fp32(directory: Path, tmp_path: Path) -> None:
    recipes = []
    for precision in ("bf16", "fp32"):
        (tmp_path / precision).mkdir()
        recipes.append(_elsewhere(directory, tmp_path / precision, precision=precision, epochs=2))
        train(recipes[-1])
    assert {weight.dtype for weight in weights_of(recipes[0]).values()} == {torch.float32}
    last = [[line for line in metrics_of(recipe) if "loss" in line][-1]["loss"] for recipe in recipes]
    assert last[0] != last[1]
    assert last[0] == pytest.approx(last[1], rel=1e-2)


def test_the_precision_left_open_is_what_the_device_is_fast_in(directory: Path, tmp_path: Path) -> None:
    recipe = _elsewhere(directory, tmp_path, epochs=1, precision="auto")
    train(recipe)
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert record["identity"]["train.precision"] == "fp32", "no GPU here"


@pytest.mark.slow
def test_a_hass_recipe_trains_with_the_top_k_term_and_remembers_what_it_could_draft(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second epoch puts no position through the full LM head, and has the losses of computing them anew."""
    seen: list[int] = []
    recipes = []
    for name, limit in (("remembered", 2**30), ("anew", 0)):
        (tmp_path / name).mkdir()
        recipe = _elsewhere(directory, tmp_path / name, epochs=3, unroll_steps=3, distill_weight=1.0, eval_every=100)
        recipes.append(dataclasses.replace(recipe, head=HeadConfig(draft_vocab_size=40)))
        with monkeypatch.context() as patch:
            compute = draftable.Draftable._compute
            patch.setattr(draftable, "MOST_BYTES", limit)

            def count(self: Any, features_NH: Any, at_M: torch.Tensor) -> torch.Tensor:
                seen.append(len(at_M))
                return compute(self, features_NH, at_M)  # noqa: B023

            patch.setattr(draftable.Draftable, "_compute", count)
            train(recipes[-1])
    steps = [[line for line in metrics_of(recipe) if "loss" in line] for recipe in recipes]
    for once, anew in zip(*steps, strict=True):
        assert {key: once[key] for key in ("loss", "grad_norm")} == {key: anew[key] for key in ("loss", "grad_norm")}
        weighted = once["regression"] + 0.1 * once["classification"] + once["distillation"]
        assert once["loss"] == pytest.approx(weighted, rel=1e-4)
    documents = len(FeatureStore.open(recipes[0].store_dir).split("train"))
    assert len(seen) == documents + 3 * documents
