"""The draft head: its definition against a plain reference, its files, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from eagle.errors import EagleError
from eagle.formats.checkpoint import check_fits, head_hash, load_head, save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.attention import causal_attention
from eagle.target.target import Target
from tests.exact import same
from tests.tiny import tiny_model


def make_head(**overrides: object) -> EagleHead:
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(tiny_model().config, initializer_range=0.2, **overrides)
    return EagleHead(config).eval()


def reference_forward(
    state: dict[str, torch.Tensor], config: EagleHeadConfig, f_TH: torch.Tensor, e_TH: torch.Tensor
) -> torch.Tensor:
    """facts/eagle-heads section 1 written out, one position at a time."""
    heads, kv, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]

    def rope(x: torch.Tensor, position: int) -> torch.Tensor:
        half = d // 2
        angle = position / theta ** (torch.arange(half) * 2 / d)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    w = {key.removeprefix("layers.0."): value for key, value in state.items()}
    x_TH = torch.cat([e_TH, f_TH], dim=-1) @ w["fc.weight"].T  # embedding first
    out = []
    for i in range(len(x_TH)):
        query = rope((w["self_attn.q_proj.weight"] @ x_TH[i]).view(heads, d), i)
        mixed = []
        for h in range(heads):
            keys = torch.stack(
                [rope((w["self_attn.k_proj.weight"] @ x_TH[j]).view(kv, d), j)[h * kv // heads] for j in range(i + 1)]
            )
            values = torch.stack(
                [(w["self_attn.v_proj.weight"] @ x_TH[j]).view(kv, d)[h * kv // heads] for j in range(i + 1)]
            )
            mixed.append((keys @ query[h] / d**0.5).softmax(0) @ values)
        hidden = x_TH[i] + w["self_attn.o_proj.weight"] @ torch.cat(mixed)  # no input norm
        normed = hidden / (hidden.pow(2).mean() + config.rms_norm_eps).sqrt() * w["post_attention_layernorm.weight"]
        gate = functional.silu(w["mlp.gate_proj.weight"] @ normed) * (w["mlp.up_proj.weight"] @ normed)
        out.append(hidden + w["mlp.down_proj.weight"] @ gate)  # no final norm
    return torch.stack(out)


@torch.inference_mode()
def test_the_head_is_the_published_one() -> None:
    head = make_head()
    torch.nn.init.uniform_(head.layers[0].post_attention_layernorm.weight, 0.5, 1.5)
    f, e = torch.randn(9, 32), torch.randn(9, 32)
    assert same(head(f[None], e[None])[0], reference_forward(head.state_dict(), head.config, f, e))


def test_rope_scaling_follows_the_target() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    rope["original_max_position_embeddings"] = 128
    config = EagleHeadConfig.for_target(tiny_model("llama", rope_parameters=rope).config)
    assert config.rope_parameters == rope
    assert not torch.equal(EagleHead(config).rotary.inv_freq, make_head().rotary.inv_freq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True], ids=["default", "llama3"])
def test_half_precision_leaves_the_angles_as_they_are(tmp_path: Path, dtype: torch.dtype, scaled: bool) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 128
    head = make_head(**({"rope_parameters": rope} if scaled else {}))
    positions_BT = torch.arange(500)[None]
    expected = head.rotary(torch.zeros(1, dtype=torch.float32), positions_BT)
    save_head(head, tmp_path / "head")
    for cast in (
        head.to(dtype),
        load_head(tmp_path / "head", dtype=dtype),
        load_head(tmp_path / "head").half().to(dtype),
    ):
        assert cast.fc.weight.dtype == dtype
        for got, wanted in zip(cast.rotary(torch.zeros(1, dtype=torch.float32), positions_BT), expected):
            assert torch.equal(got, wanted)
        for got, wanted in zip(cast.rotary(torch.zeros(1, dtype=dtype), positions_BT), expected):
            assert torch.equal(got, wanted.to(dtype))
    assert head.to("meta").rotary.inv_freq.device.type == "meta"


def test_saved_heads_load_bit_for_bit(tmp_path: Path) -> None:
    head = make_head(target_identity={"model": "x", "weights_sha256": "y"})
    save_head(head, tmp_path / "head", extra={"step": 3})
    loaded = load_head(tmp_path / "head")
    x = torch.randn(1, 5, 32)
    assert torch.equal(loaded(x, x), head(x, x))
    assert loaded.config.target_identity == {"model": "x", "weights_sha256": "y"}
    assert json.loads((tmp_path / "head" / "training.json").read_text()) == {"step": 3}
    assert torch.equal(EagleHead.from_pretrained(tmp_path / "head")(x, x), head(x, x))
    before = head_hash(tmp_path / "head")
    save_head(make_head(fc_bias=True), tmp_path / "other")
    assert head_hash(tmp_path / "other") != before


def write_reference(
    folder: Path, *, form: str, embeddings: bool, fc_bias: bool, qkv_bias: bool
) -> dict[str, torch.Tensor]:
    """A head as the reference implementation ships it: a Llama config, keys of its own, .bin or safetensors."""
    head = make_head(fc_bias=fc_bias, attention_bias=qkv_bias)
    for name, parameter in head.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    state = {key: value.clone() for key, value in head.state_dict().items()}
    if embeddings:
        state["embed_tokens.weight"] = tiny_model().get_input_embeddings().weight.detach().clone()
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "vocab_size": 384, "bias": True, "torch_dtype": "float16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    keys = list(state)
    if form == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif form == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        weight_map = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(keys)}
        for shard in set(weight_map.values()):
            save_file({key: state[key] for key in keys if weight_map[key] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


@pytest.mark.parametrize("form", ["bin", "safetensors", "sharded"])
@pytest.mark.parametrize(
    ("embeddings", "fc_bias", "qkv_bias"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_reference_files_load_with_and_without_the_optional_tensors(
    tmp_path: Path, form: str, embeddings: bool, fc_bias: bool, qkv_bias: bool
) -> None:
    state = write_reference(tmp_path / "ref", form=form, embeddings=embeddings, fc_bias=fc_bias, qkv_bias=qkv_bias)
    head = load_head(tmp_path / "ref")
    for key, value in head.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert (head.fc.bias is not None) == fc_bias
    assert head.config.rope_parameters["rope_theta"] == 10000.0
    check_fits(head, Target(tiny_model()))


def test_rope_theta_of_a_reference_config_is_honoured(tmp_path: Path) -> None:
    write_reference(tmp_path / "ref", form="bin", embeddings=False, fc_bias=False, qkv_bias=False)
    config = json.loads((tmp_path / "ref" / "config.json").read_text()) | {"rope_theta": 500000.0}
    (tmp_path / "ref" / "config.json").write_text(json.dumps(config))
    assert load_head(tmp_path / "ref").config.rope_parameters["rope_theta"] == 500000.0


def test_missing_and_stray_keys_are_each_named(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    state = load_file(file)
    state["midlayer.weight"] = state.pop("fc.weight")
    save_file(state, file)
    with pytest.raises(EagleError, match=r"missing keys: fc.weight; stray keys: midlayer.weight"):
        load_head(tmp_path / "head")


def test_shapes_that_disagree_with_the_config_are_named(tmp_path: Path) -> None:
    save_head(make_head(), tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text()) | {"intermediate_size": 48}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    with pytest.raises(EagleError, match=r"gate_proj.weight \(64, 32\) instead of \(48, 32\)"):
        load_head(tmp_path / "head")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_cut_in_half_is_one_clear_message(tmp_path: Path, name: str) -> None:
    write_reference(
        tmp_path / "ref",
        form="bin" if name.endswith("bin") else "safetensors",
        embeddings=False,
        fc_bias=False,
        qkv_bias=False,
    )
    file = tmp_path / "ref" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(EagleError, match="damaged or cut short"):
        load_head(tmp_path / "ref")


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="no such folder"):
        load_head(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EagleError, match=r"no config\.json"):
        load_head(tmp_path / "empty")
    tiny_model().save_pretrained(tmp_path / "target")
    with pytest.raises(EagleError, match="tensors of 3 layers, an EAGLE head has 1; is this the target's own folder"):
        load_head(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text("{")
    with pytest.raises(EagleError, match="not valid JSON"):
        load_head(tmp_path / "target")


def damage(text: str | bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    return write


def with_value(**values: object) -> Callable[[Path], None]:
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | values)) and None


@pytest.mark.parametrize(
    ("form", "name", "spoil", "reason"),
    [
        ("bin", "config.json", damage("[1, 2]"), "holds a list, expected an object"),
        ("bin", "config.json", damage(b'{"hidden_size": "\xff"}'), "not valid JSON .*utf-8"),
        ("bin", "config.json", with_value(hidden_size="32"), "hidden_size is '32', expected a whole number"),
        ("bin", "config.json", with_value(hidden_size=-32), "hidden_size is -32, expected a whole number"),
        ("bin", "config.json", with_value(rope_parameters=[1]), "describes no head"),
        ("sharded", "model.safetensors.index.json", damage('{"weight_map": {"fc.wei'), "not valid JSON"),
        ("sharded", "model.safetensors.index.json", damage("[]"), "holds a list"),
        ("sharded", "model.safetensors.index.json", damage('{"metadata": {}}'), "has no weight_map"),
        ("sharded", "model.safetensors.index.json", damage('{"weight_map": {"fc.weight": 3}}'), "has no weight_map"),
        ("bin", "pytorch_model.bin", lambda file: torch.save([torch.zeros(2)], file), "holds a list, expected a dict"),
        ("bin", "pytorch_model.bin", lambda file: torch.save({"model": {}}, file), "holds a dict, expected a dict of"),
        ("bin", "pytorch_model.bin", damage(b""), "damaged or cut short"),
    ],
)
def test_a_broken_file_is_one_message_that_names_it_and_the_remedy(
    tmp_path: Path, form: str, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    write_reference(tmp_path / "ref", form=form, embeddings=False, fc_bias=False, qkv_bias=False)
    load_head(tmp_path / "ref")
    spoil(tmp_path / "ref" / name)
    with pytest.raises(EagleError, match=rf"(?s)ref/{name}.*{reason}") as caught:
        load_head(tmp_path / "ref")
    assert "\n" not in str(caught.value)
    assert re.search("fetch or save the head again|is this the target's own folder", str(caught.value))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    target = Target(tiny_model())
    identity = target.identity()
    check_fits(make_head(target_identity=identity), target)
    with pytest.raises(EagleError, match="weights_sha256"):
        check_fits(make_head(target_identity=identity), Target(tiny_model(seed=1)))
    with pytest.raises(EagleError, match="width 32"):
        check_fits(make_head(), Target(tiny_model(hidden_size=64)))
    with pytest.raises(EagleError, match=r"vocabulary has 384 tokens, target .* has 400"):
        check_fits(make_head(), Target(tiny_model(vocab_size=400)))
    write_reference(tmp_path / "ref", form="bin", embeddings=True, fc_bias=False, qkv_bias=False)
    with pytest.raises(EagleError, match="embed_tokens"):
        check_fits(load_head(tmp_path / "ref"), Target(tiny_model(seed=1)))


@pytest.mark.parametrize("window", [None, 1, 3, 4, 10, 11, 12])
def test_a_windowed_prompt_is_attended_in_blocks_without_a_difference(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle.target.attention.WINDOW_BLOCK", 4)
    query, key, value = (torch.randn(2, heads, 11, 8, dtype=torch.float64) for heads in (4, 2, 2))
    distance_TT = torch.arange(11)[:, None] - torch.arange(11)
    seen_TT = (distance_TT >= 0) & (distance_TT < (window or 11))
    scores = query @ key.repeat_interleave(2, dim=1).mT * 0.3
    expected = scores.masked_fill(~seen_TT, float("-inf")).softmax(-1) @ value.repeat_interleave(2, dim=1)
    torch.testing.assert_close(causal_attention(query, key, value, scaling=0.3, window=window), expected)


def _every_text_config() -> dict[str, PreTrainedConfig]:
    found = {}
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            text = kind().get_text_config()
        except (ValueError, ImportError, StrictDataclassError):
            continue  # made from parts that must be given
        found[text.model_type] = text
    return found


@pytest.mark.slow
def test_a_head_s_shape_is_derived_or_refused_for_every_family() -> None:
    refused = []
    for family, text in _every_text_config().items():
        try:
            config = EagleHeadConfig.for_target(text)
        except EagleError:
            refused.append(family)
            continue
        with torch.device("meta"):
            EagleHead(config)
    assert {"mamba", "rwkv"} <= set(refused)
    assert not {"llama", "gemma3n_text", "gemma4_text", "gpt2", "phi3"} & set(refused)


def test_a_head_of_gemma_4_has_the_shape_of_its_full_layers() -> None:
    config = EagleHeadConfig.for_target(CONFIG_MAPPING["gemma4_text"]())
    assert config.head_dim == 512
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_a_head_of_a_partly_rotated_longrope_target_rotates_plainly_with_its_base() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", "rope_theta": 77.0, "partial_rotary_factor": 0.75, "factor": 4.0, **factors}
    shape = dict(hidden_size=64, num_attention_heads=4, pad_token_id=0, original_max_position_embeddings=64)
    config = EagleHeadConfig.for_target(
        CONFIG_MAPPING["phi3"](**shape, max_position_embeddings=256, rope_parameters=rope)
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 77.0}
    whole = rope | {"partial_rotary_factor": 1.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = EagleHeadConfig.for_target(
        CONFIG_MAPPING["phi3"](**shape, max_position_embeddings=256, rope_parameters=whole)
    )
    assert config.rope_parameters["rope_type"] == "longrope"
