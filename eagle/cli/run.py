"""`eagle run`: the stages of a recipe, one after the other; each skips what is complete and resumes what is not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle.config import Recipe
from eagle.progress import console


def run(recipe: Recipe, explain: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Regenerates (where data.sources names the answers of data.regenerate), prepares, extracts, trains and evaluates; returns
    the evaluation's results.

    explain: called with "regenerate", "data", "features", "train", "eval" before each stage (the demo says there what happens).
    """
    from eagle.data.features import extract
    from eagle.data.prepare import prepare
    from eagle.data.regenerate import regenerate, regenerated
    from eagle.eval.harness import evaluate
    from eagle.train.loop import train

    stages: list[tuple[str, Callable[[Recipe], Any]]] = [
        ("data", prepare),
        ("features", extract),
        ("train", train),
        ("eval", evaluate),
    ]
    if recipe.train.features == "online":
        del stages[1]  # the target computes them while the head trains
    answers = regenerated(recipe).resolve()
    if recipe.data.regenerate.prompts and answers in (Path(source).resolve() for source in recipe.data.sources):
        stages.insert(0, ("regenerate", regenerate))
    result: dict[str, Any] = {}
    for number, (name, stage) in enumerate(stages, start=1):
        console.rule(f"{number} of {len(stages)}: {name}", align="left", style="dim")
        if explain is not None:
            explain(name)
        start = time.monotonic()
        result = stage(recipe)
        console.print(f"{name}: {time.monotonic() - start:,.1f} s", style="dim")
    console.print(f"the head is in {recipe.head_dir}, the results in {recipe.eval_dir}", markup=False, soft_wrap=True)
    return result
