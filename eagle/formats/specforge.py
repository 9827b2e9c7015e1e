"""SpecForge (sgl-project): the reference's names, a config that tells RoPE, layer ids as SGLang reads them (c - 1)."""

from eagle.formats.format import EAGLE_CONFIG, Format, HeadFiles

_KEYS = ("rope_theta", "rope_parameters", "attention_bias", EAGLE_CONFIG)


def _sign(files: HeadFiles) -> str | None:
    if files.version != "eagle3" or files.named("LlamaForCausalLMEagle3") is None:
        return None
    told = [key for key in _KEYS if key in files.values]
    return (
        f"architecture LlamaForCausalLMEagle3, midlayer.*, and a config that tells {', '.join(told)}" if told else None
    )


SPECFORGE = Format(
    name="specforge",
    title="SpecForge",
    source="github.com/sgl-project/SpecForge: specforge/modeling/draft/llama3_eagle.py, configs/",
    sign=_sign,
    prefixes={},
)
