"""AngelSlim (Tencent): vLLM's architecture name, the reference's tensor names, `aux_hidden_states_layer_ids` = c - 1."""

from eagle.formats.format import NESTED_BEFORE, TOP_IDS, Format, HeadFiles, LayerIds

_IDS = LayerIds(path=("aux_hidden_states_layer_ids",), added=1)


def _sign(files: HeadFiles) -> str | None:
    if files.version != "eagle3":
        return None
    if _IDS.key in files.values:
        return f"config.json has {_IDS.key}"
    name = files.named("Eagle3LlamaForCausalLM")
    return None if name is None else f"architecture {name} with midlayer.*"


ANGELSLIM = Format(
    name="angelslim",
    title="AngelSlim",
    source="github.com/Tencent/AngelSlim: angelslim/compressor/speculative/train/",
    sign=_sign,
    prefixes={},
    layer_ids=(TOP_IDS, _IDS, NESTED_BEFORE),
    doubts=(
        "versions of AngelSlim trained with RoPE base 10000 whatever config.json says: if acceptance is poor, import again "
        "with --rope-theta 10000",
    ),
    layers_doubt="where nobody named layers, AngelSlim's trainer takes c = [2, (L+1)//2, L-2] and vLLM serves [2, L//2, L-3]: if "
    'acceptance is poor, write the trainer\'s into "eagle_aux_hidden_state_layer_ids" of config.json and import again',
)
