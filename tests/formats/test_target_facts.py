"""How a head's target is loaded again: as for its training, whose papers lie in the head's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.cli.main import main
from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.formats.checkpoint import save_head
from eagle.formats.target_facts import settings_as_trained
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.tiny import save_tiny_target

PINNED = {"model": "a/b", "revision": "abc", "dtype": "bfloat16", "trust_remote_code": True, "device": "cuda:3"}


def papers(folder: Path, target: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "training.json").write_text(json.dumps({"recipe": {"target": target}}))
    return folder


def test_a_head_tells_dtype_and_revision_of_its_own_target_alone_and_never_permission_to_run_code(
    tmp_path: Path,
) -> None:
    folder = papers(tmp_path / "head", PINNED)
    assert settings_as_trained("a/b", folder) == TargetConfig(model="a/b", revision="abc", dtype="bfloat16")
    assert settings_as_trained("a/b", folder, trust_remote_code=True).trust_remote_code
    assert settings_as_trained("c/d", folder) == TargetConfig(model="c/d")
    assert settings_as_trained("c/d", folder, trust_remote_code=True).trust_remote_code
    assert settings_as_trained("a/b", tmp_path) == TargetConfig(model="a/b")


@pytest.mark.parametrize(
    "target", [None, "a/b", {"model": "a/b", "revision": 3, "dtype": ["x"], "trust_remote_code": "yes"}]
)
def test_papers_of_another_shape_tell_nothing(target: Any, tmp_path: Path) -> None:
    assert settings_as_trained("a/b", papers(tmp_path, target)) == TargetConfig(model="a/b")


def test_damaged_papers_are_named(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(EagleError, match=r"training\.json is not valid JSON"):
        settings_as_trained("a/b", tmp_path)


def test_a_head_trained_in_another_dtype_than_the_checkpoints_keeps_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through export, import and export again; weights_sha256 is of values as they were loaded, here rounded to bfloat16."""
    model = str(save_tiny_target(tmp_path / "target"))
    trained = Target.from_config(TargetConfig(model=model, dtype="bfloat16", device="cpu"))
    assert (
        trained.identity()["weights_sha256"] != Target.from_pretrained(model, device="cpu").identity()["weights_sha256"]
    )
    head = EagleHead(EagleHeadConfig.for_target(trained.config, target_identity=trained.identity()))
    torch.nn.init.normal_(head.fc.weight)
    save_head(head, tmp_path / "head", extra={"recipe": {"target": {"model": model, "dtype": "bfloat16"}}})
    trip = [
        ("export", "head", "vllm", "--to", "vllm"),
        ("import", "vllm", "ours", "--target", model),
        ("export", "ours", "sglang", "--to", "sglang"),
        ("import", "head", "copy", "--target", model),
    ]
    for command, source, out, *rest in trip:
        assert main([command, str(tmp_path / source), str(tmp_path / out), *rest]) == 0, (command, source)
    (tmp_path / "head" / "training.json").unlink()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "head"), str(tmp_path / "none"), "--to", "vllm"]) == 2
    assert "weights_sha256" in capsys.readouterr().err
