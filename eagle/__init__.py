"""eagle: train EAGLE draft heads for any Hugging Face causal language model, and prove what they are worth."""

from importlib import import_module
from typing import Any

_OPTIONS = (
    "Tree",
    "Published",
    "Chain",
    "SmallModel",
    "Ngram",
    "Plain",
    "Coupled",
    "Rejection",
    "Block",
    "TopK",
    "Typical",
)
"""Of DecodeConfig: drafters and rules."""
_PLACES = {
    **dict.fromkeys(("DecodeConfig", *_OPTIONS), "eagle.decode_config"),
    "SpeculativeDecoder": "eagle.decode.decoder",
    "Target": "eagle.target.target",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line's --help must not wait for torch.
    if name not in _PLACES:
        raise AttributeError(f"module 'eagle' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
