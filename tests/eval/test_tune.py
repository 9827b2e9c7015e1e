"""`eagle tune` on a tiny target: what it measures, what it keeps, and that decoding and evaluation take it from there."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from eagle.checkpoint import save_head
from eagle.cli import main
from eagle.config import Recipe, read_recipe
from eagle.decode import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval import harness
from eagle.eval import tune as tuning
from eagle.eval.confirm import Measured
from eagle.eval.cost import DraftCost, TargetCost, Timing
from eagle.eval.statistics import Estimate
from eagle.eval.tree_search import NO_DRAFTING, Prices
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.target import Target
from eagle.tuning import TreeSettings, read_tuned
from tests.recipes import write_recipe

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe that says nothing of the tree, with a random head in its place."""
    path = write_recipe(tmp_path)
    text = path.read_text().replace("\n  depth: 3", "\n  depth: null").replace("budget: 6", "budget: null")
    path.write_text(text.replace("top_k: 2", "top_k: null"))
    rows = [{"question_id": i, "turns": [f"hello to the cat {i}"]} for i in range(6)]
    (tmp_path / "tuning.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = read_recipe(path)
    torch.manual_seed(0)
    save_head(EagleHead(EagleHeadConfig.for_target(Target.from_config(recipe.target).config)), recipe.head_dir)
    return tmp_path


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    sizes = ["--tune.count=6", "--tune.max_new_tokens=8", "--tune.confirm=1", f"--tune.prompts=[{folder}/tuning.jsonl]"]
    return read_recipe(folder / "recipe.yaml", [*sizes, *overrides])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are given instead of timed, and fewer trees are searched."""

    def prices(*args: object) -> Prices:
        timing = Timing(median=10.0, low=10.0, high=10.0, samples=1)
        batch = args[4]
        assert isinstance(batch, int)
        return Prices(
            batch=batch,
            target=TargetCost(batch=batch, points={1: timing, 60: timing}),
            draft=DraftCost(batch=batch, points={(1, 1): timing}),
            rest_ms=1.0,
            plain_rest_ms=0.0,
        )

    monkeypatch.setattr(tuning, "_prices", prices)
    monkeypatch.setattr(tuning, "TOP_KS", (1, 2))


def fastest(monkeypatch: pytest.MonkeyPatch, wanted: str) -> list[list[TreeSettings]]:
    """Lets the candidate of this name measure the fastest; returns the lists of candidates that come by."""
    seen = []

    def confirm(
        decoder: object, drafter: object, prompts: object, candidates: list[TreeSettings], **how: object
    ) -> list[Measured]:
        seen.append(list(candidates))
        ratio = Estimate(median=1.0, low=1.0, high=1.0, pooled=1.0, samples=3)
        return [
            Measured(tree=tree, tau=1.0, tokens_per_second=2.0 if str(tree) == wanted else 1.0, speedup=ratio)
            for tree in candidates
        ]

    monkeypatch.setattr(tuning, "confirm", confirm)
    return seen


@pytest.mark.slow
def test_tuning_measures_everything_and_the_command_writes_it_beside_the_head(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "measure_target", partial(tuning.measure_target, nodes=(1, 8, 60), repeats=1))
    monkeypatch.setattr(tuning, "measure_draft", partial(tuning.measure_draft, repeats=1))
    monkeypatch.setattr(tuning, "TOP_KS", (1, 2, 4))
    arguments = [
        "--tune.count=4",
        "--tune.max_new_tokens=6",
        "--tune.confirm=1",
        f"--tune.prompts=[{folder}/tuning.jsonl]",
    ]
    assert main(["tune", str(folder / "recipe.yaml"), *arguments]) == 0
    out, err = capsys.readouterr()
    assert "no drafting" in out
    assert "published" in out
    assert "EAGLE-1 static" in out
    assert out.count("*") >= 2, "the heading's and one choice"
    assert "tuned.json holds the choice" in " ".join(err.split())
    (entry,) = read_tuned(recipe_in(folder).head_dir)
    (body,) = entry.measured["batches"]
    chosen = [row for row in body["candidates"] if row["chosen"]]
    assert len(chosen) == 1
    assert chosen[0]["tokens_per_second"] == max(row["tokens_per_second"] for row in body["candidates"])
    assert TreeSettings(**chosen[0]["tree"]) == entry.choices[0].tree
    assert {"target_ms", "ms"} & set(body["target"]["points"][0])
    assert body["by_budget"]
    assert body["calibration"]["nodes"]
    assert entry.measured["head_sha256"]
    assert (entry.engine, entry.dtype) == ("eager", "float32")


def test_the_fastest_candidate_is_kept_for_each_batch_and_temperature_and_decoding_takes_it(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fastest(monkeypatch, "chain of 4")
    recipe = recipe_in(folder, "--tune.batches=[1,2]", "--tune.sampling=['T=0','T=1']")
    tuned = tuning.tune(recipe)
    assert [(one.batch, one.temperature) for one in tuned.choices] == [(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)]
    assert {str(one.tree) for one in tuned.choices} == {"chain of 4"}
    for candidates in seen:
        assert candidates[0] == NO_DRAFTING
        assert {"60 nodes, top-k 10, 6 levels", "EAGLE-1's static tree", "chain of 4"} <= set(map(str, candidates))
        assert len(candidates) == len(set(candidates))
    decoder = SpeculativeDecoder.from_pretrained(Target.from_config(recipe.target), recipe.head_dir)
    out = decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
    assert out.stats[0].tree == "tuned: chain of 4"


def test_a_recipe_that_gives_a_tree_itself_is_told_so_and_a_folder_that_cannot_be_written_is_explained(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fastest(monkeypatch, "no drafting")
    tuning.tune(recipe_in(folder))
    assert "itself gives a tree" not in capsys.readouterr().err
    tuning.tune(recipe_in(folder, "--decode.budget=8"))
    assert "itself gives a tree" in capsys.readouterr().err

    def full(*args: object, **options: object) -> Path:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as late:
        late.setattr(tuning, "write_tuned", full)
        with pytest.raises(EagleError, match=r"Read-only file system\); copy the head"):
            tuning.tune(recipe_in(folder))
    monkeypatch.setattr(tuning, "TemporaryFile", full)
    monkeypatch.setattr(tuning.Target, "from_config", lambda *args: pytest.fail("began to measure"))
    with pytest.raises(EagleError, match=r"Read-only file system\); copy the head"):
        tuning.tune(recipe_in(folder))


def test_an_evaluation_compares_the_tuned_tree_with_the_published_one_and_knows_a_new_tuning(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in(folder, "--eval.methods=[plain,eagle2,tuned]", "--eval.max_new_tokens=5", "--eval.ledger=off")
    with pytest.raises(EagleError, match=r"method tuned: .* run eagle tune"):
        harness.evaluate(recipe)
    fastest(monkeypatch, "no drafting")
    tuning.tune(recipe)
    first = harness.evaluate(recipe)
    body = first["settings"]["T=0"]
    assert body["errors"] == []
    assert body["methods"]["tuned"]["overall"]["exact"]["equal"] == 4
    lines = [json.loads(line) for line in (recipe.eval_dir / "answers.jsonl").read_text().splitlines()[1:]]
    assert {name: line["answers"][name]["tree"] for line in lines for name in ("eagle2", "tuned")} == {
        "eagle2": "published: 60 nodes, top-k 10, 6 levels",
        "tuned": "tuned: no drafting",
    }
    fastest(monkeypatch, "chain of 4")
    tuning.tune(recipe)
    assert harness.evaluate(recipe)["identity"] != first["identity"]


def test_without_prompts_the_held_out_conversations_are_taken_or_what_the_evaluation_leaves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle.chat import prompt_ids
    from eagle.data.prepare import load_prepared, prepare
    from eagle.eval.tune_prompts import tuning_prompts

    recipe = recipe_in(folder, "--tune.prompts=[]", "--eval.limit=1", "--data.validation_fraction=0.3")
    target = Target.from_config(recipe.target)
    with pytest.raises(EagleError, match=r"there are 0 prompts to tune with \(0 are not evaluated"):  # two, of one text
        tuning_prompts(recipe, target)
    evaluated = dataclasses.replace(recipe.eval, prompts=(str(folder / "tuning.jsonl"),), limit=2)
    left = tuning_prompts(dataclasses.replace(recipe, eval=evaluated), target)
    every = [prompt_ids(target.tokenizer, [{"role": "user", "content": f"hello to the cat {i}"}]) for i in range(6)]
    assert len(left) == 4
    assert all(ids in every for ids in left)
    # Named prompts that are evaluated too are left out, whatever their ids.
    named = dataclasses.replace(evaluated, prompts=(str(folder / "copy.jsonl"),))
    (folder / "copy.jsonl").write_text((folder / "tuning.jsonl").read_text())
    both = dataclasses.replace(recipe.tune, prompts=(str(folder / "tuning.jsonl"),))
    assert tuning_prompts(dataclasses.replace(recipe, eval=named, tune=both), target) == left
    assert "2 of tune.prompts are evaluated too and left out" in capsys.readouterr().err
    prepare(recipe)
    held_out = tuning_prompts(recipe, target)
    data, _ = load_prepared(recipe.data_dir)
    rows = [row for row in data if row["split"] == "validation"]
    assert len(rows) > 1
    assert held_out == [row["input_ids"][: row["loss_mask"].index(True)] for row in rows][:6]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--tune.count=1", "tune.count is 1, expected 2"),
        ("--tune.batches=[0]", r"tune.batches is \[0\]"),
        ("--tune.batches=[4]", "only half of the 6 prompts"),
        ("--decode.drafter=chain", "what is tuned is eagle2's tree"),
        ("--decode.rule=rejection", "what is tuned is eagle2's tree"),
        ("--tune.sampling=[warm]", "T=NUMBER"),
        ("--output_dir=/nowhere", "train it first"),
    ],
)
def test_what_cannot_be_tuned_is_explained(folder: Path, override: str, said: str) -> None:
    with pytest.raises(EagleError, match=said):
        tuning.tune(recipe_in(folder, override))
