"""The evaluation on a tiny target: fair, exact, resumable, and honest when a method is not exact."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import Recipe, read_recipe
from eagle.decode_config import Published
from eagle.errors import EagleError
from eagle.eval import harness, runner
from eagle.eval.answers import Answer
from eagle.eval.identity import answers_identity, evaluation_identity
from eagle.eval.methods import Method, make_methods, rotated
from eagle.eval.settings import Setting
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.prompt_set import recipe_prompts
from eagle.formats.checkpoint import save_head
from eagle.formats.zoo.catalogue import zoo_folder
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.recipes import write_recipe

torch.set_num_threads(1)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe with a random head where the trained one would lie."""
    recipe = read_recipe(write_recipe(tmp_path))
    save_head(random_head(Target.from_config(recipe.target)), recipe.head_dir)
    return recipe


def random_head(target: Target, seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    return EagleHead(EagleHeadConfig.for_target(target.config))


@pytest.mark.slow
def test_every_method_answers_every_turn_exactly_and_all_files_are_written(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    result = harness.evaluate(recipe)
    assert result == json.loads((recipe.eval_dir / "results.json").read_text())
    assert list(result["settings"]) == ["T=0"]
    body = result["settings"]["T=0"]
    assert list(body["methods"]) == ["hf", "plain", "eagle2", "chain"]
    assert (body["requests"], result["prompts"], body["errors"]) == (4, 2, [])
    for name in ("plain", "eagle2", "chain"):
        row = body["methods"][name]["overall"]
        assert row["exact"]["different"] == 0
        assert set(body["methods"][name]["categories"]) == {"a", "b"}
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert row["shares"]["verify"] > 0
    tree = body["methods"]["eagle2"]["overall"]
    assert tree["tau"] >= 1
    assert tree["speedup_hf"]["low"] <= tree["speedup_hf"]["median"] <= tree["speedup_hf"]["high"]
    assert result["target"]["weights_sha256"]
    assert result["runs"]["engine"] == "compiled"
    assert set(result["runs"]["products"].values()) <= {"packed", "torch"}
    assert result["recipe"]["decode"]["drafter"]["budget"] == 6
    assert {"cpu", "cores", "torch_threads", "gpus"} <= set(result["hardware"])
    assert {"torch", "transformers", "eagle"} <= set(result["versions"])
    assert result["peak_memory"]["rss_bytes"] > 2**20
    summary = (recipe.eval_dir / "summary.md").read_text()
    assert "EAGLE-2 tree" in summary
    assert "- engine, kernels: compiled (" in summary
    assert "tau" in result["definitions"]
    printed = capsys.readouterr().out
    assert "over HF" in printed
    assert "n-alpha" in printed
    assert "a million tokens or fewer" in printed, "a small tau is explained"


@pytest.mark.slow
def test_the_resolved_recipe_beside_the_results_reads_back(recipe: Recipe) -> None:
    harness.evaluate(recipe)
    assert read_recipe(recipe.eval_dir / "recipe.yaml") == recipe


@pytest.mark.slow
def test_results_of_the_same_head_recipe_and_prompts_are_not_measured_again(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = harness.evaluate(recipe)
    monkeypatch.setattr(harness, "_measure", lambda *_: pytest.fail("measured again"))
    assert harness.evaluate(recipe) == first


@pytest.mark.slow
@pytest.mark.parametrize("change", ["head", "prompts", "decode"])
def test_another_head_other_prompts_or_another_tree_are_measured(recipe: Recipe, change: str, tmp_path: Path) -> None:
    first = harness.evaluate(recipe)
    if change == "head":
        save_head(random_head(Target.from_config(recipe.target), seed=1), recipe.head_dir)
    elif change == "prompts":
        (tmp_path / "prompts.jsonl").write_text('{"question_id": 9, "turns": ["something else"]}\n')
    else:
        recipe = read_recipe(tmp_path / "recipe.yaml", ["--decode.drafter.budget", "4"])
    second = harness.evaluate(recipe)
    assert second["identity"] != first["identity"]
    assert second["created"] >= first["created"]


@pytest.mark.slow
def test_an_interrupted_evaluation_continues_where_it_was_killed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = runner.Runner._ask

    def counted(
        self: runner.Runner, prompt: object, turn: int, ids: list[int], setting: object, *, number: int
    ) -> object:
        if len(asked) == 3 and "killed" not in asked:
            asked.append("killed")
            raise KeyboardInterrupt
        asked.append(f"{number}")
        return ask(self, prompt, turn, ids, setting, number=number)

    monkeypatch.setattr(runner.Runner, "_ask", counted)
    with pytest.raises(KeyboardInterrupt):
        harness.evaluate(recipe)
    assert not (recipe.eval_dir / "results.json").exists()
    result = harness.evaluate(recipe)
    assert asked == ["0", "1", "2", "killed", "3"]
    assert result["settings"]["T=0"]["requests"] == 4


@pytest.mark.slow
def test_answers_stand_when_more_prompts_are_asked_and_only_those_whose_text_changed_are_asked_again(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(limit: str) -> Recipe:
        return read_recipe(tmp_path / "recipe.yaml", [f"--eval.limit={limit}", "--eval.methods=[plain,eagle2]"])

    asked: list[str] = []
    ask = runner.Runner._ask

    def noted(self: runner.Runner, prompt: Prompt, *rest: Any, **named: Any) -> object:
        asked.append(prompt.id)
        return ask(self, prompt, *rest, **named)

    monkeypatch.setattr(runner.Runner, "_ask", noted)
    few = harness.evaluate(of("1"))
    assert (few["prompts"], asked) == (1, ["prompts/0"] * 2)
    every = harness.evaluate(of("null"))
    assert (every["prompts"], asked) == (2, ["prompts/0"] * 2 + ["prompts/1"] * 2)
    one = few["settings"]["T=0"]["methods"]["plain"]["categories"]["a"]["tokens_per_second"]
    assert every["settings"]["T=0"]["methods"]["plain"]["categories"]["a"]["tokens_per_second"] == one
    again = harness.evaluate(of("1"))
    assert (again["prompts"], again["settings"]["T=0"]["requests"], len(asked)) == (1, 2, 4), "the others' are left out"
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text(lines[0] + "\n" + lines[1].replace("1 + 1", "2 + 2") + "\n")
    harness.evaluate(of("null"))
    assert asked[4:] == ["prompts/1"] * 2


def test_results_know_a_target_and_a_tuning_that_were_written_anew_in_place(recipe: Recipe, tmp_path: Path) -> None:
    """Heads are often given by their names in the zoo."""
    prompts = recipe_prompts(recipe.eval)
    shipped = evaluation_identity(recipe, "smollm2-135m-instruct", prompts)
    tuned = zoo_folder("smollm2-135m-instruct") / "tuned.json"  # type: ignore[operator]
    assert shipped["tuned_sha256"] == hashlib.sha256(tuned.read_bytes()).hexdigest()
    before = evaluation_identity(recipe, recipe.head_dir, prompts)
    assert evaluation_identity(recipe, recipe.head_dir, prompts) == before
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    after = evaluation_identity(recipe, recipe.head_dir, prompts)
    assert {key for key in after if after[key] != before[key]} == {"target_files"}
    # The answers' own log goes by the weights themselves, so a copied target costs no answer.
    assert answers_identity(after, {"weights_sha256": "x"}) == answers_identity(before, {"weights_sha256": "x"})
    (tmp_path / "paths.json").write_text("[[0]]")
    decode = dataclasses.replace(recipe.decode, drafter=Published(tree_file=str(tmp_path / "paths.json")))
    evaluation = dataclasses.replace(recipe.eval, draft_model=str(tmp_path / "target"))
    named = evaluation_identity(dataclasses.replace(recipe, decode=decode, eval=evaluation), recipe.head_dir, prompts)
    assert {"tree_file_sha256", "draft_model_files"} <= answers_identity(named, {}).keys()


@pytest.mark.slow
def test_later_turns_hold_plain_decodings_own_answers(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    original = runner.prompt_ids
    seen: list[list[dict[str, str]]] = []

    def noted(tokenizer: object, messages: list[dict[str, str]]) -> list[int]:
        seen.append(messages)
        asked.append(original(tokenizer, messages))
        return asked[-1]

    monkeypatch.setattr(runner, "prompt_ids", noted)
    harness.evaluate(recipe)
    lines = [json.loads(line) for line in (recipe.eval_dir / "answers.jsonl").read_text().splitlines()[1:]]
    tokenizer = Target.from_config(recipe.target).tokenizer
    reply = tokenizer.decode(lines[0]["answers"]["plain"]["tokens"], skip_special_tokens=True)
    second = next(messages for messages in seen if len(messages) == 3)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == reply


@pytest.mark.slow
def test_every_method_is_warmed_up_under_every_setting(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []

    def noting(*args: object, **kwargs: object) -> dict[str, Method]:
        def noted(method: Method) -> Method:
            def run(ids_1T: torch.Tensor, limit: int, setting: Setting, seed: int) -> Answer:
                calls.append((method.name, setting.label))
                return method.run(ids_1T, limit, setting, seed)

            return dataclasses.replace(method, run=run)

        return {name: noted(method) for name, method in make_methods(*args, **kwargs).items()}

    monkeypatch.setattr(harness, "make_methods", noting)
    overrides = ["--eval.sampling=['T=0','T=0.8']", "--eval.methods=[plain,eagle2]"]
    harness.evaluate(read_recipe(tmp_path / "recipe.yaml", overrides))
    assert set(calls[:4]) == {(name, label) for name in ("plain", "eagle2") for label in ("T=0", "T=0.8")}


@pytest.mark.slow
def test_each_method_runs_first_equally_often(recipe: Recipe) -> None:
    harness.evaluate(recipe)
    lines = [json.loads(line) for line in (recipe.eval_dir / "answers.jsonl").read_text().splitlines()[1:]]
    assert sorted(line["order"][0] for line in lines) == ["chain", "eagle2", "hf", "plain"]
    assert rotated({"a": 0, "b": 0, "c": 0}, 4) == ["b", "c", "a"]


@pytest.mark.slow
def test_each_method_runs_first_equally_often_under_every_setting(recipe: Recipe, tmp_path: Path) -> None:
    overrides = ["--eval.sampling=['T=0','T=0.8']", "--eval.methods=[plain,eagle2]"]
    harness.evaluate(read_recipe(tmp_path / "recipe.yaml", overrides))
    lines = [json.loads(line) for line in (recipe.eval_dir / "answers.jsonl").read_text().splitlines()[1:]]
    for setting in ("T=0", "T=0.8"):
        first = [line["order"][0] for line in lines if line["setting"] == setting]
        assert sorted(first) == ["eagle2", "eagle2", "plain", "plain"]


@pytest.mark.slow
def test_a_method_that_says_other_tokens_is_an_error_row_without_a_ratio(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lying(*args: object, **kwargs: object) -> dict[str, Method]:
        methods = make_methods(*args, **kwargs)
        honest = methods["eagle2"]

        def lie(ids_1T: torch.Tensor, max_new_tokens: int, setting: Setting, seed: int) -> Answer:
            answer = honest(ids_1T, max_new_tokens, setting, seed)
            answer.tokens[1] = (answer.tokens[1] + 1) % 300
            return answer

        return {**methods, "eagle2": dataclasses.replace(honest, run=lie)}

    monkeypatch.setattr(harness, "make_methods", lying)
    body = harness.evaluate(recipe)["settings"]["T=0"]
    tree = body["methods"]["eagle2"]["overall"]
    assert tree["speedup_hf"] is None
    assert tree["speedup_plain"] is None
    assert body["methods"]["chain"]["overall"]["speedup_plain"] is not None
    found = [entry for entry in body["divergences"] if entry["method"] == "eagle2"]
    assert len(found) == 4
    assert all(entry["index"] == 1 and entry["margin"] > 1e-4 for entry in found)
    printed = capsys.readouterr().out
    assert "ERROR: eagle2 is NOT exact: 4 of 4" in " ".join(printed.split())


@pytest.mark.slow
def test_sampled_answers_equal_plain_decodings_with_the_same_seed_and_rules_are_judged_by_what_they_promise(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ["hf", "hf-lookup", "plain", "eagle2", "eagle2@rejection", "static@top_k", "ngram", "chain@block"]
    sampling = ["T=0", "T=0.9 top_p=0.9"]
    overrides = [f"--eval.methods={json.dumps(methods)}", f"--eval.sampling={json.dumps(sampling)}"]
    result = harness.evaluate(read_recipe(tmp_path / "recipe.yaml", overrides))
    assert list(result["settings"]) == sampling
    greedy, sampled = (result["settings"][label]["methods"] for label in sampling)
    for body in result["settings"].values():
        assert body["errors"] == []
        assert list(body["methods"]) == methods
    for name in ("plain", "hf-lookup", "eagle2", "eagle2@rejection", "ngram", "chain@block"):
        assert greedy[name]["overall"]["exact"]["equal"] == 4, f"{name} at T=0"
    for name in ("eagle2", "ngram"):
        assert sampled[name]["overall"]["exact"]["equal"] == 4, f"{name} with a seed"
    assert [sampled[name]["overall"]["check"] for name in methods] == [
        *("none", "distribution", "none", "plain", "distribution", "lossy", "plain", "distribution")
    ]
    assert sampled["eagle2@rejection"]["overall"]["exact"] is None
    answers = [json.loads(line) for line in (recipe.eval_dir / "answers.jsonl").read_text().splitlines()[1:]]
    tokens = {request["setting"]: request["answers"]["plain"]["tokens"] for request in answers if request["turn"] == 0}
    assert tokens["T=0"] != tokens["T=0.9 top_p=0.9"], "sampling is really switched on"
    printed = capsys.readouterr().out
    assert "by law" in printed
    assert "lossy" in printed
    assert "EAGLE-2 tree, rejection" in printed


@pytest.mark.slow
def test_the_checkpoints_own_generation_defaults_move_no_method(recipe: Recipe) -> None:
    """A repetition penalty in generation_config.json would otherwise bend our loops and not Hugging Face's."""
    folder = Path(recipe.target.model)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 1.8}))
    body = harness.evaluate(recipe)["settings"]["T=0"]
    assert body["errors"] == []
    assert body["methods"]["plain"]["overall"]["exact"]["equal"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("--eval.methods=[plain,eagel2]", "eagel2"),
        ("--eval.methods=[hf,eagle2]", "plain must be among them"),
        ("--eval.methods=[plain,plain]", "once"),
        ("--eval.methods=[plain,eagle2@rejektion]", "did you mean rejection"),
        ("--eval.methods=[plain,hf-assisted]", "eval.draft_model"),
        ("--eval.sampling=[warm]", "T=NUMBER"),
        ("--eval.sampling=['top_p=0.9']", "without a temperature"),
        ("--eval.sampling=['T=0 top_p=0.9']", "means nothing"),
        ("--eval.sampling=['T=-1']", "temperature is -1.0"),
        ("--eval.sampling=[]", "one or more"),
    ],
)
def test_a_method_or_setting_that_does_not_exist_is_named(
    recipe: Recipe, tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(EagleError, match=said):
        harness.evaluate(read_recipe(tmp_path / "recipe.yaml", [override]))


@pytest.mark.slow
def test_prompts_longer_than_the_context_are_passed_over_and_named(recipe: Recipe, tmp_path: Path) -> None:
    rows = [{"question_id": 1, "turns": ["hello " * 2000]}, {"question_id": 2, "turns": ["hello"]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = harness.evaluate(recipe)
    assert result["settings"]["T=0"]["requests"] == 1
    assert [entry["prompt"] for entry in result["skipped"]] == ["prompts/1"]
    assert "512" in result["skipped"][0]["reason"]


def test_a_missing_head_and_a_head_of_another_target_are_explained(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="train it first"):
        harness.evaluate(read_recipe(tmp_path / "recipe.yaml", ["--output_dir", str(tmp_path / "elsewhere")]))
    wide = EagleHeadConfig.for_target(Target.from_config(recipe.target).config)
    wide.hidden_size = 64
    save_head(EagleHead(wide), tmp_path / "wide")
    with pytest.raises(EagleError, match="64"):
        harness.evaluate(recipe, head=tmp_path / "wide")
