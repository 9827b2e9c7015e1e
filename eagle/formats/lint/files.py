"""A head's folder as it lies there, read without judgement: `eagle lint` looks at what our own loader would refuse.

What cannot be read becomes a Trouble, and the rest is read all the same. Also here: what lint wants to know of the target,
read from its config.json and one tensor, without loading the model.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.formats.target_facts import unspelled_rope
from eagle.formats.window import FULL
from eagle.reading import BROKEN, read_object, reason, verdict
from eagle.target.loading import load_architecture, load_config, local_path

DEFAULT_THETA = 10000.0
"""What every runtime rotates with when a config names no theta."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_PREFIXES = ("midlayer.", "layers.0.")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "embed_tokens.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that kept a file from being read."""

    rule: str
    evidence: str
    remedy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundHead:
    """config.json's values and the tensors, under their own names."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    troubles: tuple[Trouble, ...] = ()

    @property
    def readable(self) -> bool:
        """Whether there is anything to judge: a config and tensors."""
        return bool(self.config) and bool(self.tensors)

    @property
    def version(self) -> Literal["eagle1", "eagle3"]:
        """Told by the tensors (an EAGLE-3 layer norms its inputs), else by the config's names."""
        if any("hidden_norm" in key or key.startswith("midlayer.") for key in self.tensors):
            return "eagle3"
        if any(key.startswith("layers.") for key in self.tensors):
            return "eagle1"
        names = f"{self.config.get('architectures')} {self.config.get('speculators_model_type')}".lower()
        return "eagle3" if "eagle3" in names else "eagle1"

    @property
    def speculators(self) -> bool:
        """Whether config.json is of the speculators form, which nests the layer's config."""
        return "speculators_model_type" in self.config or "transformer_layer_config" in self.config

    @property
    def layer(self) -> Mapping[str, Any]:
        """The config of the decoder layer."""
        nested = self.config.get("transformer_layer_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def layer_prefix(self) -> str:
        """The prefix under which most of the layer's tensors lie."""
        counts = {prefix: sum(key.startswith(prefix) for key in self.tensors) for prefix in _PREFIXES}
        best = max(counts, key=lambda prefix: counts[prefix])
        return best if counts[best] else ("midlayer." if self.version == "eagle3" else "layers.0.")

    def part(self, name: str) -> torch.Tensor | None:
        """A tensor of the layer by its name without the layer's prefix, such as `self_attn.q_proj.weight`."""
        return next((self.tensors[prefix + name] for prefix in _PREFIXES if prefix + name in self.tensors), None)

    def whole(self, key: str) -> int | None:
        """A whole number of the layer's config; None where it is missing or something else."""
        value = self.layer.get(key)
        return value if type(value) is int else None

    @property
    def vocab_size(self) -> int | None:
        return self.whole("vocab_size")

    @property
    def draft_vocab_size(self) -> int | None:
        value = self.config.get("draft_vocab_size")
        return value if type(value) is int else None

    @property
    def feature_size(self) -> int | None:
        """Width of the target's states that fc takes."""
        value = self.config.get("target_hidden_size")
        return value if type(value) is int and value > 0 else self.whole("hidden_size")

    @property
    def d2t(self) -> torch.Tensor | None:
        return self.tensors.get("d2t")

    @property
    def rope(self) -> Mapping[str, Any]:
        """rope_parameters; of the head's kind of layer, where they are nested by kind."""
        rope, types = self.layer.get("rope_parameters"), self.layer.get("layer_types")
        kind = types[0] if isinstance(types, list) and types and isinstance(types[0], str) else FULL
        nested = rope.get(kind) if isinstance(rope, dict) else None
        return nested if isinstance(nested, dict) else rope if isinstance(rope, dict) else {}

    @property
    def theta(self) -> float | None:
        """The RoPE base that the config names, in either spelling; None: none."""
        spelled = self.rope.get("rope_theta")
        value = spelled if self.layer.get("rope_theta") is None else self.layer["rope_theta"]
        return float(value) if isinstance(value, (int, float)) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetNumbers:
    """What the head's files are held against."""

    name: str
    model_type: str
    architecture: str | None
    hidden_size: int
    vocab_size: int
    num_layers: int
    theta: float
    max_positions: int | None
    unspelled_rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """As formats.target_facts.unspelled_rope."""
    embedding_VH: torch.Tensor | None = None
    """[V, H], where it was asked for and could be found without loading the model."""


def read_head(folder: Path) -> FoundHead:
    """Reads what can be read. Raises EagleError when there is no such folder."""
    if not folder.is_dir():
        raise EagleError(f"head {folder}: no such folder; give the folder that holds config.json and the weights")
    troubles: list[Trouble] = []
    config: dict[str, Any] = {}
    try:
        config = read_object(folder / "config.json", remedy="write it again from the head's source")
    except EagleError as error:
        troubles.append(Trouble(rule="config-file", evidence=error.found, remedy=error.remedy))
    tensors = _read_tensors(folder, troubles)
    return FoundHead(folder=folder, config=config, tensors=tensors, troubles=tuple(troubles))


def _read_tensors(folder: Path, troubles: list[Trouble]) -> dict[str, torch.Tensor]:
    remedy = "fetch or export the head again"
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(index, troubles)
        if (folder / name).is_file():
            return _read_file(folder / name, troubles)
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt"))
    beside = f", only {', '.join(others)}" if others else ""
    evidence = f"neither {' nor '.join(_WEIGHTS)} (or its index) is there{beside}"
    troubles.append(Trouble(rule="weight-files", evidence=evidence, remedy=remedy))
    return {}


def _read_shards(index: Path, troubles: list[Trouble]) -> dict[str, torch.Tensor]:
    try:
        weight_map = read_object(index, remedy="save the head again").get("weight_map")
    except EagleError as error:
        troubles.append(Trouble(rule="index", evidence=error.found, remedy=error.remedy))
        return {}
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        evidence = f"{index.name} has no weight_map (tensor: file)"
        troubles.append(Trouble(rule="index", evidence=evidence, remedy="save the head again"))
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        named = {key for key, file in weight_map.items() if file == shard}
        if not (index.parent / shard).is_file():
            evidence = f"{index.name} names {shard} ({len(named)} tensors), which is not there"
            troubles.append(Trouble(rule="index", evidence=evidence, remedy=f"fetch {shard}, or save the head again"))
            continue
        held = _read_file(index.parent / shard, troubles)
        tensors |= held
        if held and named != held.keys():
            lost, unnamed = sorted(named - held.keys()), sorted(held.keys() - named)
            evidence = (
                f"{index.name} and {shard} disagree: not in the file {_names(lost)}; not in the index {_names(unnamed)}"
            )
            troubles.append(Trouble(rule="index", evidence=evidence, remedy="save the head again"))
    return tensors


def _names(keys: list[str]) -> str:
    return ", ".join(keys) or "none"


def _read_file(file: Path, troubles: list[Trouble]) -> dict[str, torch.Tensor]:
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
        tensors = {key: value for key, value in dict(state).items() if isinstance(value, torch.Tensor)}
    except BROKEN as error:
        evidence = f"{file.name} cannot be read: {reason(error)}"
        remedy = verdict(error, "fetch or save it again")
        troubles.append(Trouble(rule="weight-files", evidence=evidence, remedy=remedy))
        return {}
    if len(tensors) < len(state):
        evidence = (
            f"{file.name} holds other things than tensors: {_names(sorted(map(str, state.keys() - tensors.keys())))}"
        )
        troubles.append(Trouble(rule="weight-files", evidence=evidence, remedy="save the module's state_dict alone"))
    return tensors


def read_target(config: TargetConfig, *, embedding: bool) -> TargetNumbers:
    """The target's numbers, from its config.json; embedding: also its embedding, read as one tensor.

    Raises EagleError when there is no such target.
    """
    text = load_config(config)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    rope = rope.get("full_attention", rope)
    return TargetNumbers(
        name=config.model,
        model_type=str(text.model_type),
        architecture=load_architecture(config),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        theta=float(rope.get("rope_theta", DEFAULT_THETA)),
        max_positions=getattr(text, "max_position_embeddings", None),
        unspelled_rope=unspelled_rope(config, text),
        embedding_VH=_embedding(local_path(config), config.revision) if embedding else None,
    )


def _embedding(model: str, revision: str | None) -> torch.Tensor | None:
    """The embedding of a target in safetensors files; None where it is not found under a known name."""
    names, file = list(_EMBEDDINGS), _fetch(model, "model.safetensors", revision)
    index = None if file is not None else _fetch(model, "model.safetensors.index.json", revision)
    remedy = f"fetch the target {model} again"
    if index is not None:
        weight_map = read_object(index, remedy=remedy).get("weight_map")
        if not isinstance(weight_map, dict):
            raise EagleError(f"{index} has no weight_map (tensor: file); {remedy}")
        names = [name for name in names if isinstance(weight_map.get(name), str)]
        file = _fetch(model, weight_map[names[0]], revision) if names else None
    if file is None:
        return None
    try:
        with safe_open(file, framework="pt") as tensors:
            name = next((name for name in names if name in tensors.keys()), None)  # noqa: SIM118
            return None if name is None else tensors.get_tensor(name)
    except BROKEN as error:
        raise EagleError(f"{file} cannot be read ({reason(error)}); {remedy}") from error


def _fetch(model: str, name: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model) / name if (Path(model) / name).is_file() else None
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return None
