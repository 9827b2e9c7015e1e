"""Which targets a runtime serves with a draft head. EAGLE-3's need a model that hands out hidden states of inner layers.

Read, not run: `SupportsEagle3` of vLLM 0.33's classes, `set_eagle3_layers_to_capture` and `get_embed_and_head` of SGLang
0.5.23's, ea_model.py and modeling_*_kv.py of the EAGLE authors'. Families are model_types of a target's text config.
"""

import dataclasses

from eagle.formats.format import VERSION_NAMES, Version
from eagle.heads.layer_ids import SGLANG_ADDS_ONE, SGLANG_LIKE_DEEPSEEK, SGLANG_LIKE_GPT_OSS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """One runtime's targets, for heads of one version."""

    name: str
    serves: frozenset[str]
    refuses: frozenset[str] | None
    """Families that it has a class for which cannot be served so; None: all that are not in `serves`."""
    refusal: str
    """What it does with those."""
    unlisted: str = ""
    """What is known of a family in neither list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unserved:
    """Why a runtime does not serve a target, or may not."""

    certain: bool
    effect: str
    remedy: str


_VLLM_EAGLE3 = Serving(
    name="vLLM 0.33",
    serves=frozenset((
        *("afmoe", "apertus", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        *("ernie4_5", "gemma4", "gemma4_text", "gemma4_unified", "glm_moe_dsa", "gpt_oss", "granite"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "internlm3", "iquestcoder"),
        *("kimi_k2", "laguna", "llama", "llama4", "llama4_text", "mimo_v2_flash", "minicpm3", "minimax_m2"),
        *("minimax_m3_vl_text", "ministral3", "mistral", "nemotron_h", "phi3", "qwen2", "qwen2_5_vl_text"),
        *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5", "qwen3_5_text"),
        *("qwen3_5_moe", "qwen3_5_moe_text", "sarvam_mla"),
    )),
    refuses=frozenset((
        *("bailing_moe", "bloom", "cohere", "cohere2", "dbrx", "ernie4_5_moe", "exaone", "exaone4"),
        *("exaone_moe", "falcon", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n"),
        *("gemma3n_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gptj", "granitemoehybrid"),
        *("longcat_flash", "mixtral", "nemotron", "olmo_hybrid", "olmoe", "opt", "qwen2_moe", "qwen2_vl_text"),
        *("sarvam_moe", "stablelm"),
    )),
    refusal='ends with "Model does not support EAGLE3 interface"',
    unlisted="has no class of its own for them and runs them through transformers, where handing out inner states was read in "
    "its code, not tried; older versions refuse",
)  # fmt: skip
_SGLANG_REFUSES = (
    *("afmoe", "arcee", "bloom", "cohere", "cohere2", "cohere2_moe", "dbrx", "ernie4_5", "falcon", "gemma"),
    *("gemma2", "gemma3n", "gemma3n_text", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "minicpm3", "mixtral", "olmo"),
    *("olmo2", "olmo3", "olmoe", "persimmon", "phi", "qwen2_moe", "smollm3", "stablelm", "starcoder2"),
)
"""No embedding or LM head to share, or run through transformers, whose class hands out neither those nor inner states."""
_SGLANG_EAGLE1_SERVES = (
    *("deepseek_v4", "ernie4_5_moe", "exaone4", "falcon_h1", "glm4", "laguna", "mimo_v2_flash", "nemotron_h", "opt"),
)
"""Beside those that it serves with EAGLE-3 heads."""
_SGLANG_EAGLE3_SERVES = frozenset((*SGLANG_ADDS_ONE, *SGLANG_LIKE_DEEPSEEK, *SGLANG_LIKE_GPT_OSS)) - {"qwen2_moe"}
SERVING: dict[tuple[str, Version], Serving] = {
    ("vllm", "eagle3"): _VLLM_EAGLE3,
    ("speculators", "eagle3"): _VLLM_EAGLE3,
    ("sglang", "eagle3"): Serving(
        name="SGLang 0.5.23",
        serves=_SGLANG_EAGLE3_SERVES,
        refuses=frozenset((*_SGLANG_REFUSES, *_SGLANG_EAGLE1_SERVES, "exaone", "qwen2_vl_text", "sarvam_mla")),
        refusal="raises at its start: their model has no set_eagle3_layers_to_capture, or no embedding to share",
        unlisted="may have no class for them; layer ids are written and read by its common rule, c - 1",
    ),
    ("sglang", "eagle1"): Serving(
        name="SGLang 0.5.23",
        serves=_SGLANG_EAGLE3_SERVES | {*_SGLANG_EAGLE1_SERVES},
        refuses=frozenset(_SGLANG_REFUSES),
        refusal="raises at its start: their model has no get_embed_and_head to share with the head",
        unlisted="may have no class for them",
    ),
    ("reference", "eagle3"): Serving(
        name="the EAGLE authors' code",
        serves=frozenset(("llama", "qwen3")),
        refuses=None,
        refusal="hands out inner states of llama and qwen3 targets alone, and takes families that it does not know for Mixtral's",
    ),
    ("reference", "eagle1"): Serving(
        name="the EAGLE authors' code",
        serves=frozenset(("llama", "mixtral", "qwen2", "qwen3")),
        refuses=None,
        refusal="has models for llama, qwen2, qwen3 and mixtral targets, and takes every other for Mixtral's",
    ),
}
"""By runtime (as --to and --for name it) and version; a pair that is not here has no such limit that is known."""


def unserved(runtime: str, version: Version, family: str) -> Unserved | None:
    """Why the runtime cannot, or may not, serve a target of this family with such a head; None: it does."""
    serving = SERVING.get((runtime, version))
    if serving is None or family in serving.serves:
        return None
    certain = serving.refuses is None or family in serving.refuses
    others: dict[str, str] = {}
    for (name, kind), other in SERVING.items():
        if kind == version and other is not serving and family in other.serves:
            others.setdefault(other.name, name)
    head = f"an {VERSION_NAMES[version]} head"
    if not certain:
        return Unserved(
            certain=False,
            effect=f"whether {serving.name} serves them with {head} is not known here: it {serving.unlisted}",
            remedy="try it, and compare its acceptance with this project's",
        )
    remedy = "; or ".join(
        f"serve it with {title} (eagle export HEAD OUT --to {name})" for title, name in others.items()
    )
    return Unserved(
        certain=True,
        effect=f"{serving.name} does not serve them with {head}: it {serving.refusal}",
        remedy=remedy or "generate with this project (eagle generate), or look whether a newer version serves it",
    )
