"""Several documents per row: the gradients of a document per row, whatever else is in the recipe."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import Recipe
from eagle.data.documents import Document
from eagle.errors import EagleError
from eagle.train import batches, unroll
from eagle.train.batches import Batch, Layout, collate
from eagle.train.draftable import Draftable
from eagle.train.loop import train
from eagle.train.objective import Objective
from eagle.train.step import batch_losses
from tests.train.batch_cases import HIDDEN, VOCAB, small_head, small_tokens
from tests.train.stores import tiny_recipe, write_tiny_store
from tests.train.test_step import metrics_of, weights_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    write_tiny_store(directory, documents=11)
    return directory


def _recipe(directory: Path, folder: Path, **train_keys: Any) -> Recipe:
    """A recipe over `directory`'s store with an output folder of its own."""
    recipe = tiny_recipe(directory, **{"batch_size": 4, "clip": "norm", "epochs": 2, **train_keys})
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "features").symlink_to(recipe.store_dir)
    return dataclasses.replace(recipe, output_dir=str(folder / "run"))


PACKED = {"packing": "documents", "max_tokens_per_row": 40}


def _same(ours: Recipe, theirs: Recipe) -> None:
    for mine, other in zip(metrics_of(ours), metrics_of(theirs), strict=True):
        for key in ("loss", "grad_norm", "supervised_tokens", "val_loss", "val_tau"):
            assert mine.get(key, 0) == pytest.approx(other.get(key, 0), rel=2e-4), (mine["step"], key)
    for name, weight in weights_of(ours).items():
        torch.testing.assert_close(weight, weights_of(theirs)[name], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"unroll_steps": 3},
        {"gradient_accumulation": 2, "batch_size": 2},
        {"gradient_accumulation": 4, "batch_size": 1},
    ],
    ids=["one-step", "unrolled", "accumulated", "a-document-each"],
)
def test_packed_training_equals_unpacked_training(keys: dict[str, Any], directory: Path, tmp_path: Path) -> None:
    """With noise, which is drawn per document, and an epoch's last step that is short of documents."""
    plain = _recipe(directory, tmp_path / "plain", **{**keys, "gradient_accumulation": 1, "batch_size": 4})
    packed = _recipe(directory, tmp_path / "packed", **keys, **PACKED)
    train(plain)
    train(packed)
    _same(packed, plain)


class RandomDocuments:
    """Documents of random float64 states, numbered by their length."""

    hidden_size = HIDDEN

    def __init__(self, aux_layers: tuple[int, ...]):
        self.aux_layers = aux_layers

    def read(self, numbers: list[int]) -> list[Document]:
        return [self._document(number) for number in numbers]

    def _document(self, number: int) -> Document:
        generator = torch.Generator().manual_seed(number)
        aux_TA = torch.randn(number, HIDDEN * len(self.aux_layers), generator=generator) if self.aux_layers else None
        return Document(
            id=str(number),
            input_ids_T=torch.randint(VOCAB, (number,), generator=generator),
            loss_mask_T=torch.rand(number, generator=generator) < 0.7,
            features_TH=torch.randn(number, HIDDEN, generator=generator),
            aux_TA=aux_TA,
        )


def _loss_and_gradients(version: str, **layout: Any) -> tuple[float, torch.Tensor]:
    """Of 3 unrolled steps over documents of 17, 12, 9, 8, 3, 2 and 1 tokens, noise and all, in float64."""
    source: Any = RandomDocuments((1, 2, 3) if version == "eagle3" else ())
    batch = collate(source, [17, 12, 9, 8, 3, 2, 1], layout=Layout(noise=0.1, **layout), seed=0, step=0)
    batch = dataclasses.replace(batch, states_BTX=batch.states_BTX.double(), features_BTH=batch.features_BTH.double())
    head, tokens = small_head(version), small_tokens()
    objective = Objective(steps=3, decay=0.8, between="flow", classification_weight=1.0)
    loss, _ = batch_losses(head, batch=batch, objective=objective, tokens=tokens, draftable=Draftable(tokens))
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in head.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
@pytest.mark.parametrize("max_tokens_per_row", [12, 20, 100])
def test_packed_documents_have_the_gradients_of_documents_a_row_each(version: str, max_tokens_per_row: int) -> None:
    loss, gradient = _loss_and_gradients(version)
    packed = _loss_and_gradients(version, packing="documents", max_tokens_per_row=max_tokens_per_row)
    assert packed[0] == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(packed[1], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("lost", ["attention", "boundaries"])
def test_documents_that_saw_each_other_or_predicted_the_next_would_have_others(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equality above is not for nothing."""
    _, gradient = _loss_and_gradients("eagle3")
    if lost == "attention":
        monkeypatch.setattr(unroll, "document_spans", lambda document_BT: None)
    else:
        monkeypatch.setattr(
            Batch, "mask", lambda batch, step=0: batches._shifted(batch.supervised_BT, 2 + step, fill=0)
        )
    _, other = _loss_and_gradients("eagle3", packing="documents", max_tokens_per_row=100)
    assert float((other - gradient).norm() / gradient.norm()) > 1e-2


@pytest.mark.slow
def test_a_run_may_go_on_packed(directory: Path, tmp_path: Path) -> None:
    whole = _recipe(directory, tmp_path / "whole", max_steps=6)
    train(whole)
    begun = _recipe(directory, tmp_path / "begun", max_steps=3)
    train(begun)
    train(dataclasses.replace(begun, train=dataclasses.replace(whole.train, **PACKED)))
    assert metrics_of(begun)[-1]["step"] == 6
    for name, weight in weights_of(begun).items():
        torch.testing.assert_close(weight, weights_of(whole)[name], rtol=1e-3, atol=2e-5)


def test_packing_leaves_little_padding() -> None:
    source: Any = RandomDocuments(())
    numbers = [120, 90, 64, 60, 38, 30, 21, 20, 14, 9, 8, 5]
    padding = {}
    for packing in ("none", "documents"):
        layout = Layout(packing=packing, max_tokens_per_row=128)  # type: ignore[arg-type]
        batch = collate(source, numbers, layout=layout, seed=0, step=0)
        padding[packing] = float((batch.document_BT < 0).float().mean())
        assert sorted(number for row in batch.numbers for number in row) == sorted(numbers)
    assert padding["none"] > 0.6
    assert padding["documents"] < 0.1


def test_a_row_of_no_tokens_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="max_tokens_per_row is 0"):
        train(_recipe(directory, tmp_path, max_tokens_per_row=0))
