"""What a file format of draft heads is, as data: who writes it, how it names things, what its loader can and cannot take.

One module per format holds one `Format` (eagle/formats/reference.py, vllm.py, ...); eagle/formats/registry.py lists them.
Reading (read.py), writing (write.py) and anything that judges a folder work from these tables alone.
c is the number of a target's layers applied: Hugging Face's hidden_states index.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

Version = Literal["eagle1", "eagle3"]
VERSION_NAMES: Mapping[Version, str] = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3"}

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE_CONFIG = "eagle_config"

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""RoPE scalings that a head of this project computes. Not dynamic: as for targets (eagle/target/probe.py)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerIds:
    """One place in config.json that may name the layers an EAGLE-3 head looks at."""

    path: tuple[str, ...]
    """Keys down to the list."""
    added: int
    """c is the number there plus this."""
    sglang: bool = False
    """SGLang reads it, adding what its rule for the target's family says (layer_ids.py) instead."""

    @property
    def key(self) -> str:
        """As messages name it."""
        return ".".join(self.path)


OWN_IDS = LayerIds(path=("aux_layers",), added=0)
TOP_IDS = LayerIds(path=(LAYER_IDS,), added=0)
NESTED_IDS = LayerIds(path=(EAGLE_CONFIG, LAYER_IDS), added=1, sglang=True)
NESTED_BEFORE = LayerIds(path=NESTED_IDS.path, added=1)
"""The same key of projects that count from the layer before, for targets of every family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a loader of one version's heads computes. Where it says no, the loader would fail or compute something else."""

    architecture: str
    """What config.json's `architectures` must name."""
    biased_architecture: str | None = None
    """The same of a head with q/k/v biases, where that is another class, with model_type qwen2; None: the same class."""
    method: str | None = None
    """What the runtime calls this kind of drafting on its command line."""
    fc_bias: Literal["no", "optional", "always"] = "no"
    """Bias of the fusing projection; always: the parameter exists whatever config.json says, so zeros are written."""
    attention_bias: Literal["no", "qkv", "qkvo"] = "no"
    """Biases of q, k, v; qkvo: with them comes one of o_proj, so zeros are written."""
    mlp_bias: bool = False
    norm_before_residual: bool = False
    """The residual may be the normed feature."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    sliding_window: bool = False
    """It reads `layer_types` and `sliding_window` and keeps the head's attention window."""
    fixed_head_dim: bool = False
    """The head dim is hidden size / heads, whatever config.json says."""
    min_layers: int = 1
    """EAGLE-3: looks at so many layers or more; 2: with one there is nothing to fuse, and it makes or uses no fc."""
    embedding_layer: bool = True
    """EAGLE-3: may look at the embeddings (c = 0)."""
    default_layers: bool = False
    """EAGLE-3: looks at [2, L//2, L-3], whatever config.json says."""
    embed_tokens: bool = False
    """The file must carry the target's embeddings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """A head's folder as it was read, nothing changed."""

    folder: Path
    values: dict[str, Any]
    """config.json."""
    state: dict[str, torch.Tensor]
    weights: str
    """The weights' (index) file."""
    sidecar: dict[str, Any] | None
    """SIDECAR's object, where the folder was written by `eagle export`."""

    @property
    def version(self) -> Version:
        """By the tensors: only an EAGLE-3 layer norms the feature."""
        return "eagle3" if any(key.endswith("hidden_norm.weight") for key in self.state) else "eagle1"

    def named(self, *names: str) -> str | None:
        """The first of these architectures that config.json names."""
        found = self.values.get("architectures")
        return next((name for name in found or () if name in names), None) if isinstance(found, list) else None


SIDECAR = "eagle_export.json"
"""Written beside exported files: the format, what this project knows of the head that the format cannot hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One format. Formats that only a few details tell apart share everything else (dataclasses.replace)."""

    name: str
    """As --format and --to name it."""
    title: str
    """As messages name it."""
    source: str
    """Where its rules are written down."""
    sign: Callable[[HeadFiles], str | None]
    """The evidence that a folder is of this format; None: it is not."""
    prefixes: Mapping[Version, Mapping[str, str]]
    """Beginnings of tensor names, theirs -> ours; names without one are the same."""
    layer_ids: tuple[LayerIds, ...] = (OWN_IDS, TOP_IDS, NESTED_IDS)
    """Where EAGLE-3's layers may be named, the first that is there counts."""
    flatten: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """config.json as one Llama-like object, for formats that nest it."""
    rope_theta: float = 10000.0
    """RoPE base where config.json names none."""
    scaled_rope_theta: float | None = None
    """RoPE base where there is a scaling, whatever config.json says; None: as without."""
    norm_before_residual: bool | None = False
    """Its meaning where config.json does not tell; None: unknown, it must."""
    derives_t2d: bool = False
    """Files hold d2t alone."""
    of_target: tuple[str, ...] = ()
    """Tensors of the target that its files carry and its loaders ignore."""
    doubts: tuple[str, ...] = ()
    """What its files may say otherwise than how their head was trained; an import repeats it."""
    layers_doubt: str | None = None
    """The same of the published layers, which are taken where config.json names none."""

    limits: Mapping[Version, Limits] = dataclasses.field(default_factory=dict)
    """What its loader takes, by version; empty: nothing is exported in this format."""
    unsupported: Mapping[Version, str] = dataclasses.field(default_factory=dict)
    """Why a version is not exported in this format, and the remedy."""
    notes: tuple[str, ...] = ()
    """What an export in this format should tell."""

    def theirs(self, name: str, version: Version) -> str:
        """Our name of a tensor -> the format's."""
        for their, our in self.prefixes.get(version, {}).items():
            if name.startswith(our):
                return their + name.removeprefix(our)
        return name

    def ours(self, name: str, version: Version) -> str:
        """The format's name of a tensor -> ours."""
        for their, our in self.prefixes.get(version, {}).items():
            if name.startswith(their):
                return our + name.removeprefix(their)
        return name


def lookup(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """The value under nested keys; None where there is none."""
    found: Any = values
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found
