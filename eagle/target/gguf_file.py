"""GGUF files: what they say of the model is what the converted model computes with, or the file is refused by name.

transformers reads such a file's weights; of its metadata it knows a part, and passes over the rest without a word. Here
every key and every tensor of the file is accounted for: taken over, found equal to what the model does anyway, known
to change nothing, or refused. Formulas are llama.cpp's, whose format this is.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eagle.errors import EagleError
from eagle.progress import console

READING = 2
"""To be raised whenever another model is made of the same file: conversions of another number are not used."""

_REMEDY = "use the folder or hub id of the model that the file was made from"

# <architecture>.KEY -> what the model's config calls it (the first that it has).
_TAKEN: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_ROPE = (
    *("rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.finetuned"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)
# KEY -> the only value under which nothing has to be done.
_FIXED: dict[str, Any] = {"attention.causal": True, "tensor_data_layout": "Meta AI original pth"}
# Beside the architecture's: what describes a file, or is the tokenizer's; and what says that it is no whole plain model.
_DESCRIPTIVE, _OTHER = ("GGUF", "general", "tokenizer", "quantize"), ("split", "adapter", "controlvector", "diffusion")
_TOKENIZER = "tokenizer.ggml."
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Those whose every weight and number was compared with the model that a file was made from (tests/test_gguf_file.py).
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "gpt2", "starcoder2")


@contextmanager
def _one_map_of_names() -> Iterator[None]:
    """transformers has gguf's map of tensor names built anew for every module (1,000 times for 62 layers): once will do."""
    build = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = cache(build)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = build


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file's metadata, without the architecture's prefix, and what of its tensors is read before the weights."""

    path: Path
    architecture: str
    keys: dict[str, Any]
    tokenizer: dict[str, Any]
    elements: dict[str, int]
    """Of each tensor."""
    factors: dict[str, torch.Tensor]
    """RoPE's, by tensor: what each pair's frequency is divided by."""

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Raises EagleError for a file that says what no converted model would do."""
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        architecture = str(fields["general.architecture"])
        if architecture not in ARCHITECTURES:
            raise EagleError(
                f"GGUF file {path} is of the architecture {architecture}, expected one of {', '.join(ARCHITECTURES)}; "
                f"{_REMEDY}"
            )
        keys, foreign = {}, []
        for name, value in fields.items():
            prefix, _, key = name.partition(".")
            if prefix == architecture and (key in _TAKEN or key in _ROPE or (key in _FIXED and _FIXED[key] == value)):
                keys[key] = value
            elif prefix == architecture or prefix in _OTHER:
                raise _refused(path, name, value, "nothing here is known to compute that")
            elif prefix not in _DESCRIPTIVE:
                foreign.append(name)
        if foreign:
            console.print(f"{path.name}: passing over keys of no known tool: {', '.join(foreign)}", markup=False)
        return cls(
            path=path,
            architecture=architecture,
            keys=keys,
            tokenizer={name.removeprefix(_TOKENIZER): value for name, value in fields.items() if _TOKENIZER in name},
            elements={tensor.name: int(tensor.n_elements) for tensor in reader.tensors},
            factors={
                tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).double()
                for tensor in reader.tensors
                if tensor.name in _FACTORS
            },
        )

    def load(self) -> PreTrainedModel:
        """The model in float32. Raises EagleError when a key or a tensor of the file would be left out."""
        source = {"gguf_file": self.path.name}
        config = self._config(AutoConfig.from_pretrained(self.path.parent, **source))
        with _one_map_of_names():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                self.path.parent, **source, config=config, dtype=torch.float32, output_loading_info=True
            )
        self._check_tensors(loaded, sorted(report["missing_keys"]))
        # A dequantised model refuses to be saved; its weights in a model built from the plain config do not.
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict())
        plain.generation_config = loaded.generation_config
        plain.generation_config.eos_token_id = self._eos_ids()
        model: PreTrainedModel = plain.eval()
        return model

    def _config(self, read: PreTrainedConfig) -> PreTrainedConfig:
        """What transformers makes of the file, with what it leaves out."""
        for key, names in _TAKEN.items():
            if key in self.keys:
                name = next((name for name in names if hasattr(read, name)), None)
                if name is not None:
                    setattr(read, name, self.keys[key])
                elif names != ("head_dim",):  # which may follow from others
                    raise self._refuse(key, f"{type(read).__name__} has no {' or '.join(names)}")
        windowed = "attention.sliding_window" in self.keys or self.architecture in (
            "gemma2",
            "gemma3",
        )  # with a default
        if not windowed and hasattr(read, "sliding_window"):
            read.sliding_window = None
        for tensor, name in (("blk.0.attn_q.bias", "attention_bias"), ("blk.0.ffn_up.bias", "mlp_bias")):
            if tensor in self.elements and hasattr(read, name):
                setattr(read, name, True)
        if self.architecture in ("gemma2", "gemma3"):
            of_27b = {"gemma2": 46, "gemma3": 62}[self.architecture] == read.num_hidden_layers
            read.query_pre_attn_scalar = read.hidden_size // read.num_attention_heads if of_27b else read.head_dim
        read.eos_token_id, read.pad_token_id = self._eos_ids(), self.tokenizer.get("padding_token_id")
        values: dict[str, Any] = read.to_dict()
        values.pop("quantization_config", None)
        values["_name_or_path"] = self.path.stem
        if self.architecture not in ("gpt2",):
            self._set_rope(values, self._head_dim(read))
        config: PreTrainedConfig = AutoConfig.for_model(**values)
        for key, names in _TAKEN.items():
            if key in self.keys:
                found = [getattr(config, name) for name in names if hasattr(config, name)]
                got = self._head_dim(config) if names == ("head_dim",) else found[0]
                if not _same(got, self.keys[key]):
                    raise self._refuse(key, f"{type(config).__name__} computes with {got}")
        return config

    @staticmethod
    def _head_dim(config: PreTrainedConfig) -> int:
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def _set_rope(self, values: dict[str, Any], head_dim: int) -> None:
        rope = {"rope_theta": float(self.keys.get("rope.freq_base", 10000.0)), **self._scaling(head_dim)}
        rotated = self.keys.get("rope.dimension_count", head_dim)
        partial = ("phi3",)
        if rotated != head_dim and self.architecture not in partial:
            raise self._refuse("rope.dimension_count", f"the model rotates all {head_dim} dimensions of its heads")
        if self.architecture in partial:
            values["partial_rotary_factor"] = rope["partial_rotary_factor"] = rotated / head_dim
        values.pop("rope_theta", None)
        values["rope_parameters"] = rope
        if self.architecture == "gemma3":  # scaling is of the full layers alone
            local = {"rope_type": "default", "rope_theta": 10000.0}
            values["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
        if rope["rope_type"] == "longrope":
            values["original_max_position_embeddings"] = rope["original_max_position_embeddings"]

    def _scaling(self, head_dim: int) -> dict[str, Any]:
        """transformers' RoPE settings without the base."""
        keys, pairs = self.keys, self.keys.get("rope.dimension_count", head_dim) // 2
        for name, factors in self.factors.items():
            if factors.shape != (pairs,):
                raise self._refuse(name, f"it holds {tuple(factors.shape)} factors, expected one per pair ({pairs})")
        factor = float(keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0.0))) or 1.0
        kind = keys.get("rope.scaling.type", "linear")
        original = keys.get("rope.scaling.original_context_length")
        attention = float(keys.get("rope.scaling.attn_factor", 1.0))
        if "rope_freqs.weight" in self.factors:
            if kind == "yarn" or (kind == "linear" and factor != 1.0) or len(self.factors) > 1:
                raise self._refuse("rope_freqs.weight", "it comes with another scaling of RoPE")
            return self._llama3(pairs)
        if self.factors:
            return self._longrope(original, attention)
        if kind == "yarn":
            if not original:
                raise self._refuse("rope.scaling.type", "rope.scaling.original_context_length is missing")
            names = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": int(original),
                "attention_factor": attention * (1 + 0.1 * math.log(factor)),
                **{name: float(keys[key]) for name, key in names.items() if key in keys},
            }
        if kind not in ("none", "linear") or attention != 1.0:
            raise self._refuse(
                "rope.scaling.type" if attention == 1.0 else "rope.scaling.attn_factor",
                "RoPE is scaled here by linear, yarn and the tensors rope_freqs, rope_factors_long and _short",
            )
        if kind == "none" or factor == 1.0:
            return {"rope_type": "default"}
        return {"rope_type": "linear", "factor": factor}

    def _longrope(self, original: int | None, attention: float) -> dict[str, Any]:
        if len(self.factors) != 2 or not original or self.architecture != "phi3":
            raise self._refuse(
                next(iter(self.factors)), "LongRoPE is both factors and an original_context_length, in a phi3"
            )
        return {
            "rope_type": "longrope",
            "long_factor": self.factors["rope_factors_long.weight"].tolist(),
            "short_factor": self.factors["rope_factors_short.weight"].tolist(),
            "factor": self.keys["context_length"] / original,
            "original_max_position_embeddings": int(original),
            "attention_factor": attention,
        }

    def _llama3(self, pairs: int) -> dict[str, Any]:
        """Llama 3's settings that give the tensor's factors: 1, between 1 and `factor` for a band of pairs, `factor`.

        The band of published models reaches from a quarter of the original length to all of it.
        """
        factors_P = self.factors["rope_freqs.weight"]
        base = float(self.keys.get("rope.freq_base", 10000.0))
        wavelengths_P = 2 * math.pi * base ** (torch.arange(pairs, dtype=torch.float64) / pairs)
        factor = float(factors_P.max())
        if factor == 1.0 and bool((factors_P == 1).all()):
            return {"rope_type": "default"}
        between_P = (factors_P > 1) & (factors_P < factor)
        smooth_P = (1 / factors_P - 1 / factor) / (1 - 1 / factor)
        lengths = [8192.0, *(wavelengths_P * (1 + 3 * smooth_P))[between_P].tolist()]
        below, above = wavelengths_P[factors_P == 1], wavelengths_P[factors_P == factor]
        if len(below) and len(above):
            lengths.append(math.sqrt(4 * float(below.max()) * float(above.min())))
        for length in dict.fromkeys(round(length) for length in lengths):
            expected_P = ((length / wavelengths_P - 1) / 3).clamp(0, 1)
            if torch.allclose((1 - expected_P) / factor + expected_P, 1 / factors_P, rtol=1e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": length,
                }
        raise self._refuse("rope_freqs.weight", "its factors are not those of a Llama 3")

    def _eos_ids(self) -> int | list[int] | None:
        """llama.cpp ends an answer at each of them."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = list(dict.fromkeys(self.tokenizer[name] for name in names if name in self.tokenizer))
        return found if len(found) > 1 else next(iter(found), None)

    def _check_tensors(self, loaded: PreTrainedModel, missing: list[str]) -> None:
        if missing:
            raise EagleError(f"GGUF file {self.path} lacks the model's {', '.join(missing[:4])}; {_REMEDY}")
        names = gguf.get_tensor_name_map(
            next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture),
            loaded.config.num_hidden_layers,
        )
        held = {parameter.data_ptr(): parameter.numel() for parameter in loaded.parameters()}
        here = {name: count for name, count in self.elements.items() if name not in _FACTORS}
        if sum(held.values()) == sum(here.values()):
            return
        known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in loaded.state_dict()}
        left = [name for name in here if name.rpartition(".")[0] not in {str(n).removesuffix(".weight") for n in known}]
        raise EagleError(f"GGUF file {self.path}: tensors are left out ({', '.join(left[:4]) or 'unnamed'}); {_REMEDY}")

    def _refuse(self, key: str, why: str) -> EagleError:
        if key in self.factors:
            return EagleError(
                f"GGUF file {self.path} holds the tensor {key}, which cannot be computed: {why}; {_REMEDY}"
            )
        return _refused(self.path, f"{self.architecture}.{key}", self.keys.get(key), why)


def _refused(path: Path, name: str, value: Any, why: str) -> EagleError:
    return EagleError(f"GGUF file {path} says {name} = {value!r}, which cannot be computed: {why}; {_REMEDY}")


def _same(got: Any, said: Any) -> bool:
    return bool(got == said or (isinstance(said, float) and math.isclose(got, said, rel_tol=1e-6)))
