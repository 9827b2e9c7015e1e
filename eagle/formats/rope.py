"""RoPE settings of config.json in both spellings: `rope_theta` + `rope_scaling` (transformers 4), `rope_parameters` (5)."""

from collections.abc import Mapping
from typing import Any

from eagle.errors import EagleError
from eagle.formats.format import ROPE_TYPES

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def read_rope(
    values: Mapping[str, Any], *, default_theta: float, asked: float | None = None
) -> tuple[dict[str, Any], str]:
    """rope_parameters (rope_type, rope_theta, ...), and where its theta comes from.

    asked: a theta that is taken whatever config.json says of it. Raises EagleError where the two spellings disagree, theta is no
    positive number, or the scaling is not one that a head computes.
    """
    new, theta, scaling = (values.get(key) for key in ("rope_parameters", "rope_theta", "rope_scaling"))
    for name, value in (("rope_parameters", new), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise EagleError(
                f"it describes no head: {name} is {value!r}, expected an object; fetch or save the head again"
            )
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
    if parameters["rope_type"] not in ROPE_TYPES:
        raise EagleError(
            f"RoPE scaling {parameters['rope_type']!r} is not supported, expected one of {', '.join(ROPE_TYPES)}"
        )
    theta = parameters["rope_theta"] = float(parameters["rope_theta"])
    if not 0 < theta < float("inf"):
        raise EagleError(f"rope_theta is {theta:g}, expected a positive number such as 10000 (--rope-theta)")
    return parameters, where


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
