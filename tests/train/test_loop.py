"""The training run as a whole: it learns, it says what is wrong, it records what it did."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import TrainConfig
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.train import checkpoints, loop, run
from eagle.train.loop import train
from eagle.train.schedule import learning_rate, total_steps
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_step import metrics_of


@pytest.mark.slow
def test_a_tiny_store_is_learnt_by_heart(tmp_path: Path) -> None:
    """Its two documents are also what it is validated on: nearly every draft agrees, and the chain's tau says so."""
    write_tiny_store(tmp_path, documents=2, validation=0)
    manifest = tmp_path / "run" / "features" / "manifest.json"
    values = json.loads(manifest.read_text())
    recipe = tiny_recipe(
        tmp_path, epochs=150, batch_size=2, lr=1e-2, classification_weight=1.0, noise=0.0, log_every=50,
        eval_every=1000, save_every=1000,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureStore, "split", lambda store, name: [0, 1])
        train(recipe)
    last = metrics_of(recipe)[-1]
    assert values["counts"]["train"] == 2
    assert last["val_top1_agreement"] > 0.95
    assert last["val_acceptance"][0] > 0.8
    first = next(line for line in metrics_of(recipe) if "loss" in line)
    assert last["val_regression"] < 0.2 * first["regression"]


def test_the_final_folder_holds_a_loadable_head_and_how_it_came_to_be(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=2)
    assert train(recipe) == recipe.head_dir
    head = load_head(recipe.head_dir)
    assert head.config.target_identity == {"model": "tiny", "hidden_size": 32}
    record = json.loads((recipe.head_dir / "training.json").read_text())
    assert record["step"] == 8
    assert record["metrics"]["val_tau"] >= 1
    assert record["recipe"]["train"]["epochs"] == 2
    assert "torch" in record["versions"]
    lines = metrics_of(recipe)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]
    losses, rest = {"loss", "regression", "classification"}, {"epoch", "lr", "grad_norm", "time"}
    assert {*losses, *rest, "step", "tokens_per_second", "supervised_tokens", "kernels"} == set(lines[0])
    assert lines[0]["kernels"].keys() == {"draft_loss"}
    assert json.loads((recipe.train_dir / "recipe.json").read_text())["train"]["epochs"] == 2


def test_a_finished_run_says_so_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1)
    train(recipe)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    train(recipe)
    assert "is complete" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_the_log_window_averages_over_supervised_tokens(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    each = tiny_recipe(tmp_path, epochs=1)
    train(each)
    lines = [line for line in metrics_of(each) if "loss" in line]
    write_tiny_store(tmp_path / "b")
    whole = tiny_recipe(tmp_path / "b", epochs=1, log_every=10)
    train(whole)
    (line,) = [line for line in metrics_of(whole) if "loss" in line]
    tokens = sum(each["supervised_tokens"] for each in lines)
    assert line["supervised_tokens"] == tokens
    expected = sum(each["loss"] * each["supervised_tokens"] for each in lines) / tokens
    assert line["loss"] == pytest.approx(expected)


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path)
    first = run.build_head(recipe, hidden_size=32).state_dict()
    torch.rand(7)
    again = run.build_head(recipe, hidden_size=32).state_dict()
    other = run.build_head(with_train(recipe, seed=1), hidden_size=32).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_features_that_are_not_finite_stop_the_run_and_are_named(tmp_path: Path) -> None:
    def spoil(number: int, features_TH: torch.Tensor) -> None:
        if number == 3:
            features_TH[5, 0] = float("nan")

    write_tiny_store(tmp_path, spoil=spoil)
    recipe = tiny_recipe(tmp_path, save_every=1)
    with pytest.raises(EagleError) as caught:
        train(recipe)
    message = str(caught.value)
    assert re.search("features of doc-3 in .* are not finite", message)
    step = int(message.split("training stopped at step ")[1].split(":")[0])
    saved = sorted(path.name for path in recipe.train_dir.glob("checkpoint-*"))
    if step > 1:
        assert saved[-1] == f"checkpoint-{step - 1:08d}"
        assert saved[-1] in message
    assert not recipe.head_dir.exists()


def test_a_diverging_run_stops_before_its_weights_are_spoilt(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, lr=1e30, clip="none", warmup_steps=0)
    with pytest.raises(EagleError, match=r"training stopped at step \d+: .*doc-\d.*lower train.lr.*no checkpoint"):
        train(recipe)
    assert not recipe.head_dir.exists()


