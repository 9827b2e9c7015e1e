"""`eagle lint`: every rule finds its defect, says nothing of a sound folder, and reads what our own loader refuses."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle.cli import main as cli
from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.lint.check import lint, rules
from eagle.formats.lint.files import read_head as read_files
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from tests import lint_cases
from tests.lint_cases import DEFECTS, TARGET_LAYERS, Defect, sound, write
from tests.tiny import save_tiny_target, tiny_model

SOUND = [
    *(("eagle1", runtime) for runtime in ("vllm", "sglang", "reference")),
    *(("eagle3", runtime) for runtime in ("vllm", "sglang", "speculators", "reference")),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder = tmp_path_factory.mktemp("target")
    save_tiny_target(folder, num_hidden_layers=TARGET_LAYERS)
    return TargetConfig(model=str(folder))


@pytest.fixture(scope="module")
def embedding(target: TargetConfig) -> torch.Tensor:
    return load_file(Path(target.model) / "model.safetensors")["model.embed_tokens.weight"]


@pytest.fixture(scope="module")
def rotated_otherwise(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    """The target with another RoPE base."""
    folder = tmp_path_factory.mktemp("rotated")
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    save_tiny_target(folder, num_hidden_layers=TARGET_LAYERS, rope_parameters=rope)
    return TargetConfig(model=str(folder))


def found(folder: Path, runtime: str, target: TargetConfig | None) -> dict[str, str]:
    """rule -> severity, the worst where a rule has several."""
    report = lint(folder, runtime=runtime, target=target)  # type: ignore[arg-type]
    return {finding.rule: finding.severity for finding in reversed(report.findings)}


@pytest.mark.parametrize(("version", "runtime"), SOUND)
def test_a_sound_folder_gives_no_finding(
    version: str, runtime: str, target: TargetConfig, embedding: torch.Tensor, tmp_path: Path
) -> None:
    folder = write(tmp_path / "head", *sound(version, runtime, embedding))
    assert found(folder, runtime, target) == {}
    assert found(folder, runtime, None) == {}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_is_found_by_its_rule_alone(
    defect: Defect, target: TargetConfig, rotated_otherwise: TargetConfig, embedding: torch.Tensor, tmp_path: Path
) -> None:
    values, state = sound(defect.version, defect.runtime, embedding)
    whole = write(tmp_path / "sound", values, state)
    against = rotated_otherwise if defect.rule == "rope-theta" else target
    assert found(whole, defect.runtime, against) == {}
    defect.spoil(values, state)
    findings = found(write(tmp_path / "spoilt", values, state), defect.runtime, against)
    assert findings.get(defect.rule) == defect.severity
    assert findings.keys() - {defect.rule} <= set(defect.also)


def test_every_rule_has_a_defect_that_it_finds() -> None:
    below = {"config-file", "weight-files", "index", "target-family", "target-rope"}
    assert {defect.rule for defect in DEFECTS} | below == set(rules())


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_a_config_that_is_missing_or_no_json_breaks(text: str | None, embedding: torch.Tensor, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *sound("eagle1", "vllm", embedding))
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert found(folder, "vllm", None) == {"config-file": "breaks"}


def shard(folder: Path, *, name: str = "model-00001-of-00001.safetensors") -> None:
    """Turns a folder's weights into their sharded form, with one shard."""
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / name)
    index = {"weight_map": dict.fromkeys(state, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_weights_are_read_and_a_broken_index_is_named(embedding: torch.Tensor, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *sound("eagle3", "vllm", embedding))
    shard(folder)
    assert found(folder, "vllm", None) == {}
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    index.write_text(
        json.dumps({"weight_map": {**whole["weight_map"], "ghost.weight": "model-00001-of-00001.safetensors"}})
    )
    assert found(folder, "vllm", None) == {"index": "breaks"}
    index.write_text(
        json.dumps({"weight_map": {**whole["weight_map"], "norm.weight": "model-00002-of-00002.safetensors"}})
    )
    evidence = [finding.evidence for finding in lint(folder, runtime="vllm").findings if finding.rule == "index"]
    assert any("model-00002-of-00002.safetensors (1 tensors), which is not there" in line for line in evidence)
    index.write_text("{}")
    assert found(folder, "vllm", None) == {"index": "breaks"}


def test_weights_that_are_missing_cut_short_or_no_tensors_break(embedding: torch.Tensor, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *sound("eagle1", "vllm", embedding))
    weights = folder / "model.safetensors"
    held = weights.read_bytes()
    weights.write_bytes(held[: len(held) // 2])
    assert found(folder, "vllm", None) == {"weight-files": "breaks"}
    weights.unlink()
    torch.save({"fc.weight": torch.ones(2), "step": 3}, folder / "pytorch_model.bin")
    assert found(folder, "vllm", None)["weight-files"] == "breaks"
    (folder / "pytorch_model.bin").rename(folder / "head.pt")
    (finding,) = lint(folder, runtime="vllm").findings
    assert "only head.pt" in finding.evidence


def test_a_null_rope_theta_leaves_the_other_spelling(embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", "vllm", embedding)
    values |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert read_files(write(tmp_path / "head", values, state)).theta == 500000.0


@pytest.mark.parametrize("runtime", ["vllm", "speculators"])
def test_a_window_is_sound_where_the_runtime_keeps_it(runtime: str, embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", runtime, embedding)
    layer = values.get("transformer_layer_config", values)
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}
    assert found(write(tmp_path / "head", values, state), runtime, None) == {}


@pytest.mark.parametrize("theta", ["10000", -1.0, [1], True])
def test_a_theta_that_is_no_base_breaks(theta: object, embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", "vllm", embedding)
    folder = write(tmp_path / "head", {**values, "rope_theta": theta}, state)
    assert found(folder, "vllm", None)["rope-spelling"] == "breaks"


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "t2d", "fc.weight"])
def test_tensors_of_other_ranks_are_findings(name: str, embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", "reference", embedding)
    for other in (torch.ones(()), torch.ones(0), torch.ones(1, 2, 3)):
        folder = write(tmp_path / "head", values, {**state, name: other})
        assert not lint(folder, runtime="reference").sound, (name, other.shape)


def test_what_a_runtime_takes_from_the_target_need_not_be_in_the_file(embedding: torch.Tensor, tmp_path: Path) -> None:
    """Over the whole vocabulary vLLM and SGLang draft with the target's LM head where the file has none."""
    values, state = sound("eagle3", "vllm", embedding)
    for name in ("d2t", "t2d", "lm_head.weight"):
        del state[name]
    folder = write(tmp_path / "head", {**values, "draft_vocab_size": values["vocab_size"]}, state)
    assert found(folder, "vllm", None) == {}
    assert found(folder, "sglang", None)["missing-keys"] == "silently wrong"
    del values["draft_vocab_size"]
    folder = write(tmp_path / "head", values, state)
    assert found(folder, "vllm", None) == {}
    assert "missing-keys" not in found(folder, "sglang", None)


def test_the_classes_that_runtimes_have_for_other_families_are_known(embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle1", "sglang", embedding)
    heads, rows = values["num_attention_heads"], values["head_dim"]
    for name, count in (("q", heads), ("k", values["num_key_value_heads"]), ("v", values["num_key_value_heads"])):
        state[f"layers.0.self_attn.{name}_proj.bias"] = torch.ones(count * rows)
    qwen2 = {**values, "architectures": ["Qwen2ForCausalLMEagle"], "model_type": "qwen2"}
    assert found(write(tmp_path / "qwen2", qwen2, state), "sglang", None) == {}
    values, state = sound("eagle3", "vllm", embedding)
    values["architectures"] = ["Eagle3Qwen3vlForCausalLM"]
    assert found(write(tmp_path / "qwen3vl", values, state), "vllm", None) == {}


@pytest.mark.parametrize("layers", [[2, 5], [1, 2, 4, 5]])
def test_other_numbers_of_layers_are_right_where_the_runtime_finds_them(
    layers: list[int], embedding: torch.Tensor, tmp_path: Path
) -> None:
    """vLLM counts no ids at the top level, SGLang counts those inside eagle_config, speculators' form nests the number."""
    values, state = sound("eagle3", "vllm", embedding)
    lint_cases._fused(layers)(values, state)
    assert found(write(tmp_path / "head", values, state), "vllm", None)["layer-count"] == "breaks"
    values["num_aux_hidden_states"] = len(layers)
    assert found(write(tmp_path / "head", values, state), "vllm", None) == {}
    values, state = sound("eagle3", "sglang", embedding)
    lint_cases._fused(layers)(values, state)
    lint_cases._nested([c - 1 for c in layers])(values, state)
    assert found(write(tmp_path / "head", values, state), "sglang", None) == {}
    values, state = sound("eagle3", "speculators", embedding)
    lint_cases._fused(layers)(values, state)
    (finding,) = lint(write(tmp_path / "head", values, state), runtime="speculators").findings
    assert f'write "num_aux_hidden_states": {len(layers)} into transformer_layer_config' in finding.remedy
    values["transformer_layer_config"]["num_aux_hidden_states"] = len(layers)
    for runtime in ("speculators", "vllm"):
        assert found(write(tmp_path / "head", values, state), runtime, None) == {}


def test_a_target_that_the_runtime_does_not_serve_so_is_told(embedding: torch.Tensor, tmp_path: Path) -> None:
    """Of gemma2 neither runtime's model hands out inner states; vLLM's of granite does, SGLang's does not."""
    expected = {("gemma2", "vllm"): "breaks", ("gemma2", "sglang"): "breaks", ("granite", "sglang"): "breaks"}
    expected |= {("olmo2", "vllm"): "warning", ("olmo2", "sglang"): "breaks", ("qwen2", "reference"): "breaks"}
    for family in ("gemma2", "granite", "olmo2", "qwen2"):
        model = tmp_path / family
        save_tiny_target(model, family, num_hidden_layers=TARGET_LAYERS)
        for runtime in ("vllm", "sglang", "reference"):
            folder = write(tmp_path / "head", *sound("eagle3", runtime, embedding))
            told = found(folder, runtime, TargetConfig(model=str(model))).get("target-family")
            assert told == expected.get((family, runtime), "breaks" if runtime == "reference" else None), (
                family,
                runtime,
            )
    report = lint(folder, runtime="sglang", target=TargetConfig(model=str(tmp_path / "granite")))
    (remedy,) = [finding.remedy for finding in report.findings if finding.rule == "target-family"]
    assert remedy == "serve it with vLLM 0.33 (eagle export HEAD OUT --to vllm)"


def test_a_target_whose_rope_the_reference_would_not_find_is_told(
    rotated_otherwise: TargetConfig, embedding: torch.Tensor, tmp_path: Path
) -> None:
    values, state = sound("eagle3", "reference", embedding)
    folder = write(tmp_path / "head", values, state)
    (finding,) = lint(folder, runtime="reference", target=rotated_otherwise).findings
    assert (finding.rule, finding.severity) == ("target-rope", "silently wrong")
    assert finding.remedy == 'add "rope_theta": 500000.0 to the target\'s config.json'
    model = shutil.copytree(rotated_otherwise.model, tmp_path / "spelled")
    config = json.loads((model / "config.json").read_text()) | {"rope_theta": 500000.0}
    (model / "config.json").write_text(json.dumps(config))
    assert found(folder, "reference", TargetConfig(model=str(model))) == {}


def test_a_d2t_that_t2d_confirms_is_no_doubt(embedding: torch.Tensor, tmp_path: Path) -> None:
    """The first tokens have offset zero; every other token's offsets are all different, as ids are."""
    values, state = sound("eagle3", "vllm", embedding)
    for ids_D in (torch.arange(lint_cases.D), 2 * torch.arange(lint_cases.D) + 1):
        state["d2t"], state["t2d"] = ids_D - torch.arange(lint_cases.D), torch.isin(torch.arange(lint_cases.V), ids_D)
        assert found(write(tmp_path / "head", values, state), "vllm", None) == {}
    state["d2t"] = ids_D  # and ids that t2d names are known for what they are
    findings = lint(write(tmp_path / "head", values, state), runtime="vllm").findings
    assert [finding.remedy for finding in findings if finding.rule == "d2t-ids"] == ["write d2t - arange(Vd)"]


def test_sglang_takes_both_names_of_the_layer(embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", "sglang", embedding)
    lint_cases._rename("midlayer.", "layers.0.")(values, state)
    assert found(write(tmp_path / "head", values, state), "sglang", None) == {}


def test_a_target_whose_weights_are_damaged_is_named(
    target: TargetConfig, embedding: torch.Tensor, tmp_path: Path
) -> None:
    values, state = sound("eagle1", "vllm", embedding)
    folder = write(tmp_path / "head", values, {**state, "embed_tokens.weight": embedding})
    other = shutil.copytree(target.model, tmp_path / "target")
    assert found(folder, "vllm", TargetConfig(model=str(other))) == {}
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(EagleError, match=r"model\.safetensors cannot be read"):
        lint(folder, runtime="vllm", target=TargetConfig(model=str(other)))
    weights.unlink()
    for text, said in (("{", "is not valid JSON"), ("{}", "has no weight_map")):
        (other / "model.safetensors.index.json").write_text(text)
        with pytest.raises(EagleError, match=said):
            lint(folder, runtime="vllm", target=TargetConfig(model=str(other)))


def test_a_width_that_is_no_number_is_passed_over(
    target: TargetConfig, embedding: torch.Tensor, tmp_path: Path
) -> None:
    values, state = sound("eagle3", "vllm", embedding)
    folder = write(tmp_path / "head", {**values, "target_hidden_size": "576"}, state)
    assert found(folder, "vllm", target) == {}


def test_another_target_is_told_by_its_width_and_vocabulary(embedding: torch.Tensor, tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *sound("eagle3", "vllm", embedding))
    other = tmp_path / "other"
    save_tiny_target(other, num_hidden_layers=TARGET_LAYERS, hidden_size=64, vocab_size=500)
    findings = found(folder, "vllm", TargetConfig(model=str(other)))
    assert {"hidden-size": "breaks", "vocab-size": "breaks"}.items() <= findings.items()


def test_a_head_that_our_loader_refuses_is_read_all_the_same(embedding: torch.Tensor, tmp_path: Path) -> None:
    values, state = sound("eagle3", "sglang", embedding)
    state["d2t"] = torch.zeros_like(state["d2t"])
    folder = write(tmp_path / "head", values, state)
    with pytest.raises(EagleError):
        load_head(folder)
    assert found(folder, "sglang", None)["d2t-zero"] == "silently wrong"


def test_a_head_of_this_project_is_sent_to_the_exporter(tmp_path: Path) -> None:
    save_head(EagleHead(EagleHeadConfig.for_target(tiny_model().config)), tmp_path / "head")
    report = lint(tmp_path / "head", runtime="vllm")
    assert not report.sound
    assert any("eagle export HEAD OUT --to vllm" in finding.remedy for finding in report.findings)


def test_a_speculators_folder_is_sound_for_vllm_and_no_folder_of_sglangs(
    embedding: torch.Tensor, tmp_path: Path
) -> None:
    folder = write(tmp_path / "head", *sound("eagle3", "speculators", embedding))
    assert found(folder, "vllm", None) == {}
    assert found(folder, "sglang", None)["model-type"] == "breaks"
    eagle1 = write(tmp_path / "eagle1", *sound("eagle1", "vllm", embedding))
    assert found(eagle1, "speculators", None)["speculators-config"] == "breaks"


def test_deepseek_and_gpt_oss_count_layers_their_own_way(embedding: torch.Tensor, tmp_path: Path) -> None:
    """The same nested ids, read as SGLang reads them for each family (held against the ids at the top level)."""
    from eagle.formats.lint.files import TargetNumbers, read_head
    from eagle.formats.lint.layers import layer_convention, layer_ids
    from eagle.formats.lint.rules import Look

    values, state = sound("eagle3", "sglang", embedding)
    facts = {
        "name": "x",
        "architecture": None,
        "hidden_size": 32,
        "vocab_size": 384,
        "theta": 1e4,
        "max_positions": None,
    }
    for family, nested, top in (
        ("deepseek_v3", [3, 4, 6], [3, 4, 6]),
        ("deepseek_v3", [3, 4, 7], [3, 4, 7]),
        ("gpt_oss", [1, 4, 8], [1, 4, 8]),
        ("llama", [1, 3, 5], [2, 4, 6]),
    ):
        lint_cases._nested(nested, eagle_aux_hidden_state_layer_ids=top)(values, state)
        look = Look(
            head=read_head(write(tmp_path / family, values, state)),
            target=TargetNumbers(model_type=family, num_layers=8, **facts),  # type: ignore[arg-type]
            runtime="sglang",
        )
        assert list(layer_convention(look)) == [], family
        assert bool(list(layer_ids(look))) == (max(top) == 8), family  # the last hidden state is never captured
        lint_cases._nested([v + 1 for v in nested], eagle_aux_hidden_state_layer_ids=top)(values, state)
        look = Look(head=read_head(write(tmp_path / family, values, state)), target=look.target, runtime="sglang")
        assert list(layer_convention(look)) != [], family


def test_the_target_is_opened_as_the_heads_papers_say(
    embedding: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    monkeypatch.setattr(
        "eagle.formats.lint.check.read_target", lambda config, *, embedding: opened.append(config.revision)
    )
    folder = write(tmp_path / "head", *sound("eagle1", "vllm", embedding))
    for revision in ("abc", None):
        (folder / "training.json").write_text(
            json.dumps({"recipe": {"target": {"model": "a/b", "revision": revision}}})
        )
        cli.main(["lint", str(folder), "--for", "vllm", "--target", "a/b"])
    assert opened == ["abc", None]


def test_the_command_prints_a_table_or_json_and_its_exit_code_tells(
    embedding: torch.Tensor, target: TargetConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["lint", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    values, state = sound("eagle1", "vllm", embedding)
    folder = str(write(tmp_path / "head", values, state))
    assert run(folder, "--for", "vllm", "--target", target.model)[0] == 0
    write(tmp_path / "head", {**values, "torch_dtype": "float16"}, state)
    code, out, _ = run(folder, "--for", "vllm")
    assert (code, "1 warning" in out) == (0, True)
    save_file({**state, "fc.bias": torch.ones(32)}, tmp_path / "head" / "model.safetensors")
    code, out, _ = run(folder, "--for", "vllm")
    assert code == 1
    assert re.search(r"fc-bias\s+fc.bias is in the file", out)
    assert "remedy: train the head without it" in out
    code, out, _ = run(folder, "--for", "vllm", "--json")
    assert (code, json.loads(out)["findings"][0]["rule"]) == (1, "fc-bias")
    code, _, err = run(str(tmp_path / "nothing"), "--for", "vllm")
    assert (code, "no such folder" in err) == (2, True)
    code, _, err = run(folder, "--for", "vllm", "--depth", "3", "--prompts", "x.jsonl")
    assert (code, "--prompts, --depth without --parity" in err) == (2, True)
    code, _, err = run(folder, "--for", "vllm", "--parity", "--target", target.model)
    assert (code, "one at a time" in err) == (2, True)
    code, _, err = run(folder)
    assert (code, "--for" in err) == (2, True)
    code, _, err = run(folder, "--for", "vllm", "--target", "no/such/place/at/all")
    assert (code, "no/such/place/at/all" in err) == (2, True)
    assert run("--rules")[1].count("\n") == len(rules())
