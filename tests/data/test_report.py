"""The data report: figures against their definitions, from a store as from the target."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle.cli.main import main
from eagle.config import DataConfig, FeaturesConfig, Recipe, TargetConfig
from eagle.data.duplicates import near_duplicates, signature
from eagle.data.features import extract
from eagle.data.prepare import load_prepared, prepare
from eagle.data.regenerate import regenerate
from eagle.data.report import report, vocabulary_coverage
from eagle.errors import EagleError
from eagle.target.target import Target
from tests.tiny import save_tiny_target


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    answers = [f"the cat said hello to the dog {i} times and the dog sat on the mat {i * i}" for i in range(12)]
    rows = [{"source": f"s{i % 2}", "prompt": f"what is {i}?", "response": answer} for i, answer in enumerate(answers)]
    rows.append({"source": "s0", "prompt": "what is 3?", "response": answers[3]})
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": str(i), **row}) + "\n" for i, row in enumerate(rows))
    )
    recipe = Recipe(
        output_dir=str(tmp_path / "out"),
        target=TargetConfig(model=str(save_tiny_target(tmp_path / "target")), device="cpu"),
        data=DataConfig(
            sources=(str(tmp_path / "rows.jsonl"),), max_len=40, validation_fraction=0.3, report_documents=10
        ),
        features=FeaturesConfig(dtype="float32", batch_tokens=200),
    )
    prepare(recipe)
    return recipe


def test_the_figures_are_what_they_are_said_to_be(recipe: Recipe) -> None:
    figures = report(recipe)
    assert json.loads((recipe.data_dir / "report.json").read_text()) == figures
    data, manifest = load_prepared(recipe.data_dir)
    target = Target.from_config(recipe.target)
    for name in ("s0", "s1"):
        rows = [row for row in data if row["source"] == name]
        nll = entropy = greedy = count = 0.0
        for place in (i * len(rows) // 5 for i in range(5)):
            ids_1T = torch.tensor([rows[place]["input_ids"]])
            p_TV = target.logits(target.features(ids_1T)[0])[0].log_softmax(-1)
            for i, supervised in enumerate(rows[place]["loss_mask"]):
                if supervised:
                    p_V = p_TV[i - 1]
                    nll -= float(p_V[ids_1T[0, i]])
                    entropy -= float((p_V.exp() * p_V).sum())
                    greedy += bool(p_V.argmax() == ids_1T[0, i])
                    count += 1
        row = figures["sources"][name]
        assert (row["documents"], row["documents_scored"], row["tokens_scored"]) == (len(rows), 5, count)
        assert row["nll"] == pytest.approx(nll / count, rel=1e-4)
        assert row["entropy"] == pytest.approx(entropy / count, rel=1e-4)
        assert row["greedy_share"] == pytest.approx(greedy / count)
    assert figures["duplicates"]["exact"] == 1
    assert figures["duplicates"]["near_answers"] >= 1
    assert figures["truncation"]["samples_cut"] == manifest["counts"]["cut"] > 0
    assert figures["draft_vocabulary"].keys() == {"384"}


def test_a_store_gives_the_same_report_without_the_target(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    from_target = report(recipe)
    extract(recipe)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a target was loaded")

    monkeypatch.setattr(Target, "from_config", never)
    from_store = report(recipe)
    for name, row in from_store["sources"].items():
        assert row == pytest.approx(from_target["sources"][name], rel=1e-4)
    assert from_target.pop("features_from") != from_store.pop("features_from")
    del from_target["sources"], from_store["sources"]
    assert from_target == from_store


def test_a_store_of_another_target_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    """It has the shape and the tokenizer of the recipe's."""
    extract(recipe)
    other = TargetConfig(model=str(save_tiny_target(tmp_path / "other", seed=1)), device="cpu")
    with pytest.raises(
        EagleError, match=r"the feature store .* does not match: .*/target .*but target.model is .*/other"
    ):
        report(dataclasses.replace(recipe, target=other))


def test_what_the_target_said_itself_is_on_its_policy(recipe: Recipe, tmp_path: Path) -> None:
    """Greedy answers of the target score lower than the file's (much of a random model's is lost in text, though)."""
    settings = dataclasses.replace(
        recipe.data.regenerate, prompts=recipe.data.sources, temperatures=(0.0,), max_prompt_tokens=30, max_new_tokens=8
    )
    regenerate(dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, regenerate=settings)))
    rows = [json.loads(line) for line in (Path(recipe.output_dir) / "regenerated.jsonl").read_text().splitlines()]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({**row, "source": "own"}) + "\n" for row in rows))
    own = (str(tmp_path / "own.jsonl"), *recipe.data.sources)
    data = dataclasses.replace(recipe.data, sources=own, report_documents=None, max_len=100, allow_skipped=0.5)
    mixed = dataclasses.replace(recipe, output_dir=str(tmp_path / "mixed"), data=data)
    prepare(mixed)
    scores = report(mixed)["sources"]
    assert scores["own"]["nll"] < scores["s0"]["nll"] - 1
    assert scores["own"]["greedy_share"] > 10 * scores["s0"]["greedy_share"]


def test_coverage_is_of_the_most_frequent_training_tokens() -> None:
    train_V, validation_V = torch.zeros(5000, dtype=torch.int64), torch.zeros(5000, dtype=torch.int64)
    train_V[:1024], train_V[4000:] = 3, 1
    validation_V[4999], validation_V[0] = 1, 3
    shares = vocabulary_coverage(train_V, validation_V)
    assert list(shares) == ["1024", "2048", "4096", "5000"]
    assert shares["1024"] == {"train": pytest.approx(3072 / 4072), "validation": 0.75}
    assert shares["2048"] == {"train": 1.0, "validation": 1.0}
    nothing = vocabulary_coverage(train_V, torch.zeros(5000, dtype=torch.int64))
    assert nothing["1024"]["validation"] is None


def test_near_duplicates_are_found_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 5000, size=200) for _ in range(300)]
    edited = []
    for text in texts[:50]:
        copy = text.copy()
        copy[rng.integers(0, 200, size=2)] = 7  # 10 of 196 runs differ: similarity 0.9
        edited.append(copy)
    third = [np.concatenate([text[:66], rng.integers(0, 5000, size=134)]) for text in texts[50:100]]
    found = near_duplicates(np.stack([signature(text) for text in (*texts, *edited, *third)]))
    assert not found[:300].any()
    assert found[300:350].mean() > 0.9
    assert not found[350:].any()
    short = near_duplicates(np.stack([signature(np.array(ids)) for ids in ([3], [4], [3])]))
    assert short.tolist() == [False, False, True]


def test_the_command_prints_and_writes_it(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(recipe.output_dir) / "recipe.json"
    from eagle.config import as_dict

    path.write_text(json.dumps(as_dict(recipe)))
    assert main(["data", "report", str(path)]) == 0
    printed = capsys.readouterr().err
    assert "off-policy score" in printed
    assert "draft vocabulary" in printed
    assert (recipe.data_dir / "report.json").is_file()
