"""`eagle eval --check exact`: equal answers pass, a different one fails and is named, a kill loses no finished batch."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from eagle.cli.main import main
from eagle.config import Recipe, read_recipe
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, dtype_name, machine_name, write_tuned
from eagle.errors import EagleError
from eagle.eval.batch_answer import BatchAnswer
from eagle.eval.checks import check
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.recipes import write_recipe
from tests.tiny import save_tiny_target

torch.set_num_threads(1)
SAMPLING = ["T=0", "T=0.7", "T=1 top_p=0.9"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a random head, made once."""
    folder = tmp_path_factory.mktemp("made")
    save_tiny_target(folder / "target")
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(Target.from_pretrained(str(folder / "target")).config, initializer_range=0.2)
    save_head(EagleHead(config), folder / "head")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, made: Path) -> Recipe:
    (tmp_path / "target").symlink_to(made / "target")
    recipe = read_recipe(write_recipe(tmp_path), [f"--eval.sampling={json.dumps(SAMPLING)}"])
    recipe.head_dir.parent.mkdir(parents=True)
    recipe.head_dir.symlink_to(made / "head")
    return recipe


@pytest.mark.slow
def test_every_prompt_is_checked_under_every_setting(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.check_exact(recipe)
    result = json.loads((recipe.eval_dir / "exactness.json").read_text())
    assert list(result["settings"]) == SAMPLING
    for body in result["settings"].values():
        assert (body["answers"], body["equal"], body["different"]) == (2, 2, 0)
        assert body["tokens"] > 2
        assert body["tau_interval"] is None, "two prompts have no interval"
    lines = [json.loads(line) for line in (recipe.eval_dir / "exactness.jsonl").read_text().splitlines()[1:]]
    for setting, body in result["settings"].items():
        drafted = [line["answers"]["drafted"] for line in lines if line["setting"] == setting]
        steps = sum(len(one["accepted"]) for one in drafted)
        assert body["tau"] * steps == pytest.approx(sum(len(one["tokens"]) - 1 for one in drafted))
        assert body["tau_raw"] * steps == pytest.approx(
            sum(sum(one["accepted"]) + len(one["accepted"]) for one in drafted)
        )
    assert "T=1 top_p=0.9" in capsys.readouterr().out


@pytest.mark.slow
def test_a_different_token_fails_the_command_and_is_named(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = check.answer_batch

    def lying(decoder: object, rows: object, **rest: object) -> BatchAnswer:
        answer = honest(decoder, rows, **rest)
        if decoder.drafter is not None:
            answer.tokens[0][3] = (answer.tokens[0][3] + 1) % 300
        return answer

    monkeypatch.setattr(check, "answer_batch", lying)
    assert main(["eval", str(tmp_path / "recipe.yaml"), "--check", "exact"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "leaves plain at token 3 (DIFFERENT)" in printed


@pytest.mark.slow
def test_a_killed_check_continues_behind_the_last_finished_batch(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = check.answer_batch, []

    def counted(*arguments: object, **rest: object) -> BatchAnswer:
        if len(calls) == 3:
            calls.append("killed")
            raise KeyboardInterrupt
        calls.append("answered")
        return honest(*arguments, **rest)

    monkeypatch.setattr(check, "answer_batch", counted)
    with pytest.raises(KeyboardInterrupt):
        check.check_exact(recipe)
    assert check.check_exact(recipe)
    assert len(calls) == 8, "one batch of the second setting is answered again, the first setting is not"


def test_with_an_open_tree_real_trees_are_checked_though_no_drafting_was_tuned(recipe: Recipe, tmp_path: Path) -> None:
    """Plain decoding beside itself would always be equal."""
    target = Target.from_config(recipe.target)
    head = tmp_path / "tuned"
    shutil.copytree(recipe.head_dir, head)
    entry = TunedTrees(
        hardware=machine_name(target.device),
        engine=target.engine,
        dtype=dtype_name(target.dtype),
        choices=(TunedChoice(batch=8, temperature=0.0, tree=TreeSettings(drafter="none")),),
    )
    write_tuned(head, entry)
    left_open = [f"--decode.drafter.{key}=null" for key in ("budget", "top_k", "depth")]
    decoder = check.checked_decoder(read_recipe(tmp_path / "recipe.yaml", left_open), target, head)
    out = decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert out.stats[0].tree == "published: 60 nodes, top-k 10, 6 levels"
    assert out.stats[0].nodes > 4 * out.stats[0].verify_steps


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle2", "static", "chain", "ngram"])
def test_every_drafter_is_checked_with_its_tree_left_open(recipe: Recipe, tmp_path: Path, drafter: str) -> None:
    asked = read_recipe(tmp_path / "recipe.yaml", [f"--decode.drafter={drafter}", "--eval.max_new_tokens=6"])
    assert check.check_exact(asked)
    lines = [json.loads(line) for line in (asked.eval_dir / "exactness.jsonl").read_text().splitlines()[1:]]
    assert all(line["answers"]["drafted"]["tokens"] for line in lines)


def test_a_rule_without_that_promise_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"rejection.*does not promise"):
        check.check_exact(read_recipe(tmp_path / "recipe.yaml", ["--decode.rule", "rejection"]))


@pytest.mark.slow
def test_in_half_precision_a_divergence_is_judged_by_the_spacing_of_its_logits(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = read_recipe(
        tmp_path / "recipe.yaml", ["--target.dtype", "bfloat16", '--eval.sampling=["T=0", "T=1 top_p=0.9"]']
    )
    assert check.check_exact(half)
    honest, shown = check.divergence, []

    def other_token(target: Target, **rest: object) -> dict[str, object] | None:
        """As if one answer had taken the second best token somewhere."""
        ids, reference = list(rest["prompt_ids"]), list(rest["reference"])
        logits_TV = target.logits(
            target.features(torch.tensor([[*ids, *reference[:-1]]]))[0][0, len(ids) - 1 :]
        ).float()
        top = logits_TV.topk(2)
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        place = (
            max(range(len(margins)), key=lambda i: margins[i])
            if shown
            else min(range(len(margins)), key=lambda i: margins[i])
        )
        shown.append(margins[place])
        (other,) = [token for token in top.indices[place].tolist() if token != reference[place]]
        return honest(target, **{**rest, "tokens": [*reference[:place], other, *reference[place + 1 :]]})

    monkeypatch.setattr(check, "divergence", other_token)
    told = read_recipe(tmp_path / "recipe.yaml", ["--target.dtype", "bfloat16", f"--output_dir={tmp_path / 'told'}"])
    assert not check.check_exact(told, recipe.head_dir)
    body = json.loads((told.eval_dir / "exactness.json").read_text())
    assert body["dtype"] == "bfloat16"
    found = body["settings"]["T=0"]["divergences"]
    assert [one["margin"] for one in found] == pytest.approx(shown)
    assert [one["tie"] for one in found] == [one["margin"] < one["tie_below"] for one in found]
    assert not found[-1]["tie"], "the largest margin of an answer is no tie"
    assert all(one["tie_below"] >= 2 * torch.finfo(torch.bfloat16).eps for one in found)
    printed = " ".join(capsys.readouterr().out.split())
    assert "bfloat16: an answer may leave plain at a tie" in printed
