"""GGUF files: the model that they were made from comes back, number for number, or the file is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.files import sha256_file
from eagle.target import loading
from eagle.target.gguf_file import GgufFile
from eagle.target.loading import load_model
from tests.gguf_files import write_gguf
from tests.tiny import save_tiny_target, tiny_model

IDS = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(0))
TIED = {"tie_word_embeddings": True}
THETA = {"rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **THETA}
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3-8192": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3-64": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3-base": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 100},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "longrope": {
        **{"rope_type": "longrope", "long_factor": [1.5, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]},
        **{"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.25, **THETA},
    },
    "base": {"rope_type": "default", "rope_theta": 77.0},
}
PER_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", TIED),
    "llama-head-dim": ("llama", {"head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "gemma2": ("gemma2", {**TIED, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", TIED),
    "gemma3-full": ("gemma3_text", {"num_hidden_layers": 6, **TIED}),
    "gemma3-linear": ("gemma3_text", {"num_hidden_layers": 6, "rope_parameters": PER_LAYER, **TIED}),
    "gpt2": ("gpt2", {}),
    "starcoder2": ("starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 9}),
    "phi3-longrope": ("phi3", {"rope_parameters": SCALINGS["longrope"], "original_max_position_embeddings": 64}),
    **{
        f"llama-{name}": ("llama", {"head_dim": 16, "rope_parameters": SCALINGS[name]})
        for name in SCALINGS
        if name != "longrope"
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_becomes_the_model_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    name, overrides = FAMILIES[family]
    model = tiny_model(name, **overrides)
    loaded = GgufFile.read(write_gguf(tmp_path / "x.gguf", model)).load()
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, pytest.param(62, marks=pytest.mark.slow)])
def test_gemma_s_attention_is_scaled_as_llama_cpp_does(layers: int, tmp_path: Path) -> None:
    """No key says it: by the head's size, in the 27B (62 layers) by H / heads."""
    model = tiny_model("gemma3_text", **TIED, num_hidden_layers=layers, head_dim=16, query_pre_attn_scalar=1)
    loaded = GgufFile.read(write_gguf(tmp_path / "x.gguf", model)).load()
    assert loaded.config.query_pre_attn_scalar == {3: 16, 62: 8}[layers]


ODD = torch.tensor([1.0, 5.0, 2.0, 8.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier = 0.1"),
        ({"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, "llama.rope.scaling.type = 'dynamic'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "original_context_length is missing"),
        ({"rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor = 1.5"),
        ({"rope_freqs.weight": ODD}, "the tensor rope_freqs.weight.*not those of a Llama 3"),
        ({"rope_freqs.weight": ODD[:2]}, r"rope_freqs.weight.*\(2,\) factors, expected one per pair \(4\)"),
        ({"rope_factors_long.weight": ODD}, "the tensor rope_factors_long.weight"),
        ({"rope.dimension_count": 4}, "llama.rope.dimension_count = 4.*rotates all 8"),
        ({"attention.sliding_window": 9}, "llama.attention.sliding_window = 9.*has no sliding_window"),
        ({"attention.value_length": 4}, "llama.rope.dimension_count = 8.*rotates all 4"),
        ({"attention.causal": False}, "llama.attention.causal = False"),
        ({"pooling_type": 1}, "llama.pooling_type = 1"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"logit_scale": 2.0}, "llama.logit_scale = 2.0"),
        ({"split.count": 2}, "split.count = 2"),
        ({"adapter.type": "lora"}, "adapter.type = 'lora'"),
        ({"blk.0.attn_q.bias": torch.ones(32)}, "lacks the model's .*bias"),
        ({"blk.1.attn_sinks.weight": torch.ones(4)}, "tensors are left out .*blk.1.attn_sinks.weight"),
        ({"blk.2.attn_q_norm.weight": torch.ones(8)}, "tensors are left out .*blk.2.attn_q_norm.weight"),
    ],
)
def test_what_would_be_left_out_is_refused_by_name(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny_model(), extra=extra)
    with pytest.raises(EagleError, match=named) as caught:
        GgufFile.read(file).load()
    assert "use the folder or hub id" in str(caught.value)


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny_model(), leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(EagleError, match=r"lacks the model's model.layers.1.mlp.up_proj.weight"):
        GgufFile.read(file).load()


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny_model())
    file.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(EagleError, match="architecture mamba, expected one of llama, qwen2"):
        GgufFile.read(file)


def test_keys_of_other_tools_are_said_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny_model(), extra={"general.sometool": 1})
    file.write_bytes(file.read_bytes().replace(b"general.sometool", b"thetool.sometool"))
    GgufFile.read(file)
    assert "thetool.sometool" in " ".join(capsys.readouterr().err.split())


def test_every_token_that_ends_a_turn_in_llama_cpp_ends_it_here(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    model = GgufFile.read(write_gguf(tmp_path / "x.gguf", tiny_model(), extra=extra)).load()
    assert model.generation_config.eos_token_id == model.config.eos_token_id == [2, 7]


def test_a_conversion_that_an_older_version_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HF_HOME", str(tmp_path))
    model = tiny_model(head_dim=16, rope_parameters=SCALINGS["llama3-8192"])
    settings = TargetConfig(model=str(write_gguf(tmp_path / "x.gguf", model)), device="cpu")
    old = tmp_path / "eagle-gguf" / f"x-{sha256_file(Path(settings.model))[:16]}"
    save_tiny_target(old)  # where they lay
    torch.testing.assert_close(load_model(settings)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(GgufFile, "load", None)  # the second time it is read from its folder
    torch.testing.assert_close(load_model(settings)(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
