"""A new head starts as the best linear map of its inputs; what it adds to that is silent at first."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from eagle.config import Recipe
from eagle.data.documents import Document
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.target.token_layers import TokenLayers
from eagle.train import run
from eagle.train.batches import Order
from eagle.train.least_squares import start_linear
from eagle.train.loop import train
from tests.tiny import tiny_model
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_step import weights_of
from tests.train.test_strategies import launch

H, VOCAB, LAYERS = 16, 50, 3
SHAPE: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
}


class LinearDocuments:
    """Documents whose next feature is a linear map of what a head sees, plus a constant; in every third one nothing is
    supervised and the features are something else."""

    def __init__(self, head: DraftHead, *, documents: int = 24, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        config = tiny_model("llama", hidden_size=H, vocab_size=VOCAB, num_attention_heads=2, num_key_value_heads=1)
        self.tokens = TokenLayers.of_model(config, config.config)
        self.head = head
        self.map_HI = 0.7 * torch.randn(H, head.fc.in_features, generator=self.generator) / head.fc.in_features**0.5
        self.constant_H = torch.randn(H, generator=self.generator) * (head.fc.bias is not None)
        self.made = [self._make(number) for number in range(documents)]
        self.lengths = np.array([len(document.input_ids_T) for document in self.made])

    def _make(self, number: int) -> Document:
        length, spoilt = 12 + number % 5, number % 3 == 2
        ids_T = torch.randint(0, VOCAB, (length,), generator=self.generator)
        aux_TA = torch.randn(length, self.head.fc.in_features, generator=self.generator)
        features = [torch.randn(H, generator=self.generator)]
        for i in range(length - 1):
            embedding_H = self.tokens.embed(ids_T[i + 1][None, None])[0, 0]
            inputs_I = aux_TA[i] if isinstance(self.head, Eagle3Head) else torch.cat([embedding_H, features[i]])
            features.append(self.map_HI @ inputs_I + self.constant_H)
        features_TH = torch.stack(features)
        return Document(
            id=str(number),
            input_ids_T=ids_T,
            loss_mask_T=torch.full((length,), not spoilt),
            features_TH=5 * torch.randn(features_TH.shape, generator=self.generator) if spoilt else features_TH,
            aux_TA=aux_TA if isinstance(self.head, Eagle3Head) else None,
        )

    def read(self, numbers: Any) -> list[Document]:
        return [self.made[number] for number in numbers]

    def ids_and_mask(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.made[number].input_ids_T, self.made[number].loss_mask_T

    def order(self) -> Order:
        return Order(
            documents=tuple(range(len(self.made))), lengths=tuple(self.lengths.tolist()), global_batch=4, seed=0
        )


def _heads() -> list[Any]:
    torch.manual_seed(1)
    three = Eagle3HeadConfig(aux_layers=list(range(2, 2 + LAYERS)), **SHAPE)
    heads = [
        EagleHead(EagleHeadConfig(**SHAPE)),
        EagleHead(EagleHeadConfig(fc_bias=True, **SHAPE)),
        Eagle3Head(three),
    ]
    return [pytest.param(head, id=name) for head, name in zip(heads, ("eagle1", "with bias", "eagle3"), strict=True)]


@pytest.mark.parametrize("head", _heads())
def test_a_linear_target_is_found_and_predicted(head: DraftHead) -> None:
    source = LinearDocuments(head)
    fit = start_linear(head, source, source.order(), tokens=source.tokens, accelerator=Accelerator(cpu=True))  # type: ignore[arg-type]
    assert fit is not None
    assert fit.positions == sum(int(document.loss_mask_T[2:].sum()) for document in source.made)
    assert fit.explained == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(head.fc.weight, source.map_HI, rtol=0, atol=0.02)
    document = source.made[0]
    embeddings_1TH = source.tokens.embed(document.input_ids_T[None, 1:])
    predicted_TH = head(head.fuse(document.states[None, :-1]), embeddings_1TH)[0]
    torch.testing.assert_close(predicted_TH, document.features_TH[1:], rtol=0, atol=0.1)
    if isinstance(head, Eagle3Head):  # its LM head sees predictions of their own size
        size = float(document.features_TH[1:].square().mean().sqrt())
        assert head.norm(predicted_TH).square().mean().sqrt().item() == pytest.approx(size, rel=0.3)


def test_noise_is_not_fitted() -> None:
    """More inputs than positions, and nothing to find: the held-out documents keep the map small."""
    head = EagleHead(EagleHeadConfig(**SHAPE))
    source = LinearDocuments(head, documents=9)
    for document in source.made:
        document.features_TH.normal_(generator=source.generator)
    fit = start_linear(head, source, source.order(), tokens=source.tokens, accelerator=Accelerator(cpu=True))  # type: ignore[arg-type]
    assert fit is None or fit.explained < 0.2
    if fit is not None:
        assert float(head.fc.weight.abs().max()) < 1


def test_nothing_supervised_changes_nothing() -> None:
    head = EagleHead(EagleHeadConfig(**SHAPE))
    source = LinearDocuments(head)
    before = {name: weight.clone() for name, weight in head.state_dict().items()}
    for document in source.made:
        document.loss_mask_T.zero_()
    accelerator = Accelerator(cpu=True)
    assert start_linear(head, source, source.order(), tokens=source.tokens, accelerator=accelerator) is None  # type: ignore[arg-type]
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())


def _started(directory: Path, **train_keys: Any) -> Recipe:
    write_tiny_store(directory, documents=18)
    recipe = tiny_recipe(directory, max_steps=1, lr=1e-9, clip="norm", **train_keys)
    return dataclasses.replace(recipe, head=dataclasses.replace(recipe.head, fc_init="least_squares"))


def test_training_starts_from_it_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = _started(tmp_path)
    started = load_head(train(recipe))
    assert "fc starts as the least-squares map of" in capsys.readouterr().err
    assert float(started.state_dict()["layers.0.mlp.down_proj.weight"].abs().max()) < 1e-6
    random = run.build_head(recipe, hidden_size=32)
    assert not torch.allclose(started.fc.weight, random.fc.weight, atol=1e-3)
    torch.testing.assert_close(
        started.state_dict()["layers.0.mlp.up_proj.weight"], random.state_dict()["layers.0.mlp.up_proj.weight"]
    )
    # A resumed run has its weights from the checkpoint.
    going_on = with_train(recipe, max_steps=2)
    train(going_on)
    assert capsys.readouterr().err.count("fc starts") == 0


@pytest.mark.slow
def test_two_processes_start_like_one(tmp_path: Path) -> None:
    plain = _started(tmp_path / "plain", batch_size=4)
    train(plain)
    both = _started(tmp_path / "both", batch_size=2)
    finished = launch("ddp", both)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stderr.count("fc starts as the least-squares map") == 1
    for name, weight in weights_of(plain).items():
        torch.testing.assert_close(weights_of(both)[name], weight, rtol=1e-5, atol=1e-6)
