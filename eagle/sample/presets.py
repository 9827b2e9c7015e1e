"""Parameter templates by name: bounded temperature, top_p, top_k and answer length, each bound with its reason.

A template stands for a kind of task. What a caller says explicitly goes over its values, within its bounds. Temperature 0 is
greedy decoding, where top_p and top_k mean nothing.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from eagle.errors import EagleError


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a parameter is by default, and the closed range [low, high] in which a caller may move it."""

    value: float
    low: float
    high: float
    why_low: str
    """Why not below `low`: a clause that completes "below it ..."."""
    why_high: str
    """Why not above `high`: a clause that completes "above it ..."."""
    source: str = "a choice of this package"
    """Whose practice the value is, as far as it was looked up; the range is this package's choice always."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One template."""

    purpose: str
    temperature: Bound
    """Divides the logits; 0: greedy."""
    top_p: Bound
    """Probability mass that is kept (nucleus sampling)."""
    top_k: Bound
    """Tokens that are kept."""
    max_new_tokens: Bound
    """Longest answer, in tokens."""

    def bounds(self) -> Iterator[tuple[str, Bound]]:
        """(parameter, bound) of the four."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Bound):
                yield field.name, value


_LENGTH_LOW = "there is no answer"
_TOP_K_LOW = "the temperature has too little left to choose from"
_TOP_P_LOW = "most continuations that read well are cut off"
_TAIL = "the unreliable tail of the distribution comes in (Holtzman et al. 2020, arXiv 1904.09751, on why to cut it)"
_COMMON = "common practice"

PRESETS: dict[str, Preset] = {
    "precise": Preset(
        purpose="facts, extraction, arithmetic: the likeliest answer",
        temperature=Bound(
            value=0.0,
            low=0.0,
            high=0.3,
            why_low="a temperature is not negative",
            why_high="answers to the same question begin to differ, which this template is there to prevent",
            source="0.0 for mathematics and code: DeepSeek API documentation",
        ),
        top_p=Bound(
            value=0.9,
            low=0.1,
            high=0.95,
            why_low="decoding is greedy in all but name: say temperature 0",
            why_high=_TAIL,
            source=_COMMON,
        ),
        top_k=Bound(
            value=20,
            low=1,
            high=50,
            why_low="no token is left",
            why_high="tokens come in that no precise answer needs",
            source="20: recommended in Qwen3's model card",
        ),
        max_new_tokens=Bound(
            value=256,
            low=1,
            high=1024,
            why_low=_LENGTH_LOW,
            why_high="the text is no longer a short answer, and greedy text tends to repeat itself (Holtzman et al. 2020)",
        ),
    ),
    "balanced": Preset(
        purpose="conversation: varied wording, reliable content",
        temperature=Bound(
            value=0.7,
            low=0.3,
            high=1.0,
            why_low="answers hardly vary",
            why_high="the text is less likely than what the model itself would write",
            source="0.7: recommended in Qwen3's model card for answers without thinking",
        ),
        top_p=Bound(
            value=0.9,
            low=0.5,
            high=0.98,
            why_low=_TOP_P_LOW,
            why_high=_TAIL,
            source=_COMMON,
        ),
        top_k=Bound(
            value=50,
            low=10,
            high=100,
            why_low=_TOP_K_LOW,
            why_high="it cuts off nothing that top_p would keep at this temperature",
            source="50: the default of Hugging Face generate",
        ),
        max_new_tokens=Bound(
            value=512,
            low=1,
            high=2048,
            why_low=_LENGTH_LOW,
            why_high="one turn of a conversation would fill most small models' context",
        ),
    ),
    "creative": Preset(
        purpose="stories, brainstorming: surprising and still readable",
        temperature=Bound(
            value=1.0,
            low=0.7,
            high=1.5,
            why_low="the wording turns conventional",
            why_high="text falls apart into unrelated words",
            source="1.0: the model's own distribution; up to 1.5 for creative writing: DeepSeek API documentation",
        ),
        top_p=Bound(
            value=0.95,
            low=0.8,
            high=1.0,
            why_low=_TOP_P_LOW,
            why_high="a probability mass ends at 1",
            source=_COMMON,
        ),
        top_k=Bound(
            value=100,
            low=40,
            high=1000,
            why_low="the text turns repetitive",
            why_high="at these temperatures top_k is what keeps the tail out; it must cut somewhere",
        ),
        max_new_tokens=Bound(
            value=1024,
            low=1,
            high=4096,
            why_low=_LENGTH_LOW,
            why_high="sampled text this long loses its thread: ask for it in parts",
        ),
    ),
    "code": Preset(
        purpose="programs: one that runs, at the first attempt",
        temperature=Bound(
            value=0.2,
            low=0.0,
            high=0.8,
            why_low="a temperature is not negative",
            why_high="slips that break a program become likely",
            source=f"{_COMMON}: about 0.2 where one attempt counts, about 0.8 where the best of many does",
        ),
        top_p=Bound(
            value=0.95,
            low=0.5,
            high=1.0,
            why_low="names and literals that are right and rare are cut off",
            why_high="a probability mass ends at 1",
            source=_COMMON,
        ),
        top_k=Bound(
            value=40,
            low=1,
            high=100,
            why_low="no token is left",
            why_high="tokens come in that break the syntax",
        ),
        max_new_tokens=Bound(
            value=768,
            low=1,
            high=4096,
            why_low=_LENGTH_LOW,
            why_high="a program this long is better asked for file by file",
        ),
    ),
}

NAMES = tuple(PRESETS)


def preset(name: str) -> Preset:
    """The template of that name. Raises EagleError, with the nearest name, for none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(NAMES)}"
        raise EagleError(f'unknown preset "{name}"; {hint}')
    return PRESETS[name]


