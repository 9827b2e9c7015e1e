"""Folders of other projects, written by hand (folders.py), become heads that compute what their formats mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.cli.main import main
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.formats.read import Overrides, ReadHead, read_head
from eagle.formats.registry import FORMATS
from eagle.heads.eagle3 import Eagle3Head
from eagle.heads.vocabulary import DraftTokens
from tests import eagle3_reference as reference
from tests.exact import same
from tests.formats import folders
from tests.tiny import save_tiny_target, tiny_model

FORMS = ["bin", "safetensors", "sharded-bin", "sharded-safetensors"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


def read(folder: Path, made: tuple[dict[str, Any], folders.State], **config: Any) -> ReadHead:
    return read_head(folders.write(folder, {**made[0], **config}, made[1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draft", [reference.D, reference.V])
@pytest.mark.parametrize("name", folders.EAGLE3)
def test_every_eagle3_format_is_detected_and_its_weights_kept(name: str, draft: int, form: str, tmp_path: Path) -> None:
    state = reference.random_state(draft=draft)
    read = read_head(folders.write(tmp_path, *folders.EAGLE3[name](state), form=form))
    assert read.format.name == name
    assert read.head.version == "eagle3"
    got = read.head.state_dict()
    assert got.keys() == state.keys()
    assert max(float((got[key].float() - state[key].float()).abs().max()) for key in state) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biases", [{}, {"fc_bias": True}, {"qkv_bias": True}])
@pytest.mark.parametrize("name", folders.EAGLE1)
def test_every_eagle1_format_is_detected_and_its_weights_kept(
    name: str, biases: dict[str, bool], form: str, tmp_path: Path
) -> None:
    state = folders.eagle1_state(**biases)
    read = read_head(folders.write(tmp_path, *folders.EAGLE1[name](state), form=form))
    assert (read.format.name, read.head.version) == (name, "eagle1")
    got = read.head.state_dict()
    assert got.keys() == state.keys()
    assert all(torch.equal(got[key], state[key]) for key in state)


@pytest.mark.parametrize("name", folders.EAGLE3)
@torch.inference_mode()
def test_an_imported_head_computes_what_its_format_means(name: str, tmp_path: Path) -> None:
    state = reference.random_state()
    head = read(tmp_path, folders.EAGLE3[name](state)).head
    assert isinstance(head, Eagle3Head)
    theta = 10000.0 if name == "reference" else 1000000.0
    expected_TH = reference.fuse(state, states_TX := torch.randn(9, 3 * reference.H))
    embeddings_TH, got_TH = torch.randn(9, reference.H), head.fuse(states_TX[None])[0]
    options: dict[str, Any] = {"theta": theta, "norm_before_residual": name == "speculators"}
    for _ in range(2):
        expected_TH = reference.forward(state, expected_TH, embeddings_TH, **options)
        got_TH = head(got_TH[None], embeddings_TH[None])[0]
    logits_TD = head.logits(got_TH, DraftTokens.__new__(DraftTokens))
    assert same(logits_TD, reference.logits(state, expected_TH))
    if name != "reference":
        assert head.aux_layers == (1, 4, 6)
    assert head.config.aux_layers is not None or name == "reference"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (1, 4, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}, (2, 3, 5)),  # the top level counts, and the conflict is said
        ({"eagle_config": None}, None),
    ],
)
def test_layer_ids_come_from_where_the_format_keeps_them(config: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    found = read(tmp_path, folders.specforge(reference.random_state()), **config)
    layers = found.head.config.aux_layers
    assert (layers if layers is None else tuple(layers)) == expected
    [told] = [line for line in found.assumptions if line.startswith("aux layers")]
    assert ("not taken" in told) == ("eagle_aux_hidden_state_layer_ids" in config)


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    found = read(tmp_path, folders.reference3(reference.random_state()), rms_norm_eps=None)
    assert found.assumptions == (
        "RoPE theta 10000 (the format's default: config.json names none)",
        "norm epsilon 1e-06 (Llama's default: config.json names none)",
        "norm_before_residual false (reference EAGLE heads are so: config.json does not tell)",
        "aux layers c = the target's [2, L//2, L-3] (config.json names none: the published choice)",
        "draft vocabulary: 90 tokens",
    )


@pytest.mark.parametrize("spoilt", [{"rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": -1.0}])
def test_a_rope_base_that_is_said_wins_over_one_that_is_wrong(spoilt: dict[str, Any], tmp_path: Path) -> None:
    config, state = folders.specforge(reference.random_state())
    folder = folders.write(tmp_path, {**config, **spoilt}, state)
    with pytest.raises(EagleError, match="--rope-theta"):
        read_head(folder)
    found = read_head(folder, overrides=Overrides(rope_theta=10000.0))
    assert found.head.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert found.assumptions[0] == "RoPE theta 10000 (as --rope-theta says)"


def test_angelslims_own_default_layers_are_a_doubt_where_none_are_named(tmp_path: Path) -> None:
    config, state = folders.angelslim(reference.random_state())
    named = read_head(folders.write(tmp_path / "named", config, state))
    assert not any("(L+1)//2" in line for line in named.assumptions)
    del config["aux_hidden_states_layer_ids"]
    found = read_head(folders.write(tmp_path / "unnamed", config, state))
    assert (found.format.name, found.head.config.aux_layers) == ("angelslim", None)
    assert any("c = [2, (L+1)//2, L-2]" in line for line in found.assumptions)


class DeepSeek:
    """A target whose layer ids SGLang reads by another rule than the common one."""

    num_layers, model_type = 8, "deepseek_v3"


@pytest.mark.parametrize("name", ["modelopt", "angelslim", "specforge"])
def test_only_ids_meant_for_sglang_follow_its_rule_for_the_family(name: str, tmp_path: Path) -> None:
    config, state = folders.EAGLE3[name](reference.random_state())
    config.pop("aux_hidden_states_layer_ids", None)
    config.setdefault("eagle_config", {})["eagle_aux_hidden_state_layer_ids"] = [0, 3, 5]
    found = read_head(folders.write(tmp_path, config, state), target=DeepSeek())
    assert found.format.name == name
    assert tuple(found.head.config.aux_layers) == ((0, 3, 5) if name == "specforge" else (1, 4, 6))


def test_ids_meant_for_sglang_wait_for_the_target_wherever_a_head_is_loaded(tmp_path: Path) -> None:
    config, state = folders.specforge(reference.random_state())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    folder = folders.write(tmp_path, config, state)
    for family, layers in (("deepseek_v3", (0, 3, 5)), ("llama", (1, 4, 6))):
        head = load_head(folder)
        assert isinstance(head, Eagle3Head)
        head.bind(8, family=family)
        assert head.aux_layers == layers, family
        head.bind(8, family="llama")
        assert head.aux_layers == layers, "settled once"
    (assumed,) = [line for line in read_head(folder).assumptions if line.startswith("aux layers")]
    assert "a target settles it" in assumed


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4),
    ],
)
def test_the_reference_rotates_with_its_own_base_wherever_there_is_a_scaling(
    config: dict[str, Any], theta: float, tmp_path: Path
) -> None:
    made = folders.reference1(folders.eagle1_state())
    head = read(tmp_path, made, **config).head
    assert head.config.rope_parameters["rope_theta"] == theta
    asked = read_head(tmp_path, overrides=Overrides(rope_theta=7.0)).head
    assert asked.config.rope_parameters["rope_theta"] == 7.0


def test_two_spellings_of_different_scalings_are_refused(tmp_path: Path) -> None:
    made = folders.specforge(reference.random_state())
    linear = {"type": "linear", "factor": 2.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert read(tmp_path, made, rope_theta=1e4, rope_scaling=linear, rope_parameters=new).head is not None
    for other in ({"rope_type": "default", "rope_theta": 1e4}, {**new, "factor": 4.0}):
        with pytest.raises(EagleError, match="two different scalings"):
            read(tmp_path, made, rope_theta=1e4, rope_scaling=linear, rope_parameters=other)


def test_speculators_without_its_residual_setting_is_asked_for_it(tmp_path: Path) -> None:
    config, state = folders.speculators(reference.random_state(), norm_before_residual=None)
    folder = folders.write(tmp_path, config, state)
    with pytest.raises(EagleError, match=r"--norm-before-residual true\|false"):
        read_head(folder)
    head = read_head(folder, overrides=Overrides(norm_before_residual=True)).head
    assert isinstance(head, Eagle3Head)
    assert head.config.norm_before_residual


def test_layer_defaults_of_speculators_are_those_of_the_layers_class(tmp_path: Path) -> None:
    config, state = folders.speculators(reference.random_state(kv=reference.HEADS))
    for key in ("rms_norm_eps", "num_key_value_heads", "rope_parameters", "head_dim"):
        del config["transformer_layer_config"][key]
    head = read_head(folders.write(tmp_path, config, state)).head
    assert head.config.rms_norm_eps == 1e-6
    assert head.config.num_key_value_heads == reference.HEADS
    assert head.config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("norm_before_fc", True, r"norm_before_fc is True \(a norm before fc\)"),
        ("norm_output", False, r"norm_output is False \(SpecForge computes the logits without .* --format vllm"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("target_hidden_size", 64, "narrower or wider"),
        ("quantization_config", {"quant_method": "fp8"}, "quantised weights"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}, "RoPE scaling 'longrope' is not supported"),
        ("rope_parameters", {"rope_theta": 5.0, "rope_type": "default"}, "rope_theta is 1000000, rope_parameters says 5.0"),
        ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ("eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step is 4"),
        ("eagle_aux_hidden_state_layer_ids", "2,4", "no layer ids"),
        ("eagle_aux_hidden_state_layer_ids", [2, 2, 5], "expected different ones"),
        ("eagle_aux_hidden_state_layer_ids", [5, 4, 2], "in ascending order"),
        ("rope_theta", -1.0, "rope_theta is -1, expected a positive number"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
        ("head_dim", 10**30, "describes no head"),
    ],
)  # fmt: skip
def test_heads_that_compute_otherwise_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=message):
        read(tmp_path, folders.specforge(reference.random_state()), **{key: value})


def test_tensors_are_checked_under_the_formats_names(tmp_path: Path) -> None:
    config, state = folders.modelopt(reference.random_state())
    lacking = {key: value for key, value in state.items() if "down_proj" not in key}
    with pytest.raises(EagleError, match=r"missing keys: layers\.0\.mlp\.down_proj\.weight; stray keys: none"):
        read_head(folders.write(tmp_path / "a", config, lacking))
    normed = {**state, "layers.0.self_attn.q_norm.weight": torch.ones(8)}
    with pytest.raises(EagleError, match=r"stray keys: layers\.0\.self_attn\.q_norm\.weight.*norms of q and k"):
        read_head(folders.write(tmp_path / "b", config, normed))
    narrow = {**state, "fc.weight": state["fc.weight"][:, :64].contiguous()}
    with pytest.raises(EagleError, match=r"fc\.weight \(32, 64\) instead of \(32, 96\)"):
        read_head(folders.write(tmp_path / "c", config, narrow))
    eighth = {**state, "fc.weight": state["fc.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(EagleError, match="float8_e4m3fn, expected float32, bfloat16 or float16"):
        read_head(folders.write(tmp_path / "d", config, eighth))


def test_zero_biases_of_a_loader_are_left_out_and_others_named(tmp_path: Path) -> None:
    state = folders.eagle1_state()
    config, _ = folders.reference1(state)
    config |= {"architectures": ["LlamaForCausalLMEagle"]}
    found = read_head(folders.write(tmp_path / "a", config, {**state, "fc.bias": torch.zeros(32)}))
    assert (found.format.name, "fc.bias" in found.head.state_dict()) == ("sglang", False)
    found = read_head(folders.write(tmp_path / "b", config, {**state, "fc.bias": torch.ones(32)}))
    assert "fc.bias" in found.head.state_dict()
    biased = {**state, "layers.0.self_attn.o_proj.bias": torch.ones(32)}
    with pytest.raises(EagleError, match=r"stray keys: layers\.0\.self_attn\.o_proj\.bias"):
        read_head(folders.write(tmp_path / "c", config, biased))


def test_the_format_can_be_said(tmp_path: Path) -> None:
    config, state = folders.modelopt(reference.random_state())
    folder = folders.write(tmp_path, config, state)
    assert read_head(folder, format=FORMATS["modelopt"]).evidence == "as --format says"
    with pytest.raises(EagleError, match=r"missing keys: midlayer\.hidden_norm\.weight.*stray keys: layers\.0\."):
        read_head(folder, format=FORMATS["reference"])


def test_the_command_writes_a_folder_of_ours(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = reference.random_state()
    state["embed_tokens.weight"] = tiny_model(num_hidden_layers=8).get_input_embeddings().weight.detach().clone()
    source = folders.write(tmp_path / "source", *folders.speculators(state))
    assert main(["import", str(source), str(tmp_path / "out"), "--target", str(target)]) == 0
    out = capsys.readouterr().out
    assert "EAGLE-3 head, speculators format (config.json has speculators_model_type" in out
    assert "norm_before_residual true (config.json)" in out
    assert "embed_tokens.weight equals the target's: left out" in out
    assert "aux layers c = [1, 4, 6] of 8" in out
    head = load_head(tmp_path / "out")
    assert isinstance(head, Eagle3Head)
    assert head.config.norm_before_residual
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "eagle3_head"
    assert (config["target_identity"]["model"], config["target_identity"]["num_layers"]) == (str(target), 8)
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again"), "--to", "vllm"]) == 0
    capsys.readouterr()
    assert main(["import", str(source), str(tmp_path / "out"), "--target", str(target)]) == 2
    assert "add --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize("carried", ["embed_tokens.weight", "lm_head.weight"])
def test_layers_of_another_target_are_refused(
    carried: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**folders.eagle1_state(), carried: torch.randn(reference.V, reference.H)}
    source = folders.write(tmp_path / "source", *folders.reference1(state))
    assert main(["import", str(source), str(tmp_path / "out"), "--target", str(target)]) == 2
    assert f"{carried} (384, 32) is not that of target" in capsys.readouterr().err
    assert main(["import", str(source), str(tmp_path / "out")]) == 2
    assert f"the file carries {carried}" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", str(target)]) == 2
    assert f"{carried} (384, 32) is not that of target" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_foreign_folder_says_how_it_was_read(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders.write(tmp_path / "source", *folders.reference3(reference.random_state()))
    assert main(["export", str(source), str(tmp_path / "out"), "--to", "vllm", "--target", str(target)]) == 0
    assert "read as reference EAGLE: RoPE theta 10000 (the format's default" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_a_kill_left_of_an_overwriting_is_put_back(
    command: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed between the renames: the old folder lies aside, nothing in its place."""
    source = folders.write(tmp_path / "source", *folders.reference3(reference.random_state()))
    arguments = [command, str(source), str(tmp_path / "out"), "--target", str(target)]
    arguments += ["--to", "vllm"] if command == "export" else []
    assert main(arguments) == 0
    (tmp_path / "out").rename(tmp_path / ".out.123.old")
    (tmp_path / ".out.123.tmp").mkdir()
    assert main(arguments) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert main([*arguments, "--overwrite"]) == 0


