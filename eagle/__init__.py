"""eagle: train EAGLE draft heads for any Hugging Face causal language model, and prove what they are worth."""

from typing import Any

__all__ = ["SpeculativeDecoder", "Target"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line's --help must not wait for torch.
    if name == "SpeculativeDecoder":
        from eagle.decode import SpeculativeDecoder

        return SpeculativeDecoder
    if name == "Target":
        from eagle.target import Target

        return Target
    raise AttributeError(f"module 'eagle' has no attribute {name!r}")
