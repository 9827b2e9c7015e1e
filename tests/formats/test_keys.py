"""Every key of a head's config.json is honoured, refused by name, or known to change nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from eagle.cli.main import main
from eagle.errors import EagleError
from eagle.formats import keys
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.read import ReadHead, read_head
from eagle.formats.registry import FORMATS
from eagle.heads.eagle1 import EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from tests import eagle3_reference as reference
from tests.formats import folders
from tests.tiny import VOCAB, save_tiny_target

SLIDING, FULL = ["sliding_attention"], ["full_attention"]
LISTED = keys.READ | keys.TOLD | keys.IDLE | keys.ORDINARY.keys()
SERVED = (
    # what the loaders of vLLM, SGLang, speculators and SpecForge are known to read of a draft's config
    *("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "use_aux_norm", "num_aux_hidden_states"),
    *(
        "num_aux_layers",
        "layer_types",
        "sliding_window",
        "draft_vocab_size",
        "target_hidden_size",
        "tie_word_embeddings",
    ),
    *("parallel_drafting", "mask_token_id", "pard_token", "ptd_token_id", "attention_bias", "qkv_bias", "bias"),
    *("eagle_config.norm_before_fc", "eagle_config.use_aux_hidden_state", "quantization_config", "embed_requires_grad"),
)


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_no_key_of_a_family_that_heads_come_in_is_unlisted(config: Any) -> None:
    """Fails where a version of transformers brings a key: find out what it does to a layer, and list it."""
    assert config().to_dict().keys() - LISTED == set()
    assert set(SERVED) - LISTED == set()


def test_a_key_has_one_meaning() -> None:
    sets = [keys.READ, keys.TOLD, keys.IDLE, frozenset(keys.ORDINARY)]
    assert sum(map(len, sets)) == len(frozenset().union(*sets))
    assert keys.OF_FORMAT.keys() <= FORMATS.keys()


def test_no_key_of_our_own_configs_is_taken_for_unknown(tmp_path: Path) -> None:
    shape = {key: folders.LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")}
    head = Eagle3Head(Eagle3HeadConfig(**shape, vocab_size=64, aux_layers=[2, 4, 5], sliding_window=6))
    save_head(head, tmp_path / "own")
    assert read_head(tmp_path / "own").unknown == ()
    assert load_head(tmp_path / "own").window == 6
    assert EagleHeadConfig().sliding_window is None
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    for change, message in (
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"layer_types": SLIDING}, "layer_types is"),
        ({"rope_parameters": {**config["rope_parameters"], "rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ):
        (tmp_path / "own" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(EagleError, match=message):
            load_head(tmp_path / "own")


def read(folder: Path, made: tuple[dict[str, Any], folders.State], **config: Any) -> ReadHead:
    values, state = made
    into = values.get("transformer_layer_config")
    if into is None or any(key in config for key in ("norm_output", "fc_norm")):
        values = {**values, **config}
    else:
        values = {**values, "transformer_layer_config": {**into, **config}}
    return read_head(folders.write(folder, values, state))


def test_an_unknown_key_is_said_by_the_import_and_refused_by_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folders.specforge(reference.random_state())
    nested = {**made[0]["eagle_config"], "new_switch": 3}
    found = read(tmp_path / "head", made, gated_norms=True, eagle_config=nested, absent=None)
    assert found.unknown == ("eagle_config.new_switch = 3", "gated_norms = True")
    with pytest.raises(EagleError, match=r"new_switch = 3, gated_norms = True.*eagle import"):
        load_head(tmp_path / "head")
    assert main(["import", str(tmp_path / "head"), str(tmp_path / "out")]) == 0
    assert "config.json says gated_norms = True: unknown here" in capsys.readouterr().out
    load_head(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("specforge", True, None),  # SpecForge's own default: the norm before the LM head
        ("specforge", False, r"norm_output is False .*--format vllm"),
        ("speculators", False, None),
        ("speculators", True, "norm_output is True .the recursive feature is normed.*--format specforge"),
        ("modelopt", True, "norm_output is True"),
        ("reference", True, "norm_output is True"),
    ],
)
def test_norm_output_means_what_its_format_means(name: str, value: bool, message: str | None, tmp_path: Path) -> None:
    made = folders.EAGLE3[name](reference.random_state())
    if message is not None:
        with pytest.raises(EagleError, match=message):
            read(tmp_path, made, norm_output=value)
        return
    found = read(tmp_path, made, norm_output=value)
    assert any("norm_output True, as SpecForge means it" in line for line in found.assumptions) == value


def test_a_vllm_folder_may_say_that_it_does_not_norm_its_output(tmp_path: Path) -> None:
    made = folders.specforge(reference.random_state())
    folder = folders.write(tmp_path, {**made[0], "norm_output": False}, made[1])
    assert read_head(folder, format=FORMATS["vllm"]).head.window is None


WINDOWS: list[tuple[dict[str, Any], int | str | None]] = [
    ({}, None),
    ({"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": True}, 6),
    ({"layer_types": SLIDING, "sliding_window": 6}, 6),
    ({"layer_types": SLIDING * 40, "sliding_window": 6, "num_hidden_layers": 40}, 6),
    ({"layer_types": FULL, "sliding_window": 6}, None),
    ({"sliding_window": 6}, None),  # a Llama layer without layer_types has none anywhere; it is said
    ({"sliding_window": 6, "use_sliding_window": False}, None),
    ({"sliding_window": 6, "use_sliding_window": True}, "layer_types is missing"),
    ({"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": False}, "use_sliding_window is false"),
    ({"layer_types": SLIDING}, "sliding_window is None"),
    ({"layer_types": SLIDING, "sliding_window": 0}, "sliding_window is 0"),
    ({"layer_types": SLIDING, "sliding_window": True}, "sliding_window is True"),
    ({"layer_types": SLIDING + FULL, "sliding_window": 6}, "expected a list with the head's one layer"),
    ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
    ({"model_type": "mistral", "sliding_window": 6}, 6),
    ({"model_type": "qwen2", "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}, 6),
    ({"model_type": "qwen3", "sliding_window": 6, "use_sliding_window": True}, None),
]


@pytest.mark.parametrize(("config", "expected"), WINDOWS, ids=str)
def test_the_window_is_read(config: dict[str, Any], expected: int | str | None, tmp_path: Path) -> None:
    made = folders.specforge(reference.random_state())
    if isinstance(expected, str):
        with pytest.raises(EagleError, match=expected):
            read(tmp_path, made, **config)
        return
    found = read(tmp_path, made, **config)
    assert found.head.window == expected
    passed_over = expected is None and "layer_types" not in config and config.get("use_sliding_window") is not False
    assert any("sliding_window 6 is not used" in line for line in found.assumptions) == (passed_over and bool(config))


def test_the_default_window_of_speculators_is_kept(tmp_path: Path) -> None:
    made = folders.speculators(reference.random_state())
    found = read(tmp_path, made, layer_types=SLIDING, sliding_window=2048, use_sliding_window=True)
    assert found.head.window == 2048
    assert "attention window: 2048 positions (sliding_window)" in found.assumptions


NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}


@pytest.mark.parametrize("name", ["specforge", "speculators"])
def test_rope_nested_by_kind_of_layer_is_that_of_the_heads_kind(name: str, tmp_path: Path) -> None:
    config, state = folders.EAGLE3[name](reference.random_state())
    config.pop("rope_theta", None)
    for window, theta in (({}, 5e4), ({"layer_types": SLIDING, "sliding_window": 6}, 2e4)):
        head = read(tmp_path, (config, state), rope_parameters=NESTED, **window).head
        assert head.config.rope_parameters == {"rope_type": "default", "rope_theta": theta}
    only = {"full_attention": NESTED["full_attention"]}
    with pytest.raises(
        EagleError, match=r"RoPE settings are nested \(full_attention\), .*sliding_attention among them"
    ):
        read(tmp_path, (config, state), rope_parameters=only, layer_types=SLIDING, sliding_window=6)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported: its angles depend on"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_type": "linear"}, "lacks factor"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3.0}, "has alpha too much"),
        ({"rope_type": "default", "factor": 2.0}, "has factor too much"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks high_freq_factor, low_freq_factor, original_max"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'"),
        ({"rope_type": "default", "mrope_section": [2, 1, 1]}, None),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_rotation_is_computed_as_it_is_told_or_refused(
    spelling: str, rope: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    made = folders.specforge(reference.random_state())
    config = {spelling: rope}
    if message is None:
        assert read(tmp_path, made, **config).head.config.rope_parameters["rope_type"] == rope["rope_type"]
        return
    with pytest.raises(EagleError, match=message):
        read(tmp_path, made, **config)


def test_layers_are_counted_by_the_tensors(tmp_path: Path) -> None:
    """A published EAGLE-3 head carries its target's num_hidden_layers."""
    state = reference.random_state()
    found = read(tmp_path / "one", folders.specforge(state), num_hidden_layers=40)
    assert "config.json says num_hidden_layers 40, the tensors decide: 1 layer" in found.assumptions
    more = {key: value.clone() for key, value in folders.renamed(state, "midlayer.", "layers.1.").items()}
    two = folders.renamed(state, "midlayer.", "layers.0.") | more
    for form in ("safetensors", "bin", "sharded-safetensors"):
        folder = folders.write(tmp_path / form, folders.modelopt(state)[0], two, form=form)
        with pytest.raises(EagleError, match="tensors of 2 layers, an EAGLE head has 1"):
            read_head(folder)


