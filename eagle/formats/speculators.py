"""speculators (vLLM project): the layer's config nested in `transformer_layer_config`, EAGLE-3's layer named `layers.0`.

Its configs leave out what equals the defaults of the layer's own class. `norm_before_residual` has no safe default (class
False, its CLI True, vLLM assumes True): it is always written, and asked for where a file lacks it. The older "eagle" models
(EAGLE-1, `fusion_fc`, `transformer.*`) are read, not written: vLLM loads eagle3 ones only. speculators makes fc for as many
layers as it finds ids; vLLM keeps of the flattened config what the layer's config holds, so that is where its
`num_aux_hidden_states` stands.
"""

from typing import Any

from transformers import AutoConfig

from eagle.errors import EagleError
from eagle.formats.format import TOP_IDS, Format, HeadFiles, Limits
from eagle.formats.keys import LAYER_CONFIG

MODEL_TYPE = "speculators_model_type"
VERSION = "0.9.0"
"""Of the library, whose format is written."""
_FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_BESIDE = (
    *("draft_vocab_size", "norm_before_residual", "target_hidden_size", TOP_IDS.key, "norm_before_fc", "fc_norm"),
    *("norm_output", "layernorms", "quantization_config"),
)


def _sign(files: HeadFiles) -> str | None:
    found = [key for key in (MODEL_TYPE, "speculators_config", "speculators_version") if key in files.values]
    return f"config.json has {', '.join(found)}" if found else None


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    layer = values.get(LAYER_CONFIG)
    family = layer.get("model_type", "llama") if isinstance(layer, dict) else None
    if not isinstance(layer, dict) or family not in _FAMILIES:
        raise EagleError(
            f"{LAYER_CONFIG} is {'of ' + str(family) if isinstance(layer, dict) else 'missing'}, expected that of one "
            f"of {', '.join(_FAMILIES)}; export the head with speculators again"
        )
    told = {key: value for key, value in layer.items() if key != "model_type"}
    # What the layer's class has by default, where the file says nothing; RoPE is normalised by the reader.
    rope = ("rope_theta", "rope_scaling", "rope_parameters")
    plain = {key: value for key, value in told.items() if key not in rope}
    types = told.get("layer_types")
    plain["num_hidden_layers"] = len(types) if isinstance(types, list) else 1
    filled = AutoConfig.for_model(family, **plain).to_dict()
    for key in rope:
        filled.pop(key, None)
    filled |= {key: told[key] for key in rope if key in told}
    filled |= {"num_hidden_layers": told.get("num_hidden_layers"), "model_type": family}
    return {**filled, **{key: values[key] for key in _BESIDE if key in values}}


SPECULATORS = Format(
    name="speculators",
    title="speculators",
    source="github.com/vllm-project/speculators: src/speculators/models/eagle3/, models/eagle.py",
    sign=_sign,
    prefixes={
        "eagle1": {"fusion_fc.": "fc.", "transformer.": "layers.0."},
        "eagle3": {"layers.0.": "midlayer."},
    },
    layer_ids=(TOP_IDS,),
    flatten=_flatten,
    norm_before_residual=None,
    of_target=("verifier_norm.weight", "verifier_lm_head.weight"),
    limits={
        "eagle3": Limits(
            architecture="Eagle3Speculator",
            method="eagle3",
            attention_bias="qkvo",
            mlp_bias=True,
            sliding_window=True,
            norm_before_residual=True,
            embed_tokens=True,
        )
    },
    unsupported={"eagle1": "vLLM loads EAGLE-3 heads alone in this format; export it --to vllm, which takes EAGLE-1"},
)
