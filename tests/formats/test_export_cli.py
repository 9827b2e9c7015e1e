"""`eagle export` as a user meets it: the folder, the card, the command, the hub."""

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub.errors import OfflineModeIsEnabled

from eagle.cli import export as export_cli
from eagle.cli.export import push_to_hub
from eagle.cli.main import main
from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.formats.checkpoint import head_hash, load_head, save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.target.loading import load_config
from eagle.target.target import Target
from tests.eval.report_case import full_result
from tests.tiny import save_tiny_target

TRAINING = {
    "step": 7,
    "metrics": {"val_tau": 1.234567, "val_agreement": [0.2, 0.1, 0.1, None, None]},
    "recipe": {
        "target": {"model": "x", "revision": "abc123"},
        "data": {"sources": ["/home/somebody/chats.jsonl", "owner/data", "shipped:mt_bench"], "max_len": 512},
        "features": {"more_stores": ["/home/somebody/more/features"]},
        "train": {"epochs": 2, "lr": 0.001},
        "head": {"version": "eagle1", "draft_vocab_size": None},
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    model = Target.from_pretrained(str(target), device="cpu")
    torch.manual_seed(0)
    made = EagleHead(EagleHeadConfig.for_target(model.config, target_identity=model.identity()))
    save_head(made, tmp_path / "run" / "head", extra=TRAINING)
    return tmp_path / "run" / "head"


def write_results(folder: Path, sha256: str) -> None:
    """A whole evaluation, with figures of our choice for EAGLE-2's trees."""
    result = full_result(head={"path": "x", "sha256": sha256, "config": {}})
    result["hardware"] |= {"cpu": "Some CPU", "cores": 2, "gpus": []}
    overall = result["settings"]["T=0"]["methods"]["eagle2"]["overall"]
    overall |= {"tokens_per_second": 12.5, "ms_per_token": 80.0, "first_token_ms": 9.0, "tau": 2.5}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(result))


def test_the_card_tells_data_recipe_results_target_and_checks(
    head: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "run" / "eval", head_hash(head))
    out = tmp_path / "out"
    command = ["export", str(head), str(out), "--to", "vllm", "--name", "owner/model", "--license", "apache-2.0"]
    assert main(command) == 0  # the target is the one recorded in the head
    printed = capsys.readouterr().out
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["license"], front["base_model"], front["datasets"]) == ("apache-2.0", "owner/model", ["owner/data"])
    assert {"speculative-decoding", "eagle", "vllm"} <= set(front["tags"])
    identity = Target.from_pretrained(str(target), device="cpu").identity()
    serve = f'vllm serve owner/model --speculative-config \'{{"method": "eagle", "model": "{out}", '
    for told in (
        serve.replace(f"{out.parent}/", ""),
        f"loaded as {target.name}",
        "sources: chats.jsonl, owner/data, shipped:mt_bench",
        "and those of 1 more feature stores",
        "revision: abc123",
        str(identity["weights_sha256"]),
        "- lr: 0.001",
        "estimated tau of a chain of 5 drafts, on held-out conversations of the training mixture: 1.235",
        "| EAGLE-2 tree | 12.5 | 80.0 | 9 ms | 2.50 |",
        "Measured on Some CPU, 2 cores, no GPU",
        "largest weight difference 0, largest logit difference 0 ",
        "rounding to bfloat16: largest weight difference",
        "not run in vLLM itself",
    ):
        assert told in card
    assert "/home/somebody" not in card
    assert str(tmp_path) not in card
    assert str(target) not in card
    assert json.loads((out / "eagle_export.json").read_text())["target_identity"]["model"] == "owner/model"
    assert "no hub id" not in printed
    assert serve in printed
    assert load_head(out).version == "eagle1"
    assert main(command) == 2
    assert "add --overwrite" in capsys.readouterr().err


