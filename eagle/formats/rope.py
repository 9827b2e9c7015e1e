"""RoPE settings of config.json in both spellings: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (5).

rope_parameters may be nested, one object per layer type (Gemma 3): the head's own layer's counts.
"""

from collections.abc import Mapping
from typing import Any

from eagle.errors import EagleError
from eagle.formats.format import ROPE_TYPES

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
"""Of each scaling, the numbers that it must have, and those that it may have."""
_WITHOUT_EFFECT = ("mrope_section", "mrope_interleaved", "finetuned")
"""Sections of M-RoPE share one position in text."""


def read_rope(
    values: Mapping[str, Any], *, default_theta: float, layer: str, asked: float | None = None
) -> tuple[dict[str, Any], str]:
    """rope_parameters (rope_type, rope_theta, ...), and where its theta comes from.

    layer: the kind of the head's layer, as layer_types names it. asked: a theta that is taken whatever config.json says.
    Raises EagleError where the two spellings disagree, theta is no positive number, or heads here do not rotate so.
    """
    new, theta, scaling = (values.get(key) for key in ("rope_parameters", "rope_theta", "rope_scaling"))
    for name, value in (("rope_parameters", new), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise EagleError(
                f"it describes no head: {name} is {value!r}, expected an object; fetch or save the head again"
            )
    new, scaling = of_layer(new, layer), of_layer(scaling, layer)
    if new:
        if scaling and scaling_of(new) != scaling_of(scaling):
            raise EagleError(
                f"rope_scaling is {dict(scaling)}, rope_parameters {dict(new)}: two different scalings; keep the one that the "
                "head was trained with, in both"
            )
        parameters = {"rope_theta": theta, **new}
        where = "rope_parameters" if new.get("rope_theta") is not None else "rope_theta"
        if asked is None and theta is not None and parameters["rope_theta"] != theta:
            raise EagleError(
                f"rope_theta is {theta}, rope_parameters says {parameters['rope_theta']}; keep the one that the head was "
                "trained with (--rope-theta)"
            )
    else:
        parameters, where = {**(scaling or {}), "rope_theta": theta}, "rope_theta"
        if theta is None and scaling:
            parameters["rope_theta"], where = scaling.get("rope_theta"), "rope_scaling"
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    if asked is not None:
        parameters["rope_theta"], where = asked, "as --rope-theta says"
    elif parameters["rope_theta"] is None:
        parameters["rope_theta"], where = default_theta, "the format's default: config.json names none"
    kind, original = parameters["rope_type"], values.get("original_max_position_embeddings")
    if original is not None and kind in ("yarn", "llama3"):  # as transformers does
        parameters.setdefault("original_max_position_embeddings", original)
    check_rotation(parameters)
    if kind not in ROPE_TYPES:
        raise EagleError(f"RoPE scaling {kind!r} is not supported, expected one of {', '.join(ROPE_TYPES)}")
    parameters = {key: value for key, value in parameters.items() if value is not None and key not in _WITHOUT_EFFECT}
    _check_numbers(parameters)
    theta = parameters["rope_theta"] = float(parameters["rope_theta"])
    if not 0 < theta < float("inf"):
        raise EagleError(f"rope_theta is {theta:g}, expected a positive number such as 10000 (--rope-theta)")
    return parameters, where


def of_layer(rope: Mapping[str, Any] | None, layer: str) -> Mapping[str, Any] | None:
    """The settings of one kind of layer, where they are nested by kind; else all. Raises EagleError when it has none."""
    nested = [key for key, value in (rope or {}).items() if isinstance(value, Mapping)]
    if not rope or not nested:
        return rope
    found = rope.get(layer)
    if not isinstance(found, Mapping) or len(nested) < len(rope):
        raise EagleError(
            f"RoPE settings are nested ({', '.join(rope)}), expected one object per kind of layer, {layer} among them; "
            "write the settings that the head was trained with, not nested"
        )
    return found


def check_rotation(parameters: Mapping[str, Any]) -> None:
    """Raises EagleError for a rotation of a part of the head dim, and for angles that depend on other texts."""
    if parameters.get("rope_type") == "dynamic":
        raise EagleError(
            "RoPE scaling 'dynamic' is not supported: its angles depend on the longest text seen before, and servers scale "
            f"at every length; train the head with one of {', '.join(ROPE_TYPES)}"
        )
    share = parameters.get("partial_rotary_factor")
    if share is not None and (isinstance(share, bool) or share != 1):
        raise EagleError(
            f"partial_rotary_factor is {share!r}: heads here rotate the whole head dim, so this one cannot be taken"
        )


def _check_numbers(parameters: Mapping[str, Any]) -> None:
    """Raises EagleError for a number that is missing, or none, or of no use to this scaling; not of the base."""
    kind = parameters["rope_type"]
    needed, allowed = _NUMBERS[kind]
    rest = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    rest.pop("partial_rotary_factor", None)
    if kind == "yarn" and not isinstance(rest.pop("truncate", True), bool):
        raise EagleError(f"RoPE truncate is {parameters['truncate']!r}, expected true or false")
    if kind != "yarn" and kind != "llama3":
        rest.pop("original_max_position_embeddings", None)  # it changes nothing there
    if kind == "default" and rest.get("factor") == 1:
        del rest["factor"]
    missing, stray = set(needed) - rest.keys(), rest.keys() - {*needed, *allowed}
    if missing or stray:
        raise EagleError(
            f"RoPE scaling {kind!r} lacks {', '.join(sorted(missing)) or 'nothing'}, "
            f"has {', '.join(sorted(stray)) or 'nothing'} too much; expected besides its theta: "
            + (", ".join((*needed, *(f"{one} (or not)" for one in allowed))) or "nothing")
        )
    for key, value in rest.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise EagleError(f"RoPE {key} is {value!r}, expected a positive number; write that of the training")
    if kind == "llama3" and rest["low_freq_factor"] >= rest["high_freq_factor"]:
        raise EagleError(
            f"RoPE low_freq_factor is {rest['low_freq_factor']}, high_freq_factor {rest['high_freq_factor']}, expected the "
            "latter to be larger; write those of the training"
        )


def scaling_of(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What a setting says of the scaling, in one spelling."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type", "rope_type")}
    return {"rope_type": rope.get("rope_type") or rope.get("type") or "default", **rest}


def write_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings of one setting, so that loaders old and new read the same."""
    kind = parameters.get("rope_type", "default")
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if kind == "default" else {**scaling, "type": kind},
        "rope_parameters": dict(parameters),
    }