def test_a_target_with_other_layers_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folders.specforge(reference.random_state())
    made[0]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 3, 7]
    source = folders.write(tmp_path / "source", *made)
    assert main(["import", str(source), str(tmp_path / "out"), "--target", str(target)]) == 2
    assert "aux_layers is [1, 4, 8], but the target has hidden states 0 .. 7" in capsys.readouterr().err


def test_what_the_files_leave_out_is_not_made_up(tmp_path: Path) -> None:
    config, state = folders.specforge(reference.random_state())
    for key in ("hidden_size", "num_attention_heads", "vocab_size"):
        lacking = {name: value for name, value in config.items() if name != key}
        with pytest.raises(EagleError, match=f"{key} is None, expected a whole number"):
            read_head(folders.write(tmp_path / key, lacking, state))
    broken = {**state, "fc.weight": torch.full_like(state["fc.weight"], float("nan"))}
    with pytest.raises(EagleError, match=r"NaN or infinite values in fc\.weight"):
        read_head(folders.write(tmp_path / "nan", config, broken))


@pytest.mark.parametrize(
    ("kept", "message"),
    [({"to": ["vllm"]}, None), ({"target_identity": "x"}, "target_identity is 'x'"), ({"draft_coverage": "y"}, "'y'")],
)
def test_a_sidecar_that_was_changed_is_named_or_passed_over(
    kept: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    folder = folders.write(tmp_path, *folders.specforge(reference.random_state()))
    (folder / "eagle_export.json").write_text(json.dumps(kept))
    if message is None:
        assert read_head(folder).format.name == "specforge"
    else:
        with pytest.raises(EagleError, match=message):
            read_head(folder)


def test_options_without_effect_and_folders_that_are_not_heads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    source = folders.write(run / "source", *folders.reference1(folders.eagle1_state()))
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("years of work")

    def refused(*arguments: str) -> str:
        assert main(["import", *arguments]) == 2
        return capsys.readouterr().err

    assert "is of EAGLE-3 heads" in refused(str(source), str(tmp_path / "out"), "--norm-before-residual", "true")
    for theta in ("-3", "0", "nan", "inf"):
        assert "expected a positive number" in refused(str(source), str(tmp_path / "out"), "--rope-theta", theta)
    for holding in (run, source):
        assert "holds the head that is read" in refused(str(source), str(holding), "--overwrite")
    assert "no head's folder" in refused(str(source), str(tmp_path / "papers"), "--overwrite")
    assert (tmp_path / "papers" / "thesis.txt").is_file()
    model = save_tiny_target(tmp_path / "model")
    assert "(num_hidden_layers is 3, a head has 1)" in refused(str(source), str(model), "--overwrite")
    assert "holds the target that is read" in refused(str(source), str(model), "--overwrite", "--target", str(model))
    (tmp_path / "papers" / "config.json").write_text("{")
    assert "its config.json is damaged" in refused(str(source), str(tmp_path / "papers"), "--overwrite")
    assert (model / "model.safetensors").is_file()
    assert main(["import", str(source), str(tmp_path / "out")]) == 0
    assert "have no effect" in refused(str(tmp_path / "out"), str(tmp_path / "again"), "--rope-theta", "500000")
    assert main(["import", str(source), str(tmp_path / "out"), "--overwrite"]) == 0
    assert main(["import", str(tmp_path / "out"), str(source), "--overwrite"]) == 0, "another project's head is one too"


@pytest.mark.parametrize("out", [".", "..", "inner/.."])
def test_the_folder_that_one_is_in_is_not_written_over(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folders.write(tmp_path / "source", *folders.reference1(folders.eagle1_state()))
    (tmp_path / "work" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    for command in (["import", str(source), out], ["export", str(source), out, "--to", "vllm", "--target", "x"]):
        assert main([*command, "--overwrite"]) == 2
        assert f"{out} is the folder that you are in, or above it" in capsys.readouterr().err
