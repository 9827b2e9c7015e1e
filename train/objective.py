"""What a head is trained for: the unroll's steps and the losses' weights, as published for its version unless said."""

from dataclasses import dataclass
from typing import Any

from eagle.config import Recipe
from eagle.errors import EagleError
from eagle.kernels.draft_loss.op import MOST_TOP
from eagle.train.divergences import DIVERGENCES, Divergence
from eagle.train.unroll import Between, Checkpointing

# EAGLE-1: arXiv 2401.15077, section 4.2. EAGLE-3: its reference's training (7 steps of training-time test, 0.8^k, no
# regression: arXiv 2503.01840, section 3.1). HASS is EAGLE-1's with 3 steps and the top-k term (arXiv 2408.15766, section 4.1).
PUBLISHED: dict[str, dict[str, Any]] = {
    "eagle1": {
        "unroll_steps": 1,
        "unroll_weight": 1.0,
        "detach_between_steps": True,
        "regression_weight": 1.0,
        "classification_weight": 0.1,
        "noise": 0.1,
    },
    "eagle3": {
        "unroll_steps": 7,
        "unroll_weight": 0.8,
        "detach_between_steps": False,
        "regression_weight": 0.0,
        "classification_weight": 1.0,
        "noise": 0.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A recipe's training losses, with nothing left open."""

    steps: int = 1
    """K: unroll steps."""
    decay: float = 1.0
    """Step k counts decay^k."""
    between: Between = "detach"
    regression_weight: float = 1.0
    classification_weight: float = 0.1
    divergence: str = "soft_ce"
    """What the classification is: a name of DIVERGENCES."""
    distill_top_k: int = 10
    distill_weight: float = 0.0
    checkpointing: Checkpointing = "none"
    noise: float = 0.0

    @property
    def step_weights(self) -> tuple[float, ...]:
        return tuple(self.decay**step for step in range(self.steps))

    @property
    def classify(self) -> Divergence:
        return DIVERGENCES[self.divergence]

    @property
    def no_kernel(self) -> str | None:
        """Why the kernel draft_loss does not compute this; None when it does."""
        if self.divergence != "soft_ce":
            return f"train.divergence is {self.divergence}, which has no kernel (soft_ce has)"
        if self.distill_weight > 0 and self.distill_top_k > MOST_TOP:
            return f"train.distill_top_k is {self.distill_top_k}, the kernel takes {MOST_TOP} at most"
        return None

    def total(self, regression: float, classification: float, distillation: float = 0.0) -> float:
        """The weighted loss of sums or means."""
        return (
            self.regression_weight * regression
            + self.classification_weight * classification
            + self.distill_weight * distillation
        )

    @classmethod
    def of(cls, recipe: Recipe) -> "Objective":
        """The recipe's, nulls filled in for its head's version. Raises EagleError for what cannot be trained."""
        train, version = recipe.train, recipe.head.version
        values = {
            name: default if getattr(train, name) is None else getattr(train, name)
            for name, default in PUBLISHED[version].items()
        }
        objective = cls(
            steps=values["unroll_steps"],
            decay=values["unroll_weight"],
            between="detach" if values["detach_between_steps"] else "flow",
            regression_weight=values["regression_weight"],
            classification_weight=values["classification_weight"],
            divergence=train.divergence,
            distill_top_k=train.distill_top_k,
            distill_weight=train.distill_weight,
            checkpointing="steps" if train.gradient_checkpointing else "none",
            noise=values["noise"],
        )
        _check(objective, recipe)
        return objective


def _check(objective: Objective, recipe: Recipe) -> None:
    for key, value in {"unroll_steps": objective.steps, "distill_top_k": objective.distill_top_k}.items():
        if value < 1:
            raise EagleError(f"train.{key} is {value}, expected 1 or more")
    if not 0 < objective.decay <= 1:
        raise EagleError(f"train.unroll_weight is {objective.decay}, expected a number above 0 and at most 1")
    for key in ("regression_weight", "classification_weight", "distill_weight", "noise"):
        if not 0 <= getattr(objective, key) < float("inf"):
            raise EagleError(f"train.{key} is {getattr(objective, key)}, expected 0 or more")
    if recipe.head.version == "eagle3" and objective.regression_weight > 0:
        raise EagleError(
            f"train.regression_weight is {objective.regression_weight}, but an EAGLE-3 head's predictions are not the target's "
            "features: there is nothing to compare them with; set it to 0 or leave it out"
        )
    if recipe.train.kernels == "triton" and objective.no_kernel is not None:
        raise EagleError(f"train.kernels is triton, but {objective.no_kernel}; set train.kernels to auto or reference")
    if objective.total(1.0, 1.0, 1.0) == 0:
        raise EagleError(
            "train.regression_weight, train.classification_weight and train.distill_weight are all 0: nothing to learn"
        )
    size = recipe.head.draft_vocab_size
    if objective.distill_weight > 0 and size is not None and objective.distill_top_k > size:
        raise EagleError(
            f"train.distill_top_k is {objective.distill_top_k}, but the head drafts {size} tokens (head.draft_vocab_size); "
            "lower it"
        )
