"""Several processes answer what one does, and any of them may be killed and started again, in another number."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle.config import Recipe, read_recipe
from eagle.errors import EagleError
from eagle.eval.__main__ import main
from eagle.eval.answers import AnswerLog
from eagle.eval.harness import evaluate
from eagle.eval.processes import cost, share
from eagle.eval.suites.prompt import Prompt
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target
from tests.eval.test_answers import IDENTITY, request
from tests.eval.test_harness import random_head
from tests.programs import run_program
from tests.recipes import write_recipe


def prompt(number: int, length: int, turns: int) -> Prompt:
    return Prompt(id=f"f/{number}", category="c", turns=("x" * length,) * turns, reference=(), source="f")


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 3)), max_size=30),
    st.integers(1, 5),
)
def test_every_prompt_is_one_processes_and_no_process_has_much_more_than_another(
    shapes: list[tuple[int, int]], count: int
) -> None:
    prompts = [prompt(i, *shape) for i, shape in enumerate(shapes)]
    shares = [share(prompts, index=index, count=count) for index in range(count)]
    assert sorted(one.id for chosen in shares for one in chosen) == sorted(one.id for one in prompts)
    loads = [sum(map(cost, chosen)) for chosen in shares]
    assert max(loads) - min(loads) <= max(map(cost, prompts), default=0) + 1e-9
    for chosen in shares:
        assert [int(one.id[2:]) for one in chosen] == sorted(int(one.id[2:]) for one in chosen)


def test_the_first_process_takes_over_what_the_others_logged(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerLog(path, IDENTITY) as first, AnswerLog(path, IDENTITY, process=2) as third:
        first.append(request(0))
        third.append(request(1))
        assert list(third.requests) == [("p/1", 1, "T=0")]
    with open(tmp_path / "answers.2.jsonl", "a") as file:
        file.write('{"prompt": "p/1", "turn": 2, ')  # killed while it wrote
    with AnswerLog(path, {**IDENTITY, "head": "other"}, process=5) as stranger:
        stranger.append(request(3))
    with AnswerLog(path, IDENTITY) as log:
        assert log.requests == {("p/1", turn, "T=0"): request(turn) for turn in (0, 1)}
    # What a stranger wrote is set aside, and no process's log any more.
    (aside,) = tmp_path.glob("answers.5.before-*.jsonl")
    assert sorted(file.name for file in tmp_path.iterdir()) == [aside.name, "answers.jsonl"]
    with AnswerLog(path, IDENTITY, process=1) as second:
        assert len(second.requests) == 2
    with AnswerLog(path, {**IDENTITY, "head": "other"}) as again:
        assert list(again.requests) == [("p/1", 3, "T=0")], "the stranger's own evaluation finds it"
    assert not aside.exists()


def test_answers_given_with_other_threads_are_neither_mixed_nor_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    identity: dict[str, Any] = {"head": "abc", "hardware": {"cpu": "x", "torch_threads": 2}}
    with AnswerLog(path, identity) as log:
        log.append(request(0))
    before = path.read_bytes()
    with pytest.raises(EagleError, match=r"torch_threads=2, this process has 1.*OMP_NUM_THREADS=2"):
        AnswerLog(path, {**identity, "hardware": {"cpu": "x", "torch_threads": 1}}).__enter__()
    assert path.read_bytes() == before


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Six prompts of two turns; the head is random."""
    path = write_recipe(tmp_path, eval={"methods": ["plain", "eagle2"], "max_new_tokens": 8, "ledger": "off"})
    rows = [{"question_id": i, "turns": ["hello to the cat " * (i + 1), "and then"]} for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = read_recipe(path)
    save_head(random_head(Target.from_config(recipe.target)), recipe.head_dir)
    return recipe


def launch(recipe: Recipe, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    path = Path(recipe.output_dir).parent / "recipe.yaml"
    return run_program("eagle.eval.__main__", ["--config", path, *overrides], processes=processes)


def tokens(result: dict[str, Any], folder: Path) -> dict[tuple[str, int], list[int]]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()[1:]]
    return {(line["prompt"], line["turn"]): line["answers"]["eagle2"]["tokens"] for line in lines}


def log_lines(folder: Path) -> list[str]:
    return [line for path in folder.glob("answers*.jsonl") for line in path.read_text().splitlines()[1:]]


@pytest.mark.slow
def test_two_processes_answer_what_one_does_after_a_kill_of_three(recipe: Recipe) -> None:
    """Logs as a killed start of three processes left them; then two processes finish what is left."""
    whole = evaluate(recipe)
    expected = tokens(whole, recipe.eval_dir)
    lines = (recipe.eval_dir / "answers.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 13
    for file in recipe.eval_dir.glob("*.*"):
        file.unlink()
    kept = {"answers.jsonl": lines[1:3], "answers.1.jsonl": [lines[5]], "answers.2.jsonl": [lines[7], lines[8][:40]]}
    for name, some in kept.items():
        (recipe.eval_dir / name).write_text("".join([lines[0], *some]))

    finished = launch(recipe, 2)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((recipe.eval_dir / "results.json").read_text())
    assert tokens(result, recipe.eval_dir) == expected
    assert [path.name for path in recipe.eval_dir.glob("answers*.jsonl")] == ["answers.jsonl"]
    assert set(log_lines(recipe.eval_dir)) >= {line.rstrip("\n") for line in lines[1:3]}, "kept, not redone"
    sharing = result["processes"]
    assert (sharing["processes"], sharing["requests_by_sharing"]) == (2, {"1": 4, "2": 8})
    assert "4 with 1, 8 with 2" in sharing["note"]
    tau, alone = (r["settings"]["T=0"]["methods"]["eagle2"]["overall"]["tau"] for r in (result, whole))
    assert tau == pytest.approx(alone)
    assert result["settings"]["T=0"]["requests"] == 12
    assert finished.stdout.count("over plain") >= 1, "the first process prints"

    assert evaluate(recipe) == result, "nothing is measured again"


def test_the_program_explains_mistakes(capsys: pytest.CaptureFixture[str], recipe: Recipe) -> None:
    def says(arguments: Sequence[str]) -> str:
        assert main(list(arguments)) == 2
        return capsys.readouterr().err

    path = str(Path(recipe.output_dir).parent / "recipe.yaml")
    assert "no recipe given" in says([])
    assert "nowhere" in says(["--config", path, "--head", "nowhere"])
    assert "did you mean eval.limit" in says(["--config", path, "--eval.limti", "3"])
