"""How each runtime is started with an exported head; the drafting method is always named."""

import json
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eagle.formats.format import Format, Version
from eagle.formats.sglang import HOT_TOKENS
from eagle.formats.trtllm import OPTIONS
from eagle.heads.eagle3 import Eagle3Head

SGLANG_TOP_K, SGLANG_NODES = 4, 16
"""The tree that SGLang's documentation starts with, roughly: children per node, nodes per verification."""


def serve_command(
    format: Format,
    version: Version,
    folder: str,
    target: str,
    *,
    tokens: int,
    hot_tokens: bool = False,
    uploaded: bool = False,
    unspelled_rope: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """The shell command (for the reference, a few lines of Python).

    tokens: drafted per step. hot_tokens: the folder holds SGLang's map of draft tokens. uploaded: the folder is a hub repository.
    unspelled_rope: as TargetFacts.unspelled_rope.
    """
    method = format.limits[version].method
    if format.name in ("vllm", "speculators"):
        drafting = {"method": method, "model": folder, "num_speculative_tokens": tokens}
        return _shell("vllm serve", target, "--speculative-config", json.dumps(drafting))
    if format.name == "sglang":
        words = ["--model-path", target, "--speculative-algorithm", str(method)]
        words += ["--speculative-draft-model-path", folder, "--speculative-num-steps", str(tokens)]
        tree = SGLANG_TOP_K * (1 + (tokens - 1) * SGLANG_TOP_K) + 1  # what its levels can hold, the root included
        words += ["--speculative-eagle-topk", str(SGLANG_TOP_K)]
        words += ["--speculative-num-draft-tokens", str(min(SGLANG_NODES, tree))]
        words += ["--speculative-token-map", f"{folder}/{HOT_TOKENS}"] if hot_tokens else []
        return _shell("python -m sglang.launch_server", *words)
    if format.name == "trtllm":
        options = OPTIONS if uploaded else f"{folder}/{OPTIONS}"  # a local file in any case
        fetch = _shell("hf download", folder, OPTIONS, "--local-dir", ".") + "\n" if uploaded else ""
        return fetch + _shell("trtllm-serve", target, "--backend", "pytorch", "--extra_llm_api_options", options)
    third = ", use_eagle3=True" if version == "eagle3" else ", use_eagle3=False"
    first = (
        "# The target's config.json lacks keys that this code reads (transformers 5 saves rope_parameters alone): it would\n"
        f"# rotate with its defaults, without a word. Add to it first: {json.dumps(dict(unspelled_rope))[1:-1]}\n"
    )
    return (
        (first if unspelled_rope else "")
        + "from eagle.model.ea_model import EaModel  # of the reference, not of this package\n"
        f"model = EaModel.from_pretrained(base_model_path={target!r}, ea_model_path={folder!r}{third})"
    )


def options_file(head: Eagle3Head, *, folder: str, tokens: int) -> str:
    """TensorRT-LLM's options. It captures the output of layer i, i = c - 1."""
    layers = ", ".join(str(c - 1) for c in head.aux_layers)
    return (
        "# trtllm-serve MODEL --backend pytorch --extra_llm_api_options THIS_FILE\n"
        "# Older versions: decoding_type Eagle, speculative_model_dir instead of speculative_model.\n"
        "speculative_config:\n"
        "  decoding_type: Eagle3\n"
        f"  speculative_model: {json.dumps(folder)}\n"
        f"  max_draft_len: {tokens}\n"
        f"  eagle3_layers_to_capture: [{layers}]\n"
    )


def _shell(command: str, *words: str) -> str:
    return " ".join([command, *map(shlex.quote, words)])
