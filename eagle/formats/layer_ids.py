"""EAGLE-3's layer ids between conventions. c = layers applied (hidden_states index); v = what SGLang reads.

SGLang adds one to the ids of eagle_config, with exceptions by the target's family (its models'
`set_eagle3_layers_to_capture`). With no ids it takes the published c = [2, L//2, L-3].
"""

from collections.abc import Sequence

from eagle.errors import EagleError

SGLANG_ADDS_ONE = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2")
"""Families (model_type of the target) for which c = v + 1."""
SGLANG_EXCEPTIONS = ("deepseek_v2", "deepseek_v3", "gpt_oss")
"""deepseek: c = v unless v[0] == 1; gpt_oss: c = v where the largest v is the number of layers."""


def sglang_applied(ids: Sequence[int], model_type: str, num_layers: int) -> list[int]:
    """The c that SGLang makes of eagle_config's ids v, for a target of this family."""
    if model_type in ("deepseek_v2", "deepseek_v3"):
        return [v + 1 for v in ids] if ids[0] == 1 else list(ids)
    if model_type == "gpt_oss" and max(ids) == num_layers:
        return list(ids)
    return [v + 1 for v in ids]


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


def sglang_rule_is_known(model_type: str) -> bool:
    """False: SGLang's rule for this family is taken to be the common one, c = v + 1."""
    return model_type in (*SGLANG_ADDS_ONE, *SGLANG_EXCEPTIONS)
