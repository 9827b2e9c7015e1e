"""SGLang: a Llama config; unknown or missing tensors are skipped SILENTLY, so nothing may be missing.

EAGLE-1's fc always has a bias parameter: zeros are written. A head with q/k/v biases is written for its Qwen2 class. A reduced
vocabulary of an EAGLE-1 head goes into HOT_TOKENS, which `--speculative-token-map` reads (FR-Spec). Layer ids are read inside
`eagle_config` alone; fc is made for `num_aux_hidden_states` layers, else for as many as those ids, else for three, and passed
over where the states are as wide as the head (one layer).
"""

from eagle.formats.format import Format, HeadFiles, Limits

QWEN2_EAGLE = "Qwen2ForCausalLMEagle"
"""Its EAGLE-1 class whose layer always has biases of q, k and v, and none of o; the Llama one has none at all."""
HOT_TOKENS = "hot_token_ids.pt"
"""The target ids of an EAGLE-1 head's draft tokens: a list that torch.load reads."""


def _sign(files: HeadFiles) -> str | None:
    name = files.named("LlamaForCausalLMEagle", QWEN2_EAGLE)
    return None if name is None else f"architecture {name}"


SGLANG = Format(
    name="sglang",
    title="SGLang",
    source="github.com/sgl-project/sglang: python/sglang/srt/models/llama_eagle.py, llama_eagle3.py",
    sign=_sign,
    prefixes={},
    limits={
        "eagle1": Limits(
            architecture="LlamaForCausalLMEagle",
            method="EAGLE",
            biased_architecture=QWEN2_EAGLE,
            fc_bias="always",
            attention_bias="qkv",
        ),
        "eagle3": Limits(architecture="LlamaForCausalLMEagle3", method="EAGLE3", min_layers=2),
    },
)
