"""The prompts that `eagle tune` decodes: none of those that are evaluated."""

import re
from collections.abc import Sequence

from eagle.config import Recipe
from eagle.data.prepare import load_prepared
from eagle.errors import EagleError
from eagle.eval.runner import first_turn, fits
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.prompt_set import load_prompts, recipe_prompts, spread
from eagle.progress import console
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

FEWEST = 2
_PART = re.compile(r"#\d+$")
"""What preparation puts behind a conversation's id where it becomes several documents."""


def tuning_prompts(recipe: Recipe, target: Target) -> list[list[int]]:
    """Token ids of tune.count prompts (or as many as there are): of tune.prompts, else what precedes the answers of the
    prepared data's held-out documents, else of eval.prompts; questions that eval.limit lets through are left out.

    Raises EagleError when there are fewer than two that leave room for an answer.
    """
    found = _found(recipe, target)
    fitting = [ids for ids in found if ids and fits(target, ids, recipe.tune.max_new_tokens)]
    count = min(recipe.tune.count, len(fitting))
    chosen = [fitting[place * len(fitting) // count] for place in range(count)] if count else []
    if len(chosen) < FEWEST:
        raise EagleError(
            f"there are {len(chosen)} prompts to tune with ({len(found)} are not evaluated, {len(found) - len(fitting)} of them "
            f"too long), expected {FEWEST} or more; name others in tune.prompts (your own, or shipped:NAME), or lower eval.limit"
        )
    return chosen


def _found(recipe: Recipe, target: Target) -> list[list[int]]:
    def rendered(prompts: Sequence[Prompt]) -> list[list[int]]:
        return [prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in prompts]

    if not recipe.tune.prompts and (recipe.data_dir / "manifest.json").is_file():
        # By their ids: a document has lost its text.
        known = set(map(tuple, rendered(recipe_prompts(recipe.eval))))
        documents = _held_out(recipe)
        left_ids = [ids for ids in documents if tuple(ids) not in known]
        _say_left_out(len(documents) - len(left_ids), "the held-out documents")
        return left_ids
    if recipe.tune.prompts:
        every = load_prompts(recipe.tune.prompts, split=recipe.eval.split)
    else:
        every = load_prompts(recipe.eval.prompts, tasks=recipe.eval.tasks, split=recipe.eval.split)
    # By their text: one file's question may be another's.
    evaluated = {prompt.turns[0] for prompt in recipe_prompts(recipe.eval)}
    left = [prompt for prompt in every if prompt.turns[0] not in evaluated]
    if recipe.tune.prompts:
        _say_left_out(len(every) - len(left), "tune.prompts")
    return rendered(spread(left, min(len(left), 4 * recipe.tune.count))) if left else []


def _say_left_out(count: int, what: str) -> None:
    if count:
        console.print(f"tune: {count} of {what} are evaluated too and left out", markup=False)


def _held_out(recipe: Recipe) -> list[list[int]]:
    """What precedes the first answer of every validation conversation. A conversation may be several documents (ID#0, ID#1 ...,
    one per answer): its first one alone is taken, so that prompts are independent of each other, as intervals suppose."""
    data, _ = load_prepared(recipe.data_dir)
    prompts: dict[str, list[int]] = {}
    for row in data.filter(lambda split: split == "validation", input_columns="split"):
        mask = list(row["loss_mask"])
        before = list(row["input_ids"])[: mask.index(True)] if True in mask else []
        prompts.setdefault(_PART.sub("", row["id"]), before)
    return list(prompts.values())
