"""Verification rules by name."""

import dataclasses
import difflib
from typing import Any

from eagle.config import DecodeConfig
from eagle.errors import EagleError
from eagle.verify.block import Block
from eagle.verify.coupled import Coupled, Rule
from eagle.verify.lossy import TopK, Typical
from eagle.verify.rejection import Rejection

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Coupled, Rejection, Block, TopK, Typical)}


def make_rule(name: str, **options: Any) -> Rule:
    """The rule of that name; options: the fields of its class (top_k: k; typical: epsilon, delta).

    Raises EagleError for an unknown name or option (with the nearest one) or an option out of its range.
    """
    if name not in RULES:
        raise EagleError(f'unknown rule "{name}"; {_nearest(name, list(RULES))}')
    rule = RULES[name]
    known: list[str] = [field.name for field in dataclasses.fields(rule)] if dataclasses.is_dataclass(rule) else []
    for option in options:
        if option not in known:
            raise EagleError(f'the rule "{name}" has no option {option}; {_nearest(option, known)}')
    return rule(**options)


def rule_of(decode: DecodeConfig, name: str | None = None) -> Rule:
    """The rule that `decode` names (or `name`), with the options that `decode` has for it."""
    name = decode.rule if name is None else name
    options: dict[str, dict[str, Any]] = {
        TopK.name: {"k": decode.rule_top_k},
        Typical.name: {"epsilon": decode.rule_epsilon, "delta": decode.rule_delta},
    }
    return make_rule(name, **options.get(name, {}))


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
