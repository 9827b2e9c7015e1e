"""Settings that nothing in this recipe would read: giving one another value than its default is an error, not a silence."""

from typing import Any

from eagle.config import HeadConfig, Recipe, TrainConfig
from eagle.errors import EagleError
from eagle.train.objective import PUBLISHED, Objective
from eagle.train.selection import interval


def refuse_idle_settings(recipe: Recipe, objective: Objective) -> None:
    """Raises EagleError naming the first setting of `head` or `train` that differs from its default and has no effect."""
    head, train = recipe.head, recipe.train
    for read, keys, reader in (
        (head.version == "eagle3", ("head.lm_head_init",), "head.version eagle3"),
        (head.init_from is not None, ("train.warm_start_check",), "head.init_from"),
        (objective.steps > 1, ("train.unroll_weight", "train.detach_between_steps"), "train.unroll_steps above 1"),
        (objective.distill_weight > 0, ("train.distill_top_k",), "train.distill_weight above 0"),
        (train.packing == "documents", ("train.max_tokens_per_row",), "train.packing documents"),
        (interval(train) > 0, ("train.decode_count", "train.decode_tokens"), "train.decode_every (or decode_prompts)"),
    ):
        for key in () if read else keys:
            section, name = key.split(".")
            value = getattr(getattr(recipe, section), name)
            if value not in _defaults(section, name, version=head.version):
                raise EagleError(
                    f"{key} is {value!r}, but has an effect only with {reader}; set that, or leave {key} out of the recipe"
                )


def _defaults(section: str, name: str, *, version: str) -> tuple[Any, ...]:
    """The default, and what it stands for where it is null."""
    default = getattr({"head": HeadConfig, "train": TrainConfig}[section](), name)
    return (default, *([PUBLISHED[version][name]] if name in PUBLISHED[version] else []))
