"""The weights that training begins with: another head's, the least-squares map, or random ones."""

from accelerate import Accelerator

from eagle.config import Recipe
from eagle.data.documents import Documents
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.train import run, warm_start
from eagle.train.batches import Order
from eagle.train.least_squares import start_linear
from eagle.train.metrics import validate
from eagle.train.objective import Objective


def beginning(
    fresh: DraftHead,
    recipe: Recipe,
    accelerator: Accelerator,
    source: Documents,
    order: Order,
    *,
    tokens: DraftTokens,
    objective: Objective,
) -> tuple[DraftHead, str]:
    """The head to begin with and what to tell about it. fresh: a new head of the recipe, with random weights.

    Every process calls this and gets the same weights. Raises EagleError when head.init_from does not fit.
    """
    if recipe.head.init_from is not None:
        return _warm_started(fresh, recipe, accelerator, source, tokens=tokens, objective=objective)
    if recipe.head.fc_init == "random":
        return fresh, ""
    fresh.to(accelerator.device)
    fit = start_linear(fresh, source, order, tokens=tokens.full, accelerator=accelerator)
    if fit is None:
        return fresh, "fc starts random: there are too few supervised positions to solve for it"
    return fresh, f"fc starts as the {fit}"


def _warm_started(
    fresh: DraftHead,
    recipe: Recipe,
    accelerator: Accelerator,
    source: Documents,
    *,
    tokens: DraftTokens,
    objective: Objective,
) -> tuple[DraftHead, str]:
    """The head with head.init_from's weights, tried on a few documents."""
    started = warm_start.start_from(recipe.head, fresh, target_identity=source.target_identity)
    notes = list(started.notes)
    if recipe.train.warm_start_check != "off":
        numbers = run.long_enough(source, "validation") + run.training_documents(source, recipe.train)
        numbers = numbers[: warm_start.DOCUMENTS]
        tally = validate(
            started.head.to(accelerator.device),
            source,
            numbers,
            tokens=tokens,
            objective=objective,
            depth=1,
            accelerator=accelerator,
            autocast=run.autocast(recipe.train, accelerator),
        )
        attempts, agreed = float(tally.attempts_K[0]), float(tally.agreed_K[0])
        agreement = agreed / attempts if attempts else None
        baseline = warm_start.chance(source, numbers)
        check = recipe.train.warm_start_check
        notes.append(warm_start.verdict(agreement, baseline, config=recipe.head, check=check))
    return started.head, f"starting from {recipe.head.init_from}: {'; '.join(notes) or 'nothing differs'}"
