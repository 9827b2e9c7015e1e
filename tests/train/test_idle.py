"""Settings that nothing reads are refused, those at their defaults and those that are read are not."""

from typing import Any

import pytest

from eagle.config import HeadConfig, Recipe, TargetConfig, TrainConfig
from eagle.errors import EagleError
from eagle.train.objective import Objective
from eagle.train.setup import refuse_idle_settings


def _check(head: dict[str, Any], train: dict[str, Any]) -> None:
    recipe = Recipe(output_dir="x", target=TargetConfig(model="x"), head=HeadConfig(**head), train=TrainConfig(**train))
    refuse_idle_settings(recipe, Objective.of(recipe))


CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # key, the head's and training's settings that leave it idle, what must be added so that it is read
    ("head.lm_head_init", {"lm_head_init": "random"}, {}, {"version": "eagle3"}, {}),
    ("train.warm_start_check", {}, {"warm_start_check": "off"}, {"init_from": "x"}, {}),
    ("train.unroll_weight", {}, {"unroll_weight": 0.5}, {}, {"unroll_steps": 2}),
    ("train.detach_between_steps", {}, {"detach_between_steps": False}, {}, {"unroll_steps": 2}),
    ("train.distill_top_k", {}, {"distill_top_k": 5}, {}, {"distill_weight": 1.0}),
    ("train.max_tokens_per_row", {}, {"max_tokens_per_row": 99}, {}, {"packing": "documents"}),
    ("train.decode_count", {}, {"decode_count": 3}, {}, {"decode_every": 5}),
    ("train.decode_tokens", {}, {"decode_tokens": 3}, {}, {"decode_prompts": ("x",)}),
]


@pytest.mark.parametrize(("key", "head", "train", "more_head", "more_train"), CASES, ids=[case[0] for case in CASES])
def test_a_setting_is_refused_where_nothing_reads_it(
    key: str, head: dict[str, Any], train: dict[str, Any], more_head: dict[str, Any], more_train: dict[str, Any]
) -> None:
    with pytest.raises(EagleError, match=rf"{key} is .*, but has an effect only with .*leave {key} out"):
        _check(head, train)

    _check({**head, **more_head}, {**train, **more_train})


def test_defaults_and_what_they_stand_for_are_not_refused() -> None:
    _check({}, {})
    _check({"version": "eagle3"}, {})
    _check({}, {"unroll_weight": 1.0, "detach_between_steps": True, "unroll_steps": 1})
