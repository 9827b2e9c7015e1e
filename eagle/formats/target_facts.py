"""What head files say about a target and are checked against: known from its config, its weights loaded only when asked for."""

from functools import cached_property
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from eagle.config import TargetConfig
from eagle.loading import load_architecture, load_config, load_model
from eagle.target import weights_hash
from eagle.token_layers import TokenLayers


class TargetFacts:
    """A target by its config. `checkpoint.check_fits` takes it in an eagle.target.Target's place."""

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
