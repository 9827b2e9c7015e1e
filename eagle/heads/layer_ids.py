"""EAGLE-3's layer ids between conventions. c = layers applied (hidden_states index); v = what SGLang reads.

SGLang 0.5.23 makes c of eagle_config's v by the target's family (its models' `set_eagle3_layers_to_capture`), and captures its
own choice where there are no ids. Families are model_types of a target's text config.
"""

from collections.abc import Sequence

from eagle.errors import EagleError

SGLANG_ADDS_ONE = (
    *("apertus", "bailing_moe", "exaone_moe", "gemma3", "gemma3_text", "gemma4", "gemma4_text"),
    *("gemma4_unified", "glm4_moe", "internlm3", "iquestcoder", "llama", "llama4", "llama4_text"),
    *("longcat_flash", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral3", "mistral", "phi3", "qwen2"),
    *("qwen2_moe", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "sarvam_moe"),
)
"""c = v + 1: also taken for families that are not listed."""
SGLANG_LIKE_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2")
"""c = v, but v + 1 where the first v is 1."""
SGLANG_LIKE_GPT_OSS = ("gpt_oss",)
"""c = v + 1, but v where the largest v is the number of layers."""
SGLANG_DEFAULT_PLUS_ONE = ("minimax_m3_vl_text",)
"""Without ids it captures the published c plus one."""


def published_layers(num_layers: int) -> list[int]:
    """The published choice of c, which every runtime takes where it finds no ids."""
    return [2, num_layers // 2, num_layers - 3]


def sglang_default(model_type: str, num_layers: int) -> list[int]:
    """The c that SGLang captures without ids, for a target of this family."""
    return [c + (model_type in SGLANG_DEFAULT_PLUS_ONE) for c in published_layers(num_layers)]


def sglang_applied(ids: Sequence[int], model_type: str, num_layers: int) -> list[int]:
    """The c that SGLang makes of eagle_config's ids v, for a target of this family."""
    as_they_are = (model_type in SGLANG_LIKE_DEEPSEEK and ids[0] != 1) or (
        model_type in SGLANG_LIKE_GPT_OSS and max(ids) == num_layers
    )
    return list(ids) if as_they_are else [v + 1 for v in ids]


def sglang_ids(layers: Sequence[int], model_type: str, num_layers: int) -> list[int]:
    """The ids v from which SGLang makes these layers c. Raises EagleError where no v does."""
    for v in ([c - 1 for c in layers], list(layers)):
        if min(v) >= 0 and sglang_applied(v, model_type, num_layers) == list(layers):
            return v
    raise EagleError(
        f"the head looks at the hidden states {list(layers)}, and SGLang has no layer ids that say so for a {model_type} "
        f"target of {num_layers} layers (it reads ids as layers before, 0 being the first); train a head with other "
        "head.aux_layers, or export it --to vllm"
    )
