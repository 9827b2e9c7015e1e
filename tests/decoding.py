"""DecodeConfig from flat keywords: a drafter and a rule by name, and options that go to the one that reads them."""

import dataclasses
from typing import Any

from eagle.decode_config import DRAFTERS, RULES, DecodeConfig


def decode_config(drafter: str = "eagle2", rule: str = "coupled", **options: Any) -> DecodeConfig:
    """children, engine and kernels are DecodeConfig's own; everything else is an option of the drafter."""
    own = {field.name for field in dataclasses.fields(DecodeConfig)}
    return DecodeConfig(
        drafter=DRAFTERS[drafter](**{name: value for name, value in options.items() if name not in own}),
        rule=RULES[rule](),
        **{name: value for name, value in options.items() if name in own},
    )
