"""What a target is recognised by, wherever it lies."""

from collections.abc import Mapping
from typing import Any


def without_name(identity: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """`Target.identity()` less the path or hub id, which a move changes, where the weights' hash says what it is."""
    if identity is None or not identity.get("weights_sha256"):
        return identity
    return {key: value for key, value in identity.items() if key != "model"}
