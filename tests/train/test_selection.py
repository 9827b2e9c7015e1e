"""Heads are chosen by what they decode: tau is the decoder's, the best one is kept, nothing is lost by a kill."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from eagle.config import Recipe
from eagle.data.store import FeatureStore
from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.sample.stats import AcceptanceLength
from eagle.target.target import Target
from eagle.train import loop, selection
from eagle.train.checkpoints import Progress
from eagle.train.loop import train
from eagle.train.selection import Decoded, Selection
from tests.decoding import decode_config
from tests.tiny import tiny_model, write_conversations
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_resume import _interrupt_after
from tests.train.test_step import metrics_of, weights_of


def _recipe(directory: Path, **train_keys: Any) -> Recipe:
    """A run of 8 steps over two epochs that decodes every second one; its target has weights."""
    write_tiny_store(directory, documents=10, validation=3)
    tiny_model("llama").save_pretrained(directory / "target")
    keys: dict[str, Any] = {"epochs": 2, "decode_every": 2, "decode_tokens": 6, "save_every": 3}
    recipe = tiny_recipe(directory, **{**keys, **train_keys})
    return dataclasses.replace(recipe, decode=decode_config(budget=6, top_k=2, depth=3))


def _decodings(recipe: Recipe) -> list[dict[str, Any]]:
    return [line for line in metrics_of(recipe) if "decoded_tau" in line]


def _decoded(tau: float) -> Decoded:
    count = round(1000 * tau)
    return Decoded(length=AcceptanceLength(committed=count, uncut=count, steps=1000), tokens=1, seconds=0.0)


def _scripted(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Decoding answers with the next of `taus`."""
    left = iter(taus)

    def decode(self: Selection, head: Any) -> Decoded:
        return _decoded(next(left))

    monkeypatch.setattr(Selection, "decode", decode)


@pytest.mark.slow
def test_the_decoded_tau_is_what_the_decoder_gets_with_the_saved_head(tmp_path: Path) -> None:
    # A barely trained head among 120 children of the root: some guess is right.
    recipe = dataclasses.replace(_recipe(tmp_path, keep="last"), decode=decode_config(budget=121, top_k=120, depth=1))
    train(recipe)
    lines = _decodings(recipe)
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert all(line["estimated_tau"] is not None for line in lines)
    head = load_head(recipe.head_dir)
    head.config.target_identity = None
    decoder = SpeculativeDecoder.from_pretrained(Target.from_config(recipe.target), head, decode=recipe.decode)
    accepted = steps = committed = 0
    store = FeatureStore.open(recipe.store_dir)
    for number in store.split("validation"):
        ids_T, mask_T = store.ids_and_mask(number)
        prompt = ids_T[: int(mask_T.nonzero()[0])]
        (stats,) = decoder.generate(prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=2).stats or ()
        accepted, steps = accepted + sum(stats.accepted), steps + stats.verify_steps
        committed += stats.new_tokens - 1
    assert accepted > 0
    assert lines[-1]["decoded_verify_steps"] == steps
    assert lines[-1]["decoded_tau"] == pytest.approx(committed / steps)
    assert lines[-1]["decoded_tau_raw"] == pytest.approx((accepted + steps) / steps)
    assert lines[-1]["decoded_tau"] < lines[-1]["decoded_tau_raw"], "the limit of six tokens cut a block"


@pytest.mark.slow
def test_the_best_head_is_kept_and_the_last_one_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = _recipe(tmp_path)
    _scripted(monkeypatch, [1.2, 1.5, 1.5, 1.4])
    train(recipe)
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert (record["step"], record["head_step"], record["decoded"]["tau"]) == (8, 4, 1.5)
    assert [path.name for path in recipe.train_dir.glob("best-*")] == ["best-00000004"]
    best = load_head(recipe.train_dir / "best-00000004").state_dict()
    last = load_head(recipe.train_dir / "checkpoint-00000008" / "head").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in weights_of(recipe).items())
    assert not torch.equal(best["fc.weight"], last["fc.weight"])
    train(with_train(recipe, keep="last"))
    assert all(torch.equal(weight, last[name]) for name, weight in weights_of(recipe).items())
    assert json.loads((recipe.head_dir / "training.json").read_text())["head_step"] == 8
    text = (recipe.train_dir / "tau.txt").read_text()
    assert "       4        1.500" in text
    assert text.count("best") == 1
    drawing = (recipe.train_dir / "tau.svg").read_text()
    assert drawing.count("<polyline") == 2
    assert drawing.count("<circle") == 5, "four decodings, drawn as circles, and the legend's"
    assert "decoded tau: 4, 1.5<" in drawing


