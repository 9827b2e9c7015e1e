"""vLLM's plain folders: a Llama config; midlayer.* is renamed by its loader, t2d dropped, any other unknown tensor raises.

EAGLE-1: `fc.bias` and `lm_head` raise. Layer ids are read from the top level (c); the key inside `eagle_config`, which one of
its runners reads as c and the other not at all, is never written. fc is made for `num_aux_hidden_states` layers, else for three:
the ids at the top are not counted. The drafting method is told by the path's name alone, so the serve command names it.
"""

from eagle.formats.format import Format, HeadFiles, Limits


def _sign(files: HeadFiles) -> str | None:
    name = files.named("EagleLlamaForCausalLM")
    return None if name is None else f"architecture {name}"


VLLM = Format(
    name="vllm",
    title="vLLM",
    source="github.com/vllm-project/vllm: vllm/model_executor/models/llama_eagle.py, llama_eagle3.py",
    sign=_sign,
    prefixes={},
    limits={
        "eagle1": Limits(
            architecture="EagleLlamaForCausalLM",
            method="eagle",
            attention_bias="qkv",
            mlp_bias=True,
            sliding_window=True,
        ),
        "eagle3": Limits(
            architecture="LlamaForCausalLMEagle3",
            method="eagle3",
            attention_bias="qkvo",
            mlp_bias=True,
            sliding_window=True,
            norm_before_residual=True,
        ),
    },
)
