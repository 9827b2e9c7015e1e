"""Strategies of several processes: each trains like one process, and each goes on from another's checkpoint.

All of them run on CPU processes here, through the shipped accelerate configurations.
"""

import os
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from eagle.config import Recipe, TrainConfig
from eagle.train import checkpoints, run
from eagle.train.loop import train
from tests.programs import run_program
from tests.train.stores import tiny_recipe, with_train, write_tiny_store
from tests.train.test_launch import _recipe_file
from tests.train.test_step import metrics_of, weights_of

CONFIGS = Path(str(files("eagle") / "configs" / "accelerate"))
DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None or which("c++") is None, reason="needs DeepSpeed and a C++ compiler"
)
KEYS: dict[str, Any] = {"batch_size": 2, "epochs": 2, "clip": "norm", "save_every": 3, "eval_every": 3}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_accepts_every_configuration(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(path), "--num_processes", "8", "-m", "eagle.train", "--config", "RECIPE"]
    )
    arguments, _, _ = _validate_launch_command(arguments)
    assert arguments.use_deepspeed == path.stem.startswith("zero")
    assert arguments.use_fsdp == (path.stem == "fsdp")
    assert arguments.mixed_precision == "no"
    assert arguments.num_processes == 8


def test_every_strategy_is_shipped() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"ddp", "fsdp", "multi_node", "zero2", "zero3"}


def launch(strategy: str, recipe: Recipe, *, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Trains `recipe` under a shipped configuration, on CPU processes."""
    path = _recipe_file(recipe, Path(recipe.output_dir).parent)
    environment = {} if strategy == "ddp" else _set_by_accelerate(strategy, processes)
    return run_program("eagle.train.__main__", ["--config", path], processes=processes, environment=environment)


def _set_by_accelerate(strategy: str, processes: int) -> dict[str, str]:
    """The variables that `accelerate launch` gives its processes under a shipped configuration (see its launch_command)."""
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS / f"{strategy}.yaml"), "--num_processes", str(processes), "-m", "eagle.train"]
    )
    arguments, defaults, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    found = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """One process, 9 training documents in steps of 4: 6 steps, checkpoints at 3 and 6."""
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_store(directory, documents=11)
    recipe = tiny_recipe(directory, **{**KEYS, "batch_size": 4})
    train(recipe)
    return recipe


def _same(ours: Recipe, theirs: Recipe, *, steps: range) -> None:
    """Metrics of `steps` and the final weights agree."""
    by_step = [{line["step"]: line for line in metrics_of(recipe) if "loss" in line} for recipe in (ours, theirs)]
    for step in steps:
        for key in ("loss", "grad_norm", "supervised_tokens"):
            assert by_step[0][step][key] == pytest.approx(by_step[1][step][key], rel=2e-4), (step, key)
    for name, weight in weights_of(theirs).items():
        torch.testing.assert_close(weights_of(ours)[name], weight, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", pytest.param("zero2", marks=DEEPSPEED), pytest.param("zero3", marks=DEEPSPEED)]
)
def test_two_processes_train_like_one_and_any_strategy_goes_on(strategy: str, plain: Recipe, tmp_path: Path) -> None:
    """Steps 1-3 under the strategy and 4-6 in one process, and the other way round, equal one process throughout."""
    write_tiny_store(tmp_path / "there", documents=11)
    there = tiny_recipe(tmp_path / "there", **KEYS)
    finished = launch(strategy, with_train(there, max_steps=3))
    assert finished.returncode == 0, finished.stderr[-3000:]
    _optimizer_is_whole(there.train_dir / "checkpoint-00000003", plain)
    shutil.rmtree(there.head_dir)
    train(with_train(there, batch_size=4))
    _same(there, plain, steps=range(1, 7))

    write_tiny_store(tmp_path / "back", documents=11)
    back = tiny_recipe(tmp_path / "back", **KEYS)
    train(with_train(back, batch_size=4, max_steps=3))
    shutil.rmtree(back.head_dir)
    finished = launch(strategy, back)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "resuming at step 3 of 6" in finished.stderr
    _same(back, plain, steps=range(1, 7))


def _optimizer_is_whole(checkpoint: Path, plain: Recipe) -> None:
    """The moments are one process's, whatever the strategy spread over processes."""
    found = load_file(checkpoint / "optimizer.safetensors")
    newest = checkpoints.newest(plain.train_dir)
    assert newest is not None
    reference = load_file(newest.with_name(checkpoint.name) / "optimizer.safetensors")
    assert found.keys() == reference.keys()
    assert len(found) == 3 * len(weights_of(plain))
    for name, value in reference.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_next_launch_resumes(plain: Recipe, tmp_path: Path) -> None:
    """Through `accelerate launch` itself."""
    write_tiny_store(tmp_path, documents=11)
    recipe = tiny_recipe(tmp_path, **KEYS)
    path = _recipe_file(recipe, tmp_path)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / "fsdp.yaml", "--num_processes", "2"]
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    died = subprocess.run([sys.executable, *launcher, program, path], timeout=300, capture_output=True, text=True)
    assert died.returncode != 0
    assert "Signal 9 (SIGKILL)" in died.stderr
    assert not recipe.head_dir.exists()
    newest = checkpoints.newest(recipe.train_dir)
    assert newest is not None
    assert newest.name == "checkpoint-00000003"
    finished = launch("fsdp", recipe)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "resuming at step 3 of 6" in finished.stderr
    _same(recipe, plain, steps=range(1, 7))


KILLED = """
import os, signal, sys
from eagle.train import loop
from eagle.train.__main__ import main

real = loop._record

def record(training, *arguments):
    real(training, *arguments)
    if training.progress.step == 5 and training.accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)

loop._record = record
sys.exit(main(["--config", sys.argv[1]]))
"""


@DEEPSPEED
def test_deepspeed_reduces_gradients_in_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its own autocast makes of the settings: the dtype in which each parameter's gradient travels."""
    torch_autocast = pytest.importorskip("deepspeed.runtime.torch_autocast")
    for name in ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"):
        monkeypatch.setattr(torch_autocast, name, getattr(torch_autocast, name))
    settings: dict[str, Any] = {}
    plugin = SimpleNamespace(deepspeed_plugin=SimpleNamespace(deepspeed_config=settings))
    accelerator: Any = SimpleNamespace(state=plugin, num_processes=2)
    run.configure_deepspeed(accelerator, TrainConfig(precision="bf16"))
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    engine = SimpleNamespace(module=module, zero_quantized_weights=lambda: False)
    from deepspeed.runtime.config import get_lower_precision_safe_modules

    assert settings["torch_autocast"]["enabled"]
    modules = get_lower_precision_safe_modules(settings)
    torch_autocast.init_autocast_params(engine, torch.bfloat16, modules)
    assert torch_autocast.get_all_comm_dtypes(module.parameters()) == {torch.float32}
