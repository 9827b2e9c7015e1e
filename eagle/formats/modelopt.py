"""ModelOpt (NVIDIA): a Llama config, EAGLE-3's layer named `layers.0`, d2t without t2d, `eagle_config` with switches."""

from eagle.formats.format import EAGLE_CONFIG, NESTED_BEFORE, OWN_IDS, TOP_IDS, Format, HeadFiles

SWITCHES = (
    "use_aux_hidden_state",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
)


def _sign(files: HeadFiles) -> str | None:
    told = files.values.get(EAGLE_CONFIG)
    found = [name for name in SWITCHES if isinstance(told, dict) and name in told and name != "use_aux_hidden_state"]
    layers = any(key.startswith("layers.0.hidden_norm") for key in files.state)
    if found:
        return f"config.json's {EAGLE_CONFIG} has {', '.join(found)}"
    return "an EAGLE-3 layer named layers.0.* under a Llama config" if layers else None


MODELOPT = Format(
    name="modelopt",
    title="ModelOpt",
    source="github.com/NVIDIA/Model-Optimizer: modelopt/torch/export/plugins/hf_spec_export.py",
    sign=_sign,
    prefixes={"eagle3": {"layers.0.": "midlayer."}},
    layer_ids=(OWN_IDS, TOP_IDS, NESTED_BEFORE),
    derives_t2d=True,
)