def test_eos_ids_that_are_never_drafted_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_tiny_target(tmp_path / "target", num_hidden_layers=8, eos_token_id=[2, 7])
    state = reference.random_state()
    for kept, lacking in (([2, 7], None), ([7], "[2]"), ([], "[2, 7]")):
        ids = sorted({*kept, *range(20, 20 + reference.D - len(kept))})
        vocabulary = DraftVocabulary(target_ids_D=torch.tensor(ids), target_size=VOCAB)
        state |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
        made = folders.specforge(state)
        folder = folders.write(tmp_path / f"head{len(kept)}", {**made[0], "eos_token_id": [2, 7]}, made[1])
        for number, against in enumerate((["--target", str(target)], [])):
            assert main(["import", str(folder), str(tmp_path / f"out{len(kept)}{number}"), *against]) == 0
            said = re.findall(
                r"lacks the EOS ids (\[.*\]): the end of an answer is never drafted", capsys.readouterr().out
            )
            assert said == ([] if lacking is None else [lacking])


# --- any combination of keys ----------------------------------------------------------------------------------------

CHOICES: dict[str, list[Any]] = {
    "layer_types": [None, FULL, SLIDING, SLIDING * 3, ["chunked_attention"]],
    "sliding_window": [None, 2, 6, 0],
    "use_sliding_window": [None, True, False],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 300.0},
        {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0},
        NESTED,
        {"full_attention": NESTED["full_attention"]},
    ],
    "partial_rotary_factor": [None, 1.0, 0.25],
    "rms_norm_eps": [1e-5, 1e-2],
    "norm_output": [None, True, False],
    "fc_norm": [False, True],
    "hidden_act": ["silu", "gelu"],
    "num_hidden_layers": [1, 3],
    "logits_scaling": [None, 1.0, 0.5],
    "attention_multiplier": [None, 0.5],
    "temperature": [1.0, 0.5],
    "brand_new": [None, 7],
}


