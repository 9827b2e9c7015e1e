"""SafeAILab/EAGLE, the reference implementation: a Llama config with one layer, EAGLE-3's layer named `midlayer`.

EAGLE-1's `bias` key is fc's (absent: true, in its code; what the file holds counts here). RoPE is `rope_theta`, else 10000,
whatever the target does; with a scaling it is always 10000, and a scaling of other keys than `type` and `factor` raises: none is
written. The head dim is hidden size / heads. Biases are fixed: q/k/v's by EAGLE-1's `qkv_bias` alone, none in the MLP.
What its code has no parameter for is passed over without a word (strict=False).
"""

from eagle.formats.format import Format, HeadFiles, Limits

_ROPE = ("default",)


def _sign(files: HeadFiles) -> str:
    if files.version == "eagle3":
        return "an EAGLE-3 layer named midlayer.* and nothing of a later tool's"
    return "an EAGLE-1 layer: fc and layers.0.* without hidden_norm"


REFERENCE = Format(
    name="reference",
    title="reference EAGLE",
    source="github.com/SafeAILab/EAGLE: eagle/model/cnets1.py, cnets.py",
    sign=_sign,
    prefixes={},
    scaled_rope_theta=10000.0,
    limits={
        "eagle1": Limits(
            architecture="LlamaForCausalLM",
            fc_bias="optional",
            attention_bias="qkv",
            rope_types=_ROPE,
            fixed_head_dim=True,
        ),
        "eagle3": Limits(
            architecture="LlamaForCausalLMEagle3", rope_types=_ROPE, fixed_head_dim=True, default_layers=True
        ),
    },
)