def test_results_of_another_head_do_not_get_into_the_card(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "run" / "eval", "0" * 64)
    command = ["export", str(head), str(tmp_path / "out"), "--to", "sglang"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "is of another head: left out of the card" in printed
    assert "names no licence" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "None were recorded" in card
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "other"
    file = tmp_path / "run" / "eval" / "results.json"
    assert main([*command, "--overwrite", "--results", str(file)]) == 2
    assert "results of another head" in capsys.readouterr().err
    file.write_text("{")
    assert main([*command, "--overwrite"]) == 0
    assert re.search(r"left out of the card: .*results\.json is not valid JSON", capsys.readouterr().out)
    assert main([*command, "--overwrite", "--results", str(file)]) == 2
    assert "is not valid JSON" in capsys.readouterr().err


def test_a_target_that_no_runtime_elsewhere_can_open_is_told(
    head: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["export", str(head), str(out), "--to", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert f"the target {target} is a folder of this machine, which vLLM can open here alone: give --name" in printed
    card = (out / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == target.name
    assert str(target) not in card
    assert main(["export", str(head), str(out), "--to", "vllm", "--overwrite", "--name", "package:x/y.gguf"]) == 0
    assert "vLLM cannot open the target package:x/y.gguf, which is no hub id: give --name" in capsys.readouterr().out
    command = ["export", str(head), str(tmp_path / "hub"), "--to", "vllm", "--push-to-hub", "owner/head"]
    assert main(command) == 2
    assert "give --name OWNER/MODEL" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


def test_a_head_with_a_zero_fc_bias_is_exported_without_it(head: Path, tmp_path: Path) -> None:
    config = copy.deepcopy(load_head(head).config)
    config.fc_bias = True  # type: ignore[attr-defined]
    biased = EagleHead(config)  # type: ignore[arg-type]
    torch.nn.init.zeros_(biased.fc.bias)
    save_head(biased, tmp_path / "biased")
    for to in ("sglang", "vllm"):
        assert main(["export", str(tmp_path / "biased"), str(tmp_path / to), "--to", to]) == 0


def test_the_target_itself_is_not_written_over(head: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(head), str(target), "--to", "vllm", "--overwrite"]) == 2
    assert "holds the target that is read" in capsys.readouterr().err
    assert (target / "model.safetensors").is_file()


def test_an_export_that_reads_back_differently_leaves_nothing(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle.formats import write

    tensors = write._tensors

    def spoilt(*args: Any) -> dict[str, torch.Tensor]:
        found = tensors(*args)
        found["fc.weight"] = found["fc.weight"] + 1
        return found

    monkeypatch.setattr(write, "_tensors", spoilt)
    assert main(["export", str(head), str(tmp_path / "out"), "--to", "vllm"]) == 2
    assert "read back differently (weights by 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_target_that_the_runtime_cannot_serve_so_is_told_in_the_printout_and_on_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(save_tiny_target(tmp_path / "target", "gemma2", num_hidden_layers=8))
    save_head(Eagle3Head(Eagle3HeadConfig.for_target(load_config(TargetConfig(model=model)))), tmp_path / "head")
    for to, told in (("vllm", "does not support EAGLE3 interface"), ("sglang", "no set_eagle3_layers_to_capture")):
        assert main(["export", str(tmp_path / "head"), str(tmp_path / to), "--to", to, "--target", model]) == 0
        for text in (capsys.readouterr().out, (tmp_path / to / "README.md").read_text().split("## Limits")[1]):
            assert "for gemma2 targets: " in text
            assert told in text
            assert "eagle generate" in text
    other = str(save_tiny_target(tmp_path / "llama", num_hidden_layers=8))
    assert main(["export", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "vllm", "--target", other]) == 0
    assert "targets: " not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spelled", "rope", "told"),
    [
        ({}, {"rope_type": "default", "rope_theta": 5e5}, '"rope_theta": 500000.0'),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}, None),
        ({}, {"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, '"rope_scaling": {"factor": 2.0,'),
    ],
)  # fmt: skip
def test_the_references_command_names_the_rope_that_it_would_not_find(
    spelled: dict[str, Any], rope: dict[str, Any], told: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers 5 saves rope_parameters alone, the reference reads rope_theta and rope_scaling of its target's config."""
    model = save_tiny_target(tmp_path / "target", num_hidden_layers=8, rope_parameters=rope)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | spelled))
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config = load_config(TargetConfig(model=str(model)))
    save_head(Eagle3Head(Eagle3HeadConfig.for_target(config, rope_parameters=plain)), tmp_path / "head")
    for to in ("reference", "vllm"):
        command = ["export", str(tmp_path / "head"), str(tmp_path / to), "--to", to, "--target", str(model)]
        assert main(command) == 0
        for text in (capsys.readouterr().out.split("serve it:")[1], (tmp_path / to / "README.md").read_text()):
            assert (told is not None and told in text) == (told is not None and to == "reference"), (to, text)
            assert ("Add to it first" in text) == (told is not None and to == "reference")


class Hub:
    """What HfApi does, written down."""

    def __init__(self, error: Exception | None = None, *, public: bool = False, refusal: Exception | None = None):
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error, self.public, self.refusal = error, public, refusal

    def create_repo(self, repo: str, **options: Any) -> str:
        if self.error is not None:
            raise self.error
        self.calls.append(("create", {"repo": repo, **options}))
        return f"https://hub/{repo}"

    def repo_info(self, repo: str) -> SimpleNamespace:
        return SimpleNamespace(private=not self.public)

    def upload_folder(self, **options: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        files = sorted(file.name for file in Path(options["folder_path"]).iterdir())
        self.calls.append(("upload", {"repo": options["repo_id"], "files": files}))


def test_a_folder_is_uploaded_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub = Hub()
    assert push_to_hub(tmp_path, "owner/head", private=True, client=hub) == "https://hub/owner/head"
    assert hub.calls == [
        ("create", {"repo": "owner/head", "private": True, "exist_ok": True}),
        ("upload", {"repo": "owner/head", "files": ["config.json"]}),
    ]


def test_a_private_head_is_not_uploaded_into_a_public_repository(tmp_path: Path) -> None:
    hub = Hub(public=True)
    with pytest.raises(EagleError, match="exists and is public, which --private does not change"):
        push_to_hub(tmp_path, "owner/head", private=True, client=hub)
    assert [call for call, _ in hub.calls] == ["create"]
    push_to_hub(tmp_path, "owner/head", client=hub)
    assert [call for call, _ in hub.calls] == ["create", "create", "upload"]


def test_metadata_that_the_hub_refuses_is_one_message(tmp_path: Path) -> None:
    refusal = ValueError('Invalid metadata in README.md.\n- "license" must be one of [apache-2.0]')
    with pytest.raises(EagleError, match=r'README\.md\. - "license" must be.*--license, --name.*hf upload') as caught:
        push_to_hub(tmp_path, "owner/head", client=Hub(refusal=refusal))
    assert "\n" not in str(caught.value)


class ConnectError(Exception):
    """As the hub's HTTP library raises it: no relation of OSError."""

    __module__ = "httpx2"


@pytest.mark.parametrize(
    "error",
    [OfflineModeIsEnabled("offline mode is enabled"), OSError("no route\nsecond line"), ConnectError("no route")],
)
def test_without_the_hub_one_message_says_what_to_do(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(
        EagleError, match=r"owner/head could not be uploaded to \((offline|no route).*hf upload"
    ) as caught:
        push_to_hub(tmp_path, "owner/head", client=Hub(error))
    assert "\n" not in str(caught.value)


def test_a_defect_of_ours_is_not_taken_for_the_hubs(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        push_to_hub(tmp_path, "owner/head", client=Hub(TypeError("a defect")))


def test_the_command_uploads_and_serves_from_the_repository(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uploaded: list[tuple[Path, str, bool]] = []

    def push(folder: Path, repo: str, *, private: bool) -> str:
        uploaded.append((folder, repo, private))
        return "https://hub"

    monkeypatch.setattr(export_cli, "push_to_hub", push)
    out = tmp_path / "out"
    named = ["--name", "owner/model", "--push-to-hub", "owner/head"]
    assert main(["export", str(head), str(out), "--to", "vllm", *named]) == 0
    assert uploaded == [(out, "owner/head", False)]
    printed = capsys.readouterr().out
    assert '"model": "owner/head"' in printed
    assert "uploaded to https://hub" in printed
    assert main(["export", str(head), str(out), "--to", "vllm", "--private", "--overwrite"]) == 2
    assert "--private does nothing" in capsys.readouterr().err


@pytest.mark.parametrize("training", [{"recipe": [1]}, {"recipe": {"target": "x", "data": {"sources": 5}}}])
def test_a_training_record_of_another_shape_does_not_stop_the_card(
    training: dict[str, Any], head: Path, tmp_path: Path
) -> None:
    (head / "training.json").write_text(json.dumps(training))
    assert main(["export", str(head), str(tmp_path / "out"), "--to", "vllm"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "revision: not recorded" in card
    assert "not recorded" in card.split("## Data")[1].split("##")[0]