def meaning(name: str, config: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """Keys of which one must be named in a refusal, and else what the head computes; written from the formats' rules."""
    ordinary: dict[str, tuple[Any, ...]] = {
        "partial_rotary_factor": (None, 1.0),
        "norm_output": (None, name == "specforge"),
        "fc_norm": (False,),
        "hidden_act": ("silu",),
        "logits_scaling": (None, 1.0),
        "attention_multiplier": (None,),
    }
    refused = {key for key, values in ordinary.items() if key in config and config[key] not in values}
    types, size, used = (config.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    window = None
    if types is None:
        refused |= {"use_sliding_window"} if used and size is not None else set()
    elif types[0] == "sliding_attention":
        window = size
        refused |= {"sliding_window"} if not size or used is False else set()
    elif types[0] != "full_attention":
        refused.add("layer_types")
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 1e6})
    kind = "full_attention" if window is None else "sliding_attention"
    if "full_attention" in rope:
        refused |= set() if kind in rope else {"nested"}
        rope = rope.get(kind, NESTED["full_attention"])
    refused |= {"dynamic"} if rope.get("rope_type") == "dynamic" else set()
    refused |= {"partial_rotary_factor"} if "partial_rotary_factor" in rope else set()
    return refused, {"theta": rope["rope_theta"], "window": window, "eps": config.get("rms_norm_eps", reference.EPS)}


@pytest.mark.slow
@given(
    name=st.sampled_from(["specforge", "speculators"]),
    config=st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()}),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@torch.inference_mode()
def test_any_keys_are_computed_as_told_or_one_is_refused_by_name(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    state = reference.random_state()
    values, tensors = folders.EAGLE3[name](state)
    if "rope_parameters" in config:
        values.pop("rope_theta", None)
    refused, options = meaning(name, config)
    into = values if name == "specforge" else values["transformer_layer_config"]
    into |= config
    folder = folders.write(tmp_path, values, tensors)
    if refused:
        with pytest.raises(EagleError, match="|".join(refused)):
            read_head(folder)
        return
    found = read_head(folder)
    head = found.head
    assert found.unknown == (("brand_new = 7",) if config.get("brand_new") else ())
    assert isinstance(head, Eagle3Head)
    eps = options["eps"]
    expected_TH = reference.fuse(state, states_TX := torch.randn(9, 3 * reference.H))
    embeddings_TH, got_TH = torch.randn(9, reference.H), head.fuse(states_TX[None])[0]
    for _ in range(2):
        expected_TH = reference.forward(
            state, expected_TH, embeddings_TH, norm_before_residual=name == "speculators", **options
        )
        got_TH = head(got_TH[None], embeddings_TH[None])[0]
    logits_TD = head.logits(got_TH, DraftTokens.__new__(DraftTokens))
    torch.testing.assert_close(logits_TD, reference.logits(state, expected_TH, eps=eps), rtol=1e-3, atol=1e-3)
