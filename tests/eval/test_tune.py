"""`eagle tune` on a tiny target: what it measures, what it keeps, and that decoding and evaluation take it from there."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset

from eagle.cli.main import main
from eagle.config import Recipe, read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.make import make_drafter
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuning import TreeSettings, read_tuned
from eagle.errors import EagleError
from eagle.eval import harness
from eagle.eval.batch_answer import BatchAnswer
from eagle.eval.ledger.cost import DraftCost, TargetCost, Timing
from eagle.eval.settings import parse_setting
from eagle.eval.statistics import Estimate
from eagle.eval.tuner import prompts as tune_prompts
from eagle.eval.tuner import tune as tuning
from eagle.eval.tuner.confirm import Measured
from eagle.eval.tuner.replay import Replay
from eagle.eval.tuner.tree_search import NO_DRAFTING, Prices
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.recipes import write_recipe
from tests.tiny import tiny_model

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe that says nothing of the tree, with a random head in its place."""
    path = write_recipe(tmp_path)
    recipe = yaml.safe_load(path.read_text())
    recipe["decode"]["drafter"] = {}
    path.write_text(yaml.safe_dump(recipe))
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
        ratio = Estimate(median=1.0, low=1.0, high=1.0, pooled=1.0, samples=3, units=3, unit="group")
        return [
            Measured(
                tree=tree, tau=1.0, tau_raw=1.0, tokens_per_second=2.0 if str(tree) == wanted else 1.0, speedup=ratio
            )
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
    assert (entry.engine, entry.dtype) == ("compiled", "float32")


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_searched_on_one_half_of_the_prompts_is_confirmed_on_the_other(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest(monkeypatch, "no drafting")
    whole: list[tuple[Replay, list[list[int]]]] = []
    priced: list[Replay] = []
    confirmed: list[list[list[int]]] = []

    def recorded(*arguments: Any) -> Any:
        replay, counts, answered = honest["_recorded"](*arguments)
        whole.append((replay, answered))
        return replay, counts, answered

    def searched(replay: Replay, *rest: Any) -> Any:
        priced.append(replay)
        return honest["search"](replay, *rest)

    def forecasted(tree: TreeSettings, replay: Replay, *rest: Any) -> Any:
        priced.append(replay)
        return honest["forecast"](tree, replay, *rest)

    def confirming(decoder: object, drafter: object, prompts: list[list[int]], *rest: Any, **how: Any) -> Any:
        confirmed.append(list(prompts))
        return honest["confirm"](decoder, drafter, prompts, *rest, **how)

    stubs = {"_recorded": recorded, "search": searched, "forecast": forecasted, "confirm": confirming}
    honest = {name: getattr(tuning, name) for name in stubs}
    for name, stub in stubs.items():
        monkeypatch.setattr(tuning, name, stub)
    tuning.tune(recipe_in(folder))
    ((replay, answered),) = whole
    assert len(answered) == 6
    assert len(replay.rows) == 6
    ends = np.cumsum([0, *replay.rows])
    chooses = np.concatenate([replay.gains_PRD[ends[row] : ends[row + 1]] for row in (0, 2, 4)])
    assert len(priced) > 2
    for one in priced:
        assert one.rows == replay.rows[0::2]
        assert np.array_equal(one.gains_PRD, chooses), "the prompts that confirm have a say in the choice"
    assert confirmed == [answered[1::2]]


def test_what_lies_outside_the_forwards_is_what_further_cycles_take_without_the_prompts_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter reads a whole prompt once an answer, however short the answer."""
    target = Target.from_pretrained(tiny_model())
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig.for_target(target.config))
    drafter = make_drafter(target, decode_config().as_published(), head=head)
    assert isinstance(drafter, HeadDrafter)

    def said(
        decoder: SpeculativeDecoder, rows: list[list[int]], first: int, setting: object, limit: int
    ) -> BatchAnswer:
        cycles = limit - 1
        once, draft, host = (100.0, 7.0, 2.0) if decoder.drafter is not None else (40.0, 0.0, 1.5)
        stats = DecodeStats(
            accepted=[0] * cycles,
            prefill_ms=50.0,
            draft_ms=once + draft * cycles,
            verify_ms=20.0 * cycles,
            total_ms=50.0 + once + (draft + 20.0 + host) * cycles,
        )
        return BatchAnswer(tokens=[[0] * limit] * len(rows), stats=[stats] * len(rows), seconds=1.0)

    timing = Timing(median=10.0, low=10.0, high=10.0, samples=1)
    monkeypatch.setattr(tuning, "decoded", said)
    monkeypatch.setattr(tuning, "measure_target", lambda *a, **k: {2: TargetCost(batch=2, points={1: timing})})
    draft = DraftCost(batch=2, points={(k, d): dataclasses.replace(timing, median=4.0) for k in (1, 4) for d in (1, 3)})
    monkeypatch.setattr(tuning, "measure_draft", lambda *a, **k: draft)
    replay = Replay(top_ks=(1, 4), depth=3, rows=(), needed_PRDD=np.zeros((0, 2, 3, 3)), gains_PRD=np.zeros((0, 2, 3)))
    decoder = SpeculativeDecoder(target, drafter)
    found = tuning._prices(decoder, drafter, [[5, 6, 7]] * 4, parse_setting("T=0"), 2, replay)
    assert found.rest_ms == pytest.approx(7.0 + 2.0 - 4.0)
    assert found.plain_rest_ms == pytest.approx(1.5)


@pytest.mark.slow
def test_a_recipe_that_gives_a_tree_itself_is_told_so_and_a_folder_that_cannot_be_written_is_explained(
    folder: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fastest(monkeypatch, "no drafting")
    tuning.tune(recipe_in(folder))
    assert "itself gives a tree" not in capsys.readouterr().err
    tuning.tune(recipe_in(folder, "--decode.drafter.budget=8"))
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_without_prompts_the_held_out_conversations_are_taken_or_what_the_evaluation_leaves(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle.data.prepare import load_prepared, prepare
    from eagle.eval.tuner.prompts import tuning_prompts
    from eagle.target.prompt import prompt_ids

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
    # A held-out conversation whose question is evaluated is none to tune with.
    lines = [json.loads(line) for line in (folder / "conversations.jsonl").read_text().splitlines()]
    questions = {line["messages"][0]["content"] for line in lines}
    (shared,) = [
        question
        for question in questions
        if prompt_ids(target.tokenizer, [{"role": "user", "content": question}]) == held_out[0]
    ]
    (folder / "shared.jsonl").write_text(json.dumps({"question_id": 1, "turns": [shared, "and then"]}) + "\n")
    capsys.readouterr()
    asked = dataclasses.replace(recipe.eval, prompts=(str(folder / "shared.jsonl"),))
    left = tuning_prompts(dataclasses.replace(recipe, eval=asked), target)
    every = [row["input_ids"][: row["loss_mask"].index(True)] for row in rows]
    assert left == [ids for ids in every if ids != held_out[0]][:6]
    count = every.count(held_out[0])
    assert f"{count} of the held-out documents are evaluated too and left out" in capsys.readouterr().err


@pytest.mark.slow
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


def test_of_a_conversation_that_became_several_documents_one_prompt_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other answers' prompts begin with the same words: an interval over them would take them for independent."""
    documents = [("a#0", [1, 2, 9]), ("a#1", [1, 2, 3, 4, 9]), ("b", [5, 9]), ("c#0", [6, 7, 9])]
    rows = [
        {"id": name, "split": "validation", "input_ids": ids, "loss_mask": [False] * (len(ids) - 1) + [True]}
        for name, ids in documents
    ]
    monkeypatch.setattr(tune_prompts, "load_prepared", lambda folder: (Dataset.from_list(rows), {}))
    assert tune_prompts._held_out(read_recipe(write_recipe(tmp_path))) == [[1, 2], [5], [6, 7]]