def within(name: str, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `generate` for the template `name`: do_sample, temperature, top_p, top_k and max_new_tokens.

    explicit: the caller's keywords; those that the template bounds go over its values (a number, or one per row), with
    do_sample=False as temperature 0; others are left alone and not returned. Greedy: without top_p and top_k, unless said.
    Raises EagleError for an unknown template, and for a value beyond a bound, with the bound, its reason and the remedy.
    """
    chosen = preset(name)
    given = {key: value for key, value in explicit.items() if value is not None}
    if given.get("do_sample") is False:
        if given.setdefault("temperature", 0) != 0:
            raise EagleError(
                f"do_sample=False and temperature={given['temperature']} contradict each other; leave one out"
            )
    elif given.get("do_sample") is True and given.get("temperature", chosen.temperature.value) == 0:
        raise EagleError(
            f'do_sample=True, but the preset "{name}" decodes greedily unless told a temperature; add one from '
            f"{_range('temperature', chosen.temperature)}, or leave do_sample out"
        )
    values: dict[str, Any] = {}
    for key, bound in chosen.bounds():
        if key in explicit and explicit[key] is None and key != "temperature":
            # As in Hugging Face, None switches a filter off.
            given[key] = {"top_k": 0, "top_p": 1.0}.get(key, bound.value)
        values[key] = given.get(key, bound.value)
        for value in values[key] if isinstance(values[key], (list, tuple)) else [values[key]]:
            _check(name, key, value, bound)
    sampled = (
        any(values["temperature"]) if isinstance(values["temperature"], (list, tuple)) else values["temperature"] > 0
    )
    if not sampled:
        del values["temperature"]
        values = {key: value for key, value in values.items() if key not in ("top_p", "top_k") or key in given}
    return {"do_sample": sampled, **values}


def bounds_text(key: str, bound: Bound) -> str:
    """One parameter of a template: its value and whose that is, its range, and the reasons for the range."""
    return (
        f"{key} {_number(key, bound.value)} ({bound.source}); {_range(key, bound)}: below, {bound.why_low}; above, "
        f"{bound.why_high}"
    )


def summary(name: str) -> str:
    """One line: purpose, values and ranges."""
    one = preset(name)
    values = ", ".join(f"{key} {_number(key, bound.value)} ({_range(key, bound)})" for key, bound in one.bounds())
    return f"{name}: {one.purpose}. {values}"


def show() -> None:
    """Prints every preset: each value, its range and the reasons."""
    for name, one in PRESETS.items():
        print(f"{name}: {one.purpose}")
        for key, bound in one.bounds():
            print(f"    {bounds_text(key, bound)}")


def _check(name: str, key: str, value: Any, bound: Bound) -> None:
    if not isinstance(value, (int, float)):
        raise EagleError(f"{key} is {value!r}, expected a number from {_range(key, bound)} (preset {name})")
    if bound.low <= value <= bound.high:
        return
    low = not value >= bound.low  # a NaN is neither above nor below
    side, edge, why = ("below", bound.low, bound.why_low) if low else ("above", bound.high, bound.why_high)
    others = [other for other, one in PRESETS.items() if _holds(getattr(one, key), value)]
    elsewhere = f", take the preset {' or '.join(others)}" if others else ""
    raise EagleError(
        f'{key} is {_number(key, value)}, the preset "{name}" allows {_range(key, bound)}: {side} {_number(key, edge)} {why}; '
        f"choose a value in that range{elsewhere}, or leave the preset out"
    )


def _holds(bound: Bound, value: float) -> bool:
    return bound.low <= value <= bound.high


def _range(key: str, bound: Bound) -> str:
    return f"{_number(key, bound.low)} to {_number(key, bound.high)}"


def _number(key: str, value: float) -> str:
    return "0 (off)" if key == "top_k" and value == 0 else f"{value:g}"
