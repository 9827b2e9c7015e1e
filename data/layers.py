"""Which of the target's layers a recipe's features need, and what they take on disk."""

from eagle.config import Recipe
from eagle.data.store import DTYPES
from eagle.heads.eagle3 import aux_layers_of


def layers_to_store(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    """features.aux_layers, or those that the recipe's head reads of a target of `num_layers` layers.

    Raises EagleError when head.aux_layers and head.version do not go together, or the target has not got the layers.
    """
    if recipe.features.aux_layers is not None:
        return recipe.features.aux_layers
    return aux_layers_of(recipe.head, num_layers)


def token_bytes(hidden_size: int, blocks: int, dtype: str) -> int:
    """Bytes of the store per token: `blocks` states (features and aux layers), float8's scales, int32 id, bool mask."""
    scale = 4 if dtype == "float8" else 0
    return blocks * (hidden_size * DTYPES[dtype].itemsize + scale) + 5


def readable_size(count: float) -> str:
    """1234567 -> "1.2 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
