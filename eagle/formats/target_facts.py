"""What head files say about a target and are checked against: known from its config, its weights loaded only when asked for.

The identity that a head records of its target is of the weights as they were loaded for training: in that dtype, of that
revision. So the head's papers say how to load it again (`settings_as_trained`).
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from eagle.config import TargetConfig
from eagle.formats.card import section
from eagle.formats.format import SIDECAR
from eagle.formats.rope import write_rope
from eagle.reading import read_object
from eagle.target.loading import DTYPES, load_architecture, load_config, load_model, local_path
from eagle.target.target import weights_hash
from eagle.target.token_layers import TokenLayers

TRANSFORMERS_4_THETA = {"mixtral": 1e6}
"""RoPE base of a family's config class in transformers 4 where it is not 10000, as far as the reference has models for it."""


def settings_as_trained(
    model: str, folder: Path, *, trust_remote_code: bool = False, device: str = "auto"
) -> TargetConfig:
    """How to load a target for the head in a folder: as for its training, where the head's papers name that target.

    trust_remote_code: the user's word; the papers', whoever wrote them, does not count.
    Raises EagleError for papers that are damaged.
    """
    told: Mapping[str, Any] = section(_papers(folder / "training.json"), "target")
    if not told:
        kept = _papers(folder / SIDECAR)
        identity, settings = kept.get("target_identity"), kept.get("target_settings")
        if isinstance(identity, Mapping) and isinstance(settings, Mapping):
            told = {**settings, "model": identity.get("model")}
    if told.get("model") != model:
        return TargetConfig(model=model, device=device, trust_remote_code=trust_remote_code)
    revision, dtype = told.get("revision"), told.get("dtype")
    return TargetConfig(
        model=model,
        device=device,
        revision=revision if isinstance(revision, str) else None,
        dtype=dtype if isinstance(dtype, str) and dtype in DTYPES else "auto",  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
    )


def settings_told(settings: TargetConfig) -> dict[str, Any]:
    """What files tell of how a target was loaded, as far as it is not the default."""
    told = {"revision": settings.revision, "dtype": settings.dtype}
    return {key: value for key, value in told.items() if value not in (None, "auto")}


def unspelled_rope(settings: TargetConfig, config: PreTrainedConfig) -> dict[str, Any]:
    """RoPE keys that a target's config.json lacks as transformers 4 spells them, and whose defaults there are others.

    transformers 5 saves `rope_parameters` alone; what reads only the older keys rotates with its defaults, without a word.
    """
    told, _ = PreTrainedConfig.get_config_dict(local_path(settings), revision=settings.revision)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        return {}
    defaults = {"rope_theta": TRANSFORMERS_4_THETA.get(config.model_type, 10000.0), "rope_scaling": None}
    spelled = write_rope(rope)
    return {key: spelled[key] for key, usual in defaults.items() if key not in told and spelled[key] != usual}


def _papers(file: Path) -> dict[str, Any]:
    return read_object(file, remedy="remove it, or make the head's folder again") if file.is_file() else {}


class TargetFacts:
    """A target by its config. `checkpoint.check_fits` takes it in an eagle.target.target.Target's place."""

    def __init__(self, settings: TargetConfig):
        """Raises EagleError when there is no such model."""
        self.settings, self.name = settings, settings.model
        self.config: PreTrainedConfig = load_config(settings)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def model_type(self) -> str:
        """Its family, as runtimes name it."""
        return str(self.config.model_type)

    @cached_property
    def architecture(self) -> str:
        """The class that transformers makes of it; for code of its own, what its config names."""
        named = load_architecture(self.settings) or next(iter(self.config.architectures or ()), None)
        return named or type(self._model).__name__

    @cached_property
    def unspelled_rope(self) -> dict[str, Any]:
        """As the function of that name."""
        return unspelled_rope(self.settings, self.config)

    @cached_property
    def _model(self) -> PreTrainedModel:
        return load_model(self.settings)

    @cached_property
    def tokens(self) -> TokenLayers:
        """Its embedding and LM head: loads the weights."""
        return TokenLayers.of_model(self._model, self.config)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "architecture": type(self._model).__name__,
            "weights_sha256": weights_hash(self._model),
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
        }

    def identity(self) -> dict[str, Any]:
        """As Target.identity: loads the weights."""
        return self._identity
