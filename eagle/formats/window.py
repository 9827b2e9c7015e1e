"""The attention window of a head in config.json: `layer_types`, `sliding_window`, `use_sliding_window`.

A query sees the keys whose position is above its own minus the window: itself and window - 1 before it. speculators 0.9
trains heads with one of 2048 unless told otherwise. vLLM and speculators take `layer_types` and `sliding_window`;
transformers' Qwen and Mistral layers have rules of their own where `layer_types` is missing; a Llama layer has no window.
"""

from collections.abc import Mapping
from typing import Any

from eagle.errors import EagleError

FULL, SLIDING = "full_attention", "sliding_attention"
_QWEN_FIRST = 28
"""transformers' max_window_layers of a Qwen config that names none: layers below it see everything."""


def read_window(values: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """The window (None: everything before a token is seen), and what to say of it.

    Raises EagleError where the keys contradict each other, or tell of an attention that heads here do not compute.
    """
    types, size, used = (values.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    if types is not None and (not isinstance(types, list) or not types or types != types[:1] * len(types)):
        raise EagleError(
            f"layer_types is {types!r}, expected a list with the head's one layer: {FULL!r} or {SLIDING!r}",
            remedy="write the one that the head was trained with",
        )
    kind = _implied(values) if types is None else types[0]
    if kind == FULL:
        idle = types is None and size is not None and used is not False
        return None, f"sliding_window {size!r} is not used: no layer is said to have a window" if idle else None
    if kind != SLIDING:
        raise EagleError(
            f"layer_types is {types!r}: heads here have {FULL} or {SLIDING}, so this one cannot be imported",
            remedy="write one of them if the head was trained so",
        )
    if used is False:
        raise EagleError(
            f"layer_types is {types!r}, but use_sliding_window is false",
            remedy="keep the one that the head was trained with",
        )
    if type(size) is not int or size < 1:
        raise EagleError(
            f"the head's layer has a window, and sliding_window is {size!r}, expected a whole number of at least 1",
            remedy=f'write the window of the training, or "layer_types": ["{FULL}"]',
        )
    return size, f"attention window: {size} positions (sliding_window)"


def _implied(values: Mapping[str, Any]) -> str:
    """The layer's kind where config.json names none, by the rule of the layer's family."""
    family, size, used = (values.get(key) for key in ("model_type", "sliding_window", "use_sliding_window"))
    if family == "mistral":
        return FULL if size is None else SLIDING
    first = values.get("max_window_layers")
    if family in ("qwen2", "qwen3") and used and size is not None:
        return SLIDING if (_QWEN_FIRST if first is None else first) == 0 else FULL
    if used and size is not None:
        raise EagleError(
            f"use_sliding_window is true and sliding_window {size!r}, but layer_types is missing, and a Llama layer has no "
            "window without",
            remedy=f'write "layer_types": ["{SLIDING}"] or ["{FULL}"], as the head was trained',
        )
    return FULL


def write_window(window: int | None) -> dict[str, Any]:
    """The keys that vLLM and speculators read."""
    return {} if window is None else {"layer_types": [SLIDING], "sliding_window": window, "use_sliding_window": True}
