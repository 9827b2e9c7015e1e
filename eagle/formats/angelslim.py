"""AngelSlim (Tencent): vLLM's architecture name, the reference's tensor names, `aux_hidden_states_layer_ids` = c - 1."""

from eagle.formats.format import NESTED_IDS, TOP_IDS, Format, HeadFiles, LayerIds

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
    layer_ids=(TOP_IDS, _IDS, NESTED_IDS),
    doubts=(
        "versions of AngelSlim trained with RoPE base 10000 whatever config.json says: if acceptance is poor, import again "
        "with --rope-theta 10000",
    ),
)