def test_mistakes_are_explained(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(EagleError, match=r"eagle features"):
        train(recipe)
    write_tiny_store(tmp_path / "mute", supervised=False)
    with pytest.raises(EagleError, match=r"none of the 8 training documents .* supervised"):
        train(tiny_recipe(tmp_path / "mute"))
    write_tiny_store(tmp_path / "short", tokens=lambda number: 2)
    with pytest.raises(EagleError, match=r"no training document of 3 tokens"):
        train(tiny_recipe(tmp_path / "short"))
    write_tiny_store(tmp_path / "good")
    for key, value in {
        "batch_size": 0,
        "lr": -1.0,
        "max_steps": 0,
        "noise": -0.1,
        "lr ": float("nan"),
        "betas": (0.9, 1.0),
        "data_fraction": 1.5,
    }.items():
        with pytest.raises(EagleError, match=rf"train.{key.strip()} is"):
            train(tiny_recipe(tmp_path / "good", **{key.strip(): value}))
    with pytest.raises(EagleError, match=r"features of size 48, .* has hidden size 32"):
        run.build_head(tiny_recipe(tmp_path / "good"), hidden_size=48)


def test_a_share_of_the_documents_is_part_of_every_larger_one(tmp_path: Path) -> None:
    write_tiny_store(tmp_path, documents=18)
    recipe = tiny_recipe(tmp_path, epochs=1, batch_size=2)
    store = FeatureStore.open(recipe.store_dir)
    shares = [with_train(recipe, data_fraction=share) for share in (0.01, 0.25, 0.5, 1.0)]
    chosen = [run.training_documents(store, share.train) for share in shares]
    assert [len(documents) for documents in chosen] == [1, 4, 8, 16]
    assert chosen[-1] == store.split("train")
    for smaller, larger in pairwise(chosen):
        assert set(smaller) < set(larger)
    assert chosen[1] != chosen[-1][:4]
    train(shares[1])
    assert metrics_of(recipe)[-1]["step"] == 2
    with pytest.raises(EagleError, match=r"train\.data_fraction was 0\.25, is 0\.5"):
        train(with_train(shares[2], max_steps=2))


def test_a_store_without_validation_documents_trains_all_the_same(tmp_path: Path) -> None:
    write_tiny_store(tmp_path, validation=0)
    recipe = tiny_recipe(tmp_path, epochs=1)
    train(recipe)
    assert all("val_loss" not in line for line in metrics_of(recipe))
    assert recipe.head_dir.is_dir()


def _rates(total: int = 10, **config: Any) -> list[float]:
    settings = TrainConfig(lr=1.0, **config)
    return [learning_rate(step, total=total, config=settings) for step in range(total)]


def test_learning_rates() -> None:
    assert _rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert set(_rates(warmup_steps=0)) == {1.0}
    assert _rates(warmup_steps=0, schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])
    cosine = _rates(warmup_steps=2, schedule="cosine")
    assert cosine[2] == 1.0
    assert cosine[6] == pytest.approx(0.5)
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert total_steps(TrainConfig(epochs=3), 7) == 21
    assert total_steps(TrainConfig(epochs=3, max_steps=5), 7) == 5
    assert total_steps(TrainConfig(epochs=3, max_steps=50), 7) == 21


@pytest.mark.slow
@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_trackers_write_below_the_train_folder(tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1, trackers=(tracker,))
    train(recipe)
    pattern = {"tensorboard": "**/events.out.tfevents*", "wandb": "wandb/offline-run-*/run-*.wandb"}[tracker]
    assert list(recipe.train_dir.glob(pattern))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "target"}, "nothing beside the output folder"


def test_what_a_kill_left_half_written_is_cleared_at_the_start(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1)
    train(recipe)
    recipe.head_dir.rename(recipe.head_dir.with_name(".head.7.old"))  # killed between the two renames
    (recipe.head_dir.with_name(".head.7.tmp")).mkdir()
    for name in (".best-00000004.7.tmp", ".checkpoint-00000009.tmp"):
        (recipe.train_dir / name).mkdir()
    (recipe.train_dir / ".recipe.json.7.tmp").write_text("{")
    before = (recipe.train_dir / "metrics.jsonl").stat().st_mtime_ns
    train(recipe)
    assert not [*recipe.train_dir.glob(".*"), *(tmp_path / "run").glob(".*")]
    assert load_head(recipe.head_dir)
    assert (recipe.train_dir / "metrics.jsonl").stat().st_mtime_ns == before, "the head was put back, not trained again"


def test_validation_documents_are_spread_over_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[list[int]] = []
    real = loop.validate

    def validate(head: Any, source: Any, documents: list[int], **options: Any) -> Any:
        chosen.append(documents)
        return real(head, source, documents, **options)

    monkeypatch.setattr(loop, "validate", validate)
    write_tiny_store(tmp_path, documents=12, validation=6)
    train(tiny_recipe(tmp_path, epochs=1, max_steps=1, eval_documents=3))
    assert chosen == [[6, 8, 10]]


def test_folders_of_other_names_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    write_tiny_store(tmp_path)
    recipe = tiny_recipe(tmp_path, epochs=1, save_every=1, keep_checkpoints=1)
    others = [recipe.train_dir / name for name in ("checkpoint-mine", "checkpoint-00000001.copy", "best-mine")]
    for other in others:
        other.mkdir(parents=True)
    train(recipe)
    assert all(other.is_dir() for other in others)
    assert checkpoints.newest(recipe.train_dir) == recipe.train_dir / "checkpoint-00000004"
    assert len(list(recipe.train_dir.glob("checkpoint-*"))) == 3