@pytest.mark.slow
def test_patience_ends_the_run_and_a_second_start_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _recipe(tmp_path, epochs=4, patience=2)
    _scripted(monkeypatch, [1.2, 1.5, 1.5, 1.4])
    train(recipe)
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert (record["step"], record["head_step"], record["stopped_early"]) == (8, 4, True)
    assert "stopped at step 8 of 16: 2 decodings without a higher tau" in capsys.readouterr().err
    train(recipe)
    assert "is complete" in capsys.readouterr().err
    _scripted(monkeypatch, [1.6, 1.3, 1.3, 1.3])
    train(with_train(recipe, patience=None))
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert (record["step"], record["head_step"], record["stopped_early"]) == (16, 10, False)


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [5, 7])
def test_a_kill_does_not_lose_which_was_best(
    killed_after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taus = {2: 1.5, 4: 1.7, 6: 1.2, 8: 1.3}
    real = Selection.decode
    current: list[int] = []

    def decode(self: Selection, head: Any) -> Decoded:
        real(self, head)
        return _decoded(taus[current[-1]])

    def remembered(training: Any, *arguments: Any) -> None:
        current.append(training.progress.step)
        real_decode(training, *arguments)

    real_decode = loop._decode
    monkeypatch.setattr(Selection, "decode", decode)
    monkeypatch.setattr(loop, "_decode", remembered)
    whole, killed = _recipe(tmp_path / "whole"), _recipe(tmp_path / "killed")
    train(whole)
    _interrupt_after(killed_after, killed)
    train(killed)
    assert [line["decoded_tau"] for line in _decodings(killed)] == [1.5, 1.7, 1.2, 1.3]
    assert [path.name for path in killed.train_dir.glob("best-*")] == ["best-00000004"]
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(killed)[name]), name


@pytest.mark.slow
def test_other_prompts_start_the_comparison_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _recipe(tmp_path, max_steps=4)
    _scripted(monkeypatch, [1.9, 1.8, 1.2, 1.3])
    train(recipe)
    capsys.readouterr()
    train(with_train(recipe, max_steps=8, decode_tokens=5))
    assert "earlier decodings cannot be compared" in capsys.readouterr().err
    assert json.loads((recipe.head_dir / "training.json").read_text())["decoded"] | {"measure": ""} == {
        "step": 8,
        "tau": 1.3,
        "measure": "",
    }


@pytest.mark.slow
def test_prompts_may_come_from_a_file(tmp_path: Path) -> None:
    recipe = _recipe(
        tmp_path,
        decode_every=None,
        eval_every=4,
        decode_prompts=(str(write_conversations(tmp_path / "prompts.jsonl", 3)),),
    )
    train(recipe)
    assert [line["step"] for line in _decodings(recipe)] == [4, 8]


def test_mistakes_are_explained(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path)
    for changes, message in (
        ({"decode_every": None, "patience": 3}, r"train.patience is 3, but nothing is decoded"),
        ({"decode_count": 0}, r"train.decode_count is 0"),
        ({"decode_tokens": 10**6}, r"none of the 3 held-out prompts leaves room"),
    ):
        with pytest.raises(EagleError, match=message):
            train(with_train(recipe, **changes))
    with pytest.raises(EagleError, match=r'decode.drafter is "ngram", which drafts without the head'):
        train(dataclasses.replace(recipe, decode=decode_config(drafter="ngram")))
    manifest = recipe.store_dir / "manifest.json"
    values = json.loads(manifest.read_text())
    values["target"] |= {"model": recipe.target.model, "weights_sha256": "0" * 64}
    manifest.write_text(json.dumps(values))
    with pytest.raises(EagleError, match=r"is not the one whose features are trained on \(weights_sha256 is "):
        train(recipe)


def test_the_earlier_of_equals_stays_best() -> None:
    progress = Progress(identity={})
    taus = [1.2, 1.4, 1.4, 1.3]
    outcomes = []
    for step, tau in enumerate(taus, start=1):
        progress.step = step
        decoded = _decoded(tau)
        outcomes.append(selection.judge(progress, decoded, measure="m"))
    assert outcomes == [True, True, False, False]
    assert (progress.best["step"], progress.without_gain) == (2, 2)


@pytest.mark.slow
def test_without_decoding_the_last_head_counts_not_the_best_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _recipe(tmp_path, max_steps=4)
    _scripted(monkeypatch, [1.9, 1.2])
    train(recipe)
    capsys.readouterr()
    train(with_train(recipe, max_steps=8, decode_every=0, decode_tokens=64))
    assert "nothing is decoded any more: the last head counts" in capsys.readouterr().err
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert (record["step"], record["head_step"], record["decoded"]) == (8, 8, {})
    last = load_head(recipe.train_dir / "checkpoint-00000008" / "head").state_dict()
    assert all(torch.equal(weight, last[name]) for name, weight in weights_of(recipe).items())
    assert not list(recipe.train_dir.glob("best-*")), "no checkpoint names it any more"


def test_decoded_documents_are_spread_over_the_validation_split(tmp_path: Path) -> None:
    write_tiny_store(tmp_path, documents=12, validation=6)
    tiny_model("llama").save_pretrained(tmp_path / "target")
    recipe = tiny_recipe(tmp_path, decode_every=1, decode_tokens=6, decode_count=3)
    store = FeatureStore.open(recipe.store_dir)
    selection = Selection(recipe, store, Accelerator(cpu=True))
    prompts = [store.ids_and_mask(number)[0][:4].tolist() for number in (6, 8, 10)]
    assert [list(prompt) for prompt in selection._own] == prompts
