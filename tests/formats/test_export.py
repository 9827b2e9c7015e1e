"""Exported folders: files as each runtime's rules want them, refusals where it would compute otherwise, round trips."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.formats.checkpoint import save_head
from eagle.formats.compare import difference
from eagle.formats.read import read_head
from eagle.formats.registry import EXPORTED, FORMATS
from eagle.formats.target_facts import TargetFacts
from eagle.formats.write import drop_idle_bias, export_head, write_export
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from tests.tiny import save_tiny_target

LAYERS, V, D = 8, 384, 90
PAIRS = [(to, version) for to in EXPORTED for version in FORMATS[to].limits]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    folder = save_tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)
    return TargetFacts(TargetConfig(model=str(folder), device="cpu"))


def make_head(version: str, target: TargetFacts, *, draft: int | None = None, **config: Any) -> DraftHead:
    torch.manual_seed(0)
    config |= {"draft_vocab_size": draft}
    head: DraftHead
    if version == "eagle1":
        head = EagleHead(EagleHeadConfig.for_target(target.config, **config))
    else:
        head = Eagle3Head(Eagle3HeadConfig.for_target(target.config, **{"aux_layers": [2, 4, 5], **config}))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3)
    if draft is not None:
        head.set_vocabulary(DraftVocabulary(target_ids_D=torch.randperm(V)[:draft].sort().values, target_size=V))
    return head


def exported(
    head: DraftHead, to: str, target: TargetFacts, folder: Path, *, dtype: str = "float32"
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    write_export(export_head(head, FORMATS[to], target, folder=str(folder), dtype=dtype), folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", [None, D])
@pytest.mark.parametrize(("to", "version"), PAIRS)
def test_a_head_comes_back_as_it_went(
    to: str, version: str, draft: int | None, dtype: str, target: TargetFacts, tmp_path: Path
) -> None:
    head = make_head(version, target, draft=draft, draft_coverage=0.75, target_identity={"model": "x"})
    if dtype == "bfloat16":
        head.bfloat16()
    exported(head, to, target, tmp_path / "out", dtype=dtype)
    read = read_head(tmp_path / "out", target=target)
    assert read.format.name == to
    found = difference(head, read.head, target.tokens)
    assert (found.weights, found.logits) == (0, 0)
    assert read.head.state_dict().keys() == head.state_dict().keys()
    assert draft is None or torch.equal(read.head.d2t, head.d2t)
    ours, theirs = read.head.config, head.config
    for key in ("rope_parameters", "rms_norm_eps", "max_position_embeddings", "draft_coverage", "target_identity"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert read.head.aux_layers == head.aux_layers
    save_head(read.head, tmp_path / "ours")
    again = difference(head, read_head(tmp_path / "ours").head, target.tokens)
    assert (again.weights, again.logits) == (0, 0)


@pytest.mark.parametrize(("to", "version"), PAIRS)
def test_a_head_with_all_that_a_runtime_takes_comes_back(
    to: str, version: str, target: TargetFacts, tmp_path: Path
) -> None:
    limits = FORMATS[to].limits[version]  # type: ignore[index]
    config: dict[str, Any] = {"attention_bias": limits.attention_bias != "no", "mlp_bias": limits.mlp_bias}
    if version == "eagle1":
        config["fc_bias"] = limits.fc_bias != "no"
    else:
        config["norm_before_residual"] = limits.norm_before_residual
        config["aux_layers"] = [2, 4, 5] if limits.default_layers else [1, 3, 7]
    if "llama3" in limits.rope_types:
        config["rope_parameters"] = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    head = make_head(version, target, draft=D, **config)
    values, state = exported(head, to, target, tmp_path)
    layer = values.get("transformer_layer_config", values)
    assert layer["attention_bias"] == (limits.attention_bias == "qkvo")
    assert layer.get("qkv_bias", False) == (limits.attention_bias == "qkv")
    assert layer["mlp_bias"] == limits.mlp_bias
    assert values.get("bias") == (True if limits.fc_bias == "optional" else None)
    rope = head.config.rope_parameters
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert (layer["rope_theta"], layer["rope_parameters"]) == (rope["rope_theta"], rope)
    assert layer["rope_scaling"] == (None if rope["rope_type"] == "default" else {**scaling, "type": rope["rope_type"]})
    read = read_head(tmp_path, target=target).head
    found = difference(head, read, target.tokens)
    assert (found.weights, found.logits) == (0, 0)
    assert read.aux_layers == head.aux_layers
    assert read.config.rope_parameters == head.config.rope_parameters
    biases = {name for name in state if name.endswith("o_proj.bias")}
    assert bool(biases) == (limits.attention_bias == "qkvo")
    assert not any(state[name].any() for name in biases)


def test_vllm_eagle1_has_no_bias_and_no_vocabulary(target: TargetFacts, tmp_path: Path) -> None:
    head = make_head("eagle1", target, draft=D)
    made = export_head(head, FORMATS["vllm"], target, folder="F", verifier="owner/name")
    assert any("draft vocabulary of 90 tokens is dropped" in note for note in made.notes)
    assert made.serve == (
        'vllm serve owner/name --speculative-config \'{"method": "eagle", "model": "F", "num_speculative_tokens": 3}\''
    )
    values, state = exported(head, "vllm", target, tmp_path)
    assert values["architectures"] == ["EagleLlamaForCausalLM"]
    assert not {"draft_vocab_size", "bias", "eagle_config"} & values.keys()
    assert not {"fc.bias", "lm_head.weight", "d2t", "t2d", "embed_tokens.weight"} & state.keys()


def test_sglang_eagle1_has_a_zero_bias_and_a_token_map(target: TargetFacts, tmp_path: Path) -> None:
    head = make_head("eagle1", target, draft=D)
    values, state = exported(head, "sglang", target, tmp_path)
    assert values["architectures"] == ["LlamaForCausalLMEagle"]
    assert torch.equal(state["fc.bias"], torch.zeros(32))
    assert "bias" not in values  # it would give q, k and v biases there
    vocabulary = head.vocabulary
    assert vocabulary is not None
    assert torch.load(tmp_path / "hot_token_ids.pt", weights_only=True) == vocabulary.target_ids_D.tolist()
    serve = export_head(head, FORMATS["sglang"], target, folder="F", tokens=1).serve
    assert serve.endswith("--speculative-num-draft-tokens 5 --speculative-token-map F/hot_token_ids.pt")
    assert "--speculative-algorithm EAGLE " in serve


@pytest.mark.parametrize(("layers", "nested"), [([2, 4, 5], None), ([1, 3, 7], [0, 2, 6])])
def test_layer_ids_are_written_as_each_runtime_reads_them(
    layers: list[int], nested: list[int] | None, target: TargetFacts, tmp_path: Path
) -> None:
    head = make_head("eagle3", target, draft=D, aux_layers=layers)
    for to in ("vllm", "sglang", "speculators", "trtllm"):
        values, _ = exported(head, to, target, tmp_path / to)
        assert values["eagle_aux_hidden_state_layer_ids"] == layers
        told = values.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        assert told == (nested if to == "sglang" else None)
    options = yaml.safe_load((tmp_path / "trtllm" / "trtllm.yaml").read_text())["speculative_config"]
    assert options["eagle3_layers_to_capture"] == [c - 1 for c in layers]
    assert options["speculative_model"] == str(tmp_path / "trtllm")


@pytest.mark.parametrize("layers", [[3, 6], [1, 3, 4, 7]])
def test_the_number_of_layers_is_written_where_each_runtime_counts_them(
    layers: list[int], target: TargetFacts, tmp_path: Path
) -> None:
    """vLLM reads num_aux_hidden_states, SGLang the ids inside eagle_config too, speculators the ids at the top."""
    head = make_head("eagle3", target, draft=D, aux_layers=layers)
    for to in ("vllm", "sglang", "speculators", "trtllm"):
        values, state = exported(head, to, target, tmp_path / to)
        assert state["fc.weight"].shape == (32, len(layers) * 32)
        assert values.get("transformer_layer_config", values)["num_aux_hidden_states"] == len(layers)
        assert values["eagle_aux_hidden_state_layer_ids"] == layers
        assert ("eagle_config" in values) == (to == "sglang")
        read = read_head(tmp_path / to, target=target).head
        assert difference(head, read, target.tokens).logits == 0
        assert list(read.aux_layers) == layers
    assert "num_aux_hidden_states" not in exported(make_head("eagle3", target), "vllm", target, tmp_path / "three")[0]


class Family(TargetFacts):
    """A target that says it is of another family, of 47 layers."""

    model_type, num_layers = "glm4_moe_lite", 47


def test_ids_for_sglang_follow_the_targets_family_also_where_glm_counts_as_deepseek(target: TargetFacts) -> None:
    for layers, nested in (([3, 20, 40], [3, 20, 40]), ([2, 20, 40], [1, 19, 39]), ([2, 23, 44], None)):
        head = make_head("eagle3", target, aux_layers=layers)
        made = export_head(head, FORMATS["sglang"], Family(target.settings), folder="F")
        assert made.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids") == nested


@pytest.mark.parametrize("draft", [None, D])
def test_eagle3_in_the_llama_dialect(draft: int | None, target: TargetFacts, tmp_path: Path) -> None:
    head = make_head("eagle3", target, draft=draft)
    for to in ("reference", "vllm", "sglang", "trtllm"):
        values, state = exported(head, to, target, tmp_path / to)
        assert values["architectures"] == ["LlamaForCausalLMEagle3"]
        assert (values["model_type"], values["tie_word_embeddings"]) == ("llama", False)
        assert (values["vocab_size"], values["draft_vocab_size"]) == (V, draft or V)
        assert values["rope_theta"] == values["rope_parameters"]["rope_theta"]
        assert ("d2t" in state, "t2d" in state) == (draft is not None,) * 2
        assert "midlayer.hidden_norm.weight" in state
        assert "embed_tokens.weight" not in state
        if draft is not None:
            assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)


def test_eagle3_for_speculators(target: TargetFacts, tmp_path: Path) -> None:
    head = make_head("eagle3", target, draft=D, norm_before_residual=False)
    made = export_head(head, FORMATS["speculators"], target, folder="F", verifier="owner/name", tokens=5)
    values = made.config
    assert "model_type" not in values
    assert values["architectures"] == ["Eagle3Speculator"]
    assert (values["speculators_model_type"], values["norm_before_residual"]) == ("eagle3", False)
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "owner/name",
        "architectures": ["LlamaForCausalLM"],
    }
    assert values["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    layer = values["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], values["draft_vocab_size"]) == ("llama", V, D)
    assert not {"draft_vocab_size", "architectures", "norm_before_residual"} & layer.keys()
    assert "layers.0.hidden_norm.weight" in made.tensors
    embeddings_VH = target.tokens.embedding_VH
    assert torch.equal(made.tensors["embed_tokens.weight"], embeddings_VH.bfloat16())


def test_trtllm_is_started_with_a_local_file_whose_folder_may_be_on_the_hub(target: TargetFacts) -> None:
    head = make_head("eagle3", target)
    here = export_head(head, FORMATS["trtllm"], target, folder="F", verifier="a/b").serve
    assert here == "trtllm-serve a/b --backend pytorch --extra_llm_api_options F/trtllm.yaml"
    made = export_head(head, FORMATS["trtllm"], target, folder="owner/name", uploaded=True, verifier="a/b")
    assert made.serve.splitlines() == [
        "hf download owner/name trtllm.yaml --local-dir .",
        "trtllm-serve a/b --backend pytorch --extra_llm_api_options trtllm.yaml",
    ]
    assert yaml.safe_load(made.options or "")["speculative_config"]["speculative_model"] == "owner/name"


def test_a_zero_fc_bias_is_dropped_and_another_kept(target: TargetFacts, tmp_path: Path) -> None:
    head = make_head("eagle1", target, fc_bias=True)
    drop_idle_bias(head)
    assert head.config.fc_bias  # type: ignore[attr-defined]
    torch.nn.init.zeros_(head.fc.bias)
    drop_idle_bias(head)
    assert "fc.bias" not in head.state_dict()
    for to in ("vllm", "sglang", "reference"):
        exported(head, to, target, tmp_path / to)
        assert difference(head, read_head(tmp_path / to).head, target.tokens).weights == 0


def test_files_that_carry_the_public_name_carry_no_other(target: TargetFacts) -> None:
    head = make_head("eagle1", target, target_identity={"model": "/home/me/model", "vocab_size": V})
    made = export_head(head, FORMATS["vllm"], target, folder="F", verifier="owner/model")
    assert made.sidecar["target_identity"] == {"model": "owner/model", "vocab_size": V}
    made = export_head(head, FORMATS["vllm"], target, folder="F")
    assert made.sidecar["target_identity"]["model"] == "/home/me/model"


@pytest.mark.parametrize(
    ("to", "version", "config", "message"),
    [
        ("vllm", "eagle1", {"fc_bias": True}, r"no fc\.bias"),
        ("sglang", "eagle3", {"attention_bias": True}, "no q/k/v biases"),
        ("sglang", "eagle3", {"norm_before_residual": True}, "never the normed feature"),
        ("reference", "eagle3", {"aux_layers": [1, 2, 3]}, "always looks at"),
        ("reference", "eagle3", {"aux_layers": [2, 4]}, "always looks at"),
        ("sglang", "eagle3", {"aux_layers": [4]}, "makes an fc for two layers"),
        ("sglang", "eagle3", {"aux_layers": [0, 2, 3]}, "no layer ids that say so"),
        ("reference", "eagle3", {"mlp_bias": True}, "no biases in the MLP"),
        ("speculators", "eagle1", {}, "export it --to vllm"),
        ("trtllm", "eagle1", {}, "export it --to reference"),
        ("trtllm", "eagle3", {"aux_layers": [4]}, "makes an fc for two layers"),
        ("trtllm", "eagle3", {"aux_layers": [0, 2, 3]}, "cannot look at the embeddings"),
        ("reference", "eagle1", {"head_dim": 16}, "head dim is hidden size / heads = 8, this head's 16"),
        ("reference", "eagle3", {"head_dim": 16}, "head dim is hidden size / heads = 8, this head's 16"),
        ("reference", "eagle3", {"attention_bias": True}, "no q/k/v biases"),
        *(
            (
                "reference",
                version,
                {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}},
                f"reads no RoPE scaling {kind}, only default",
            )
            for version in ("eagle1", "eagle3")
            for kind in ("linear", "yarn")
        ),
        *(
            (runtime, version, {"sliding_window": 6}, r"no attention window .* --to vllm or speculators")
            for runtime, version in (
                *(("sglang", "eagle1"), ("sglang", "eagle3"), ("reference", "eagle1"), ("reference", "eagle3")),
                ("trtllm", "eagle3"),
            )
        ),
    ],
)
def test_what_a_runtime_would_compute_otherwise_is_refused(
    to: str, version: str, config: dict[str, Any], message: str, target: TargetFacts
) -> None:
    with pytest.raises(EagleError, match=message):
        export_head(make_head(version, target, **config), FORMATS[to], target, folder="F")
