"""TensorRT-LLM's PyTorch backend: EAGLE-3 folders with the reference's names, options in a YAML file beside them.

Its loader takes midlayer.* and layers.0.*; the layers captured are an option (`eagle3_layers_to_capture`, c - 1; default
{1, L//2 - 1, L - 4}), not read from the folder (-1 never names the embeddings), and it makes an fc only where they are
several. The older TensorRT engines convert the reference's EAGLE-1 folders (examples/eagle/convert_checkpoint.py
--eagle_model_dir).
"""

from eagle.formats.format import Format, HeadFiles, Limits

OPTIONS = "trtllm.yaml"
"""`trtllm-serve --extra_llm_api_options`."""


def _sign(files: HeadFiles) -> str | None:
    return f"{OPTIONS} beside config.json" if (files.folder / OPTIONS).is_file() else None


TRTLLM = Format(
    name="trtllm",
    title="TensorRT-LLM",
    source="github.com/NVIDIA/TensorRT-LLM: tensorrt_llm/_torch/models/modeling_speculative.py (Eagle3ForCausalLM), "
    "llmapi/llm_args.py (Eagle3DecodingConfig)",
    sign=_sign,
    prefixes={},
    limits={
        "eagle3": Limits(
            architecture="LlamaForCausalLMEagle3",
            method="Eagle3",
            attention_bias="qkvo",
            mlp_bias=True,
            min_layers=2,
            embedding_layer=False,
        )
    },
    unsupported={
        "eagle1": "its PyTorch backend drafts with EAGLE-3 heads alone; its TensorRT engines convert the reference's "
        "folder (examples/eagle/convert_checkpoint.py --eagle_model_dir): export it --to reference"
    },
)
