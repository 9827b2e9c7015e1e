"""What recipes train for: published defaults by version, settings of one's own, refused ones."""

import dataclasses
from typing import Any

import pytest

from eagle.config import HeadConfig, Recipe, TargetConfig, TrainConfig
from eagle.errors import EagleError
from eagle.train.objective import Objective


def _of(version: Any = "eagle1", draft_vocab_size: int | None = None, **train: Any) -> Objective:
    head = HeadConfig(version=version, draft_vocab_size=draft_vocab_size)
    return Objective.of(Recipe(output_dir="x", target=TargetConfig(model="x"), head=head, train=TrainConfig(**train)))


def test_eagle1_is_one_step_of_both_losses() -> None:
    assert _of() == Objective(
        steps=1, decay=1.0, between="detach", regression_weight=1.0, classification_weight=0.1, noise=0.1
    )


def test_eagle3_is_seven_decaying_steps_of_the_classification() -> None:
    objective = _of("eagle3")
    assert objective == Objective(
        steps=7, decay=0.8, between="flow", regression_weight=0.0, classification_weight=1.0, noise=0.0
    )
    assert objective.step_weights == pytest.approx([1, 0.8, 0.64, 0.512, 0.4096, 0.32768, 0.262144])


def test_hass_is_eagle1_unrolled_with_equal_weights_and_the_top_k_term() -> None:
    objective = _of(unroll_steps=3, distill_weight=1.0)
    assert (objective.step_weights, objective.between, objective.distill_top_k) == ((1.0, 1.0, 1.0), "detach", 10)
    assert objective.total(2.0, 3.0, 5.0) == pytest.approx(2.0 + 0.3 + 5.0)


def test_settings_replace_defaults() -> None:
    objective = _of("eagle3", unroll_steps=2, unroll_weight=0.5, detach_between_steps=True, gradient_checkpointing=True)
    assert (objective.step_weights, objective.between, objective.checkpointing) == ((1.0, 0.5), "detach", "steps")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(unroll_steps=0), r"train\.unroll_steps is 0, expected 1 or more"),
        (dict(unroll_weight=1.5), r"train\.unroll_weight is 1\.5, expected .* at most 1"),
        (dict(distill_weight=-1.0), r"train\.distill_weight is -1\.0, expected 0 or more"),
        (dict(classification_weight=float("nan")), r"train\.classification_weight is nan"),
        (dict(distill_top_k=0), r"train\.distill_top_k is 0"),
        (dict(regression_weight=0.0, classification_weight=0.0), r"are all 0: nothing to learn"),
        (dict(version="eagle3", regression_weight=1.0), r"regression_weight is 1\.0, but an EAGLE-3 .* set it to 0"),
        (dict(draft_vocab_size=8, distill_weight=1.0), r"distill_top_k is 10, but the head drafts 8 tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        _of(**settings)


def test_every_open_setting_has_a_published_value() -> None:
    from eagle.train.objective import PUBLISHED

    open_settings = {field.name for field in dataclasses.fields(TrainConfig) if field.default is None}
    assert set(PUBLISHED["eagle1"]) == set(PUBLISHED["eagle3"]) <= open_settings
