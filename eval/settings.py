"""Sampling settings that every method of an evaluation answers under: "T=0", "T=0.7", "T=1 top_p=0.9"."""

import dataclasses
from typing import Any

from eagle.errors import EagleError
from eagle.sample.sampling import Sampling

_NAMES = {"T": float, "top_k": int, "top_p": float, "min_p": float}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to sample; label is how the recipe and the tables write it."""

    label: str
    sampling: Sampling
    """Its seed is not used: every request has its own (see `seeded`)."""

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    def arguments(self) -> dict[str, Any]:
        """Keywords of `generate`, ours and Hugging Face's. top_k 0 switches off Hugging Face's default of 50."""
        if self.greedy:
            return {"do_sample": False}
        filters = {"top_k": self.sampling.top_k, "top_p": self.sampling.top_p}
        if self.sampling.min_p > 0:
            filters["min_p"] = self.sampling.min_p
        return {"do_sample": True, "temperature": self.sampling.temperature, **filters}

    def seeded(self, seed: int) -> Sampling:
        """The sampling of one request."""
        return dataclasses.replace(self.sampling, seed=seed)


def parse_setting(text: str) -> Setting:
    """Raises EagleError, naming what was got and expected, for anything but "T=NUMBER [top_k=N] [top_p=P] [min_p=P]"."""
    values: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        try:
            values[name] = _NAMES[name](value)
        except (KeyError, ValueError):
            raise EagleError(
                f'eval.sampling holds "{text}": "{part}" is not understood; expected T=NUMBER and, after it, top_k=N, top_p=P or '
                'min_p=P, such as "T=1 top_p=0.9"'
            ) from None
    if "T" not in values:
        raise EagleError(
            f'eval.sampling holds "{text}" without a temperature; expected something like "T=0" or "T=0.7"'
        )
    temperature = values.pop("T")
    if temperature == 0 and values:
        raise EagleError(f'eval.sampling holds "{text}": at T=0 {", ".join(values)} means nothing; write "T=0"')
    return Setting(label=text, sampling=Sampling(temperature=temperature, **values))


def parse_settings(texts: tuple[str, ...]) -> list[Setting]:
    """Raises EagleError for none at all, and for one that occurs twice."""
    if not texts or len(set(texts)) < len(texts):
        raise EagleError(
            f'eval.sampling is {list(texts)}; expected one or more different settings, such as ["T=0", "T=1"]'
        )
    return [parse_setting(text) for text in texts]
