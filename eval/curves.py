"""Throughput against batch size as a part of `eagle eval` (eval.batches): one curve per sampling setting, resumable."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.config import Recipe
from eagle.errors import EagleError
from eagle.eval.checks.check import checked_decoder
from eagle.eval.runner import first_turn, fits
from eagle.eval.settings import Setting
from eagle.eval.suites.prompt_set import Prompt, spread
from eagle.eval.throughput import curve, measure
from eagle.files import sha256_text, write_json
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

FEWEST_PROMPTS = 16
"""At least so many prompts are answered at every batch size, where there are as many."""


class Curves:
    """What eval.batches asks for: nothing when it is [1].

    Raises EagleError for batch sizes below 1, for more rows than there are prompts, and for a verification rule that does not
    promise plain decoding's tokens: without that, nothing tells whether a batch is right.
    """

    def __init__(self, recipe: Recipe, target: Target, head: str | Path, prompts: Sequence[Prompt]):
        self.recipe, self.batches = recipe, sorted(set(recipe.eval.batches))
        self.ids: list[list[int]] = []
        if not self.batches or self.batches[0] < 1:
            raise EagleError(
                f"eval.batches is {list(recipe.eval.batches)}; expected sizes from 1 on, such as [1, 2, 4]"
            )
        if self.batches == [1]:
            return
        self.decoder = checked_decoder(recipe, target, head if recipe.decode.drafter.reads_head else None)
        rendered = {prompt.id: prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in prompts}
        fitting = [prompt for prompt in prompts if fits(target, rendered[prompt.id], recipe.eval.max_new_tokens)]
        every = math.lcm(*self.batches)
        if len(fitting) < every:
            raise EagleError(
                f"eval.batches {self.batches} need a multiple of {every} prompts, there are {len(fitting)} (that fit); raise "
                "eval.limit, or leave the larger sizes out"
            )
        wanted = every * math.ceil(FEWEST_PROMPTS / every)
        count = wanted if len(fitting) >= wanted else len(fitting) // every * every
        self.ids = [rendered[prompt.id] for prompt in spread(fitting, count)]

    def measure(self, settings: Sequence[Setting], identity: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One entry of results.json's `throughput` per setting; throughput.json keeps what is done, of this identity."""
        if not self.ids:
            return []
        path = self.recipe.eval_dir / "throughput.json"
        key = {**identity, "batches": self.batches, "prompts_sha256": sha256_text(json.dumps(self.ids))}
        done: dict[str, Any] = _read(path, key)
        for setting in settings:
            if setting.label not in done:
                limit = self.recipe.eval.max_new_tokens
                points = measure(self.decoder, self.ids, batches=self.batches, setting=setting, max_new_tokens=limit)
                done[setting.label] = {
                    **curve(points, setting=setting.label, max_new_tokens=limit, prompts=len(self.ids)),
                    "drafter": self.recipe.decode.drafter.name,
                }
                write_json(path, {"identity": key, "curves": done})
        return [done[setting.label] for setting in settings]


def _read(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        return {}
    return found["curves"] if isinstance(found, dict) and found.get("identity") == identity else {}
