"""Which head an evaluation is about: the one that was given, else the recipe's own."""

from pathlib import Path

from eagle.config import Recipe
from eagle.errors import EagleError


def own_or_given(recipe: Recipe, head: str | Path | None) -> str | Path:
    """`head`, else the recipe's own. Raises EagleError where that is not there."""
    if head is not None:
        return head
    if not recipe.head_dir.is_dir():
        raise EagleError(
            f"there is no head at {recipe.head_dir}; train it first (eagle train RECIPE) or give --head PATH"
        )
    return recipe.head_dir


def drafting_head(recipe: Recipe, head: str | Path | None) -> str | Path | None:
    """The head that the recipe's drafter reads; None for a drafter that reads none.

    Raises EagleError for a head that is given and not read, and for one that is read and not there.
    """
    if recipe.decode.drafter.reads_head:
        return own_or_given(recipe, head)
    if head is not None:
        raise EagleError(
            f'--head was given, but decode.drafter "{recipe.decode.drafter.name}" reads no head; leave it out'
        )
    return None
