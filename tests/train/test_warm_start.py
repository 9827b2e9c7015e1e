"""Starting from another head: the layer carries over, LM head rows go with their tokens, and the head is tried first."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import HeadConfig, Recipe
from eagle.errors import EagleError
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.train.beginning import start_from, verdict
from eagle.train.loop import train
from tests.tiny import VOCAB, tiny_model
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_step import metrics_of

TARGET = tiny_model("llama").config


def _vocabulary(ids: list[int], coverage: float = 0.9) -> DraftVocabulary:
    return DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=VOCAB, coverage=coverage)


def _eagle1(ids: list[int] | None = None, *, seed: int = 0, **shape: Any) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(EagleHeadConfig.for_target(TARGET, draft_vocab_size=ids and len(ids), **shape))
    if ids:
        head.set_vocabulary(_vocabulary(ids))
    return head


def _eagle3(ids: list[int] | None = None, *, seed: int = 0, aux_layers: tuple[int, ...] = (0, 1, 2)) -> Eagle3Head:
    torch.manual_seed(seed)
    config = Eagle3HeadConfig.for_target(TARGET, aux_layers=aux_layers, draft_vocab_size=ids and len(ids))
    head = Eagle3Head(config)
    if ids:
        head.set_vocabulary(_vocabulary(ids))
    return head


def _start(other: Any, fresh: Any, folder: Path, identity: dict[str, Any] | None = None) -> Any:
    save_head(other, folder)
    return start_from(HeadConfig(init_from=str(folder)), fresh, target_identity=identity)


def test_the_layer_carries_over_into_another_draft_vocabulary(tmp_path: Path) -> None:
    other, fresh = _eagle1([3, 5, 9], intermediate_size=40, sliding_window=7), _eagle1([5, 9, 11, 200], seed=1)
    started = _start(other, fresh, tmp_path / "other")
    for name, weight in other.state_dict().items():
        if name not in ("d2t", "t2d"):
            assert torch.equal(started.head.state_dict()[name], weight), name
    assert started.head.window == 7
    assert started.head.vocabulary.target_ids_D.tolist() == [5, 9, 11, 200]
    assert started.notes[0] == "draft vocabulary: 2 of 4 tokens were among its 3, 2 are new"
    everything = _start(other, _eagle1(seed=1), tmp_path / "other")
    assert everything.head.vocabulary is None


@pytest.mark.parametrize("theirs", [[3, 5, 9], None])
def test_lm_head_rows_go_with_their_tokens(theirs: list[int] | None, tmp_path: Path) -> None:
    other, fresh = _eagle3(theirs), _eagle3([5, 9, 11, 200], seed=1)
    started = _start(other, fresh, tmp_path / "other")
    row_of = {token: row for row, token in enumerate(theirs or range(VOCAB))}
    for row, token in enumerate([5, 9, 11, 200]):
        source = other.lm_head.weight[row_of[token]] if token in row_of else fresh.lm_head.weight[row]
        assert torch.equal(started.head.lm_head.weight[row], source), token
    assert torch.equal(started.head.midlayer.self_attn.q_proj.weight, other.midlayer.self_attn.q_proj.weight)


def test_what_cannot_carry_over_is_refused(tmp_path: Path) -> None:
    for other, fresh, message in (
        (_eagle3(), _eagle1(), r"head.version is eagle1, but the head .* is of eagle3"),
        (_eagle1(fc_bias=True), _eagle1(), r"set head.fc_bias to True"),
        (_eagle1(hidden_size=64), _eagle1(), r"hidden size 64, the target's features have 32.*init_from to null"),
        (_eagle3(aux_layers=(0, 1)), _eagle3(), r"head.aux_layers is \[0, 1, 2\], but .* looks at \[0, 1\]"),
    ):
        with pytest.raises(EagleError, match=message):
            _start(other, fresh, tmp_path / "other")


def test_another_target_is_told(tmp_path: Path) -> None:
    other = _eagle1()
    other.config.target_identity = {"model": "old/model", "weights_sha256": "a" * 64, "vocab_size": VOCAB}
    now = {"model": "new/model", "weights_sha256": "b" * 64, "vocab_size": VOCAB}
    (note,) = _start(other, _eagle1(), tmp_path / "other", now).notes
    assert note == (
        "it was trained for another target: model old/model there, new/model here, weights_sha256 aaaaaaaaaaaa there, "
        "bbbbbbbbbbbb here"
    )
    same = {**other.config.target_identity, "model": "old/model's/folder"}
    assert _start(other, _eagle1(), tmp_path / "other", same).notes == (), "the weights are the same"


def test_a_head_no_better_than_chance_is_refused_or_told() -> None:
    config = HeadConfig(init_from="old")
    assert verdict(0.4, 0.1, config=config, check="refuse").startswith(
        "its first guess is the target's choice at 40.0%"
    )
    with pytest.raises(
        EagleError, match=r"old: .* at 2.0% .*expected more than chance .*10.0%.*warm_start_check to report"
    ):
        verdict(0.02, 0.1, config=config, check="refuse")
    assert "no better than chance" in verdict(0.02, 0.1, config=config, check="report")


def _from(recipe: Recipe, head: Path, output: Path, **keys: Any) -> Recipe:
    started = dataclasses.replace(recipe, head=dataclasses.replace(recipe.head, init_from=str(head)))
    return with_train(dataclasses.replace(started, output_dir=str(output)), **keys)


@pytest.mark.slow
def test_a_run_starts_from_a_head_that_knows_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first head learns its documents by heart; from it, training starts where the other ended."""
    write_tiny_store(tmp_path, documents=3, validation=1)
    first = tiny_recipe(
        tmp_path, epochs=120, lr=1e-2, classification_weight=1.0, noise=0.0, eval_every=1000, save_every=1000
    )
    train(first)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "features").symlink_to(first.store_dir)
    warm = _from(first, first.head_dir, tmp_path / "warm", epochs=2, lr=1e-5, save_every=1)
    capsys.readouterr()
    train(warm)
    text = capsys.readouterr().err
    assert "its first guess is the target's choice at" in text
    start, end = (
        next(line["loss"] for line in lines if "loss" in line) for lines in (metrics_of(first), metrics_of(first)[::-1])
    )
    assert metrics_of(warm)[0]["loss"] < end + 0.1 * (start - end)
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "features").symlink_to(first.store_dir)
    save_head(_eagle1(seed=5), tmp_path / "untrained")
    untrained = _from(first, tmp_path / "untrained", tmp_path / "random", epochs=1)
    with pytest.raises(EagleError, match=r"expected more than chance"):
        train(untrained)
    train(with_train(untrained, warm_start_check="report"))
    assert "no better than chance" in capsys.readouterr().err
