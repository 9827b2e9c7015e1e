"""The weights that training begins with: another head's (head.init_from), the least-squares map, or random ones.

Of another head the decoder layer is taken as it is. The draft vocabulary is this recipe's own: an EAGLE-3 head's LM head rows go
with their tokens; a token that the other head did not draft starts as a new head's would (`fresh`). What was taken is tried on a
few documents before training. D, V: draft vocabulary, target vocabulary; H hidden.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from eagle.config import HeadConfig, Recipe
from eagle.data.documents import Documents
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead, EagleHead
from eagle.heads.eagle3 import Eagle3Head
from eagle.heads.vocabulary import DraftTokens
from eagle.train import run
from eagle.train.batches import Order
from eagle.train.least_squares import start_linear
from eagle.train.metrics import validate
from eagle.train.objective import Objective

DOCUMENTS = 8
"""Documents that a started head is tried on."""


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
    started = start_from(recipe.head, fresh, target_identity=source.target_identity)
    notes = list(started.notes)
    if recipe.train.warm_start_check != "off":
        numbers = run.long_enough(source, "validation") + run.training_documents(source, recipe.train)
        numbers = numbers[:DOCUMENTS]
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
        baseline = chance(source, numbers)
        check = recipe.train.warm_start_check
        notes.append(verdict(agreement, baseline, config=recipe.head, check=check))
    return started.head, f"starting from {recipe.head.init_from}: {'; '.join(notes) or 'nothing differs'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """A head with another's weights, and what to tell about it."""

    head: DraftHead
    notes: tuple[str, ...]
    """What differs, a sentence each."""


def start_from(config: HeadConfig, fresh: DraftHead, *, target_identity: Mapping[str, Any] | None) -> WarmStart:
    """The head config.init_from in the draft vocabulary of `fresh`, a new head of this recipe.

    Raises EagleError when it is of another version, width, layers or biases than the recipe asks for.
    """
    other = load_head(str(config.init_from)).float()
    _require_compatible(other, fresh, config)
    started_config = copy.deepcopy(other.config)
    started_config.vocab_size = fresh.config.vocab_size
    started_config.draft_vocab_size = fresh.config.draft_vocab_size
    started = type(other)(started_config).float()
    state, notes = fresh.state_dict(), list[str]()
    carried = {key: value for key, value in other.state_dict().items() if key not in ("d2t", "t2d", "lm_head.weight")}
    state = {**{key: state[key] for key in state.keys() & {"d2t", "t2d", "lm_head.weight"}}, **carried}
    theirs, ours = _token_ids(other), _token_ids(fresh)
    kept_D = torch.isin(ours, theirs)
    if not torch.equal(theirs, ours):
        notes.append(
            f"draft vocabulary: {int(kept_D.sum()):,} of {len(ours):,} tokens were among its {len(theirs):,}, "
            f"{int((~kept_D).sum()):,} are new"
        )
    if isinstance(other, Eagle3Head):
        order_D = theirs.argsort()
        rows = order_D[torch.searchsorted(theirs[order_D], ours[kept_D])]
        state["lm_head.weight"] = fresh.state_dict()["lm_head.weight"].clone()
        state["lm_head.weight"][kept_D] = other.lm_head.weight.detach()[rows]
    started.load_state_dict(state)
    started.config.draft_coverage = fresh.config.draft_coverage
    notes += _target_notes(other.config.target_identity, target_identity)
    return WarmStart(head=started, notes=tuple(notes))


def _token_ids(head: DraftHead) -> torch.Tensor:
    """int64 [D]: the target's ids that the head drafts."""
    vocabulary = head.vocabulary
    return torch.arange(head.config.vocab_size) if vocabulary is None else vocabulary.target_ids_D


def _require_compatible(other: DraftHead, fresh: DraftHead, config: HeadConfig) -> None:
    where = f"the head {config.init_from} (head.init_from)"
    if other.version != fresh.version:
        raise EagleError(
            f"head.version is {fresh.version}, but {where} is of {other.version}; give a head of that version, or set "
            f"head.version to {other.version}"
        )
    if other.config.hidden_size != fresh.config.hidden_size:
        raise EagleError(
            f"head.init_from {config.init_from} has hidden size {other.config.hidden_size}, the target's features have "
            f"{fresh.config.hidden_size}: it is a head for another target; give one of that width, or set head.init_from to null"
        )
    if isinstance(other, Eagle3Head) and isinstance(fresh, Eagle3Head):
        if other.config.aux_layers is None:
            other.config.aux_layers = list(fresh.aux_layers)
        if other.aux_layers != fresh.aux_layers:
            raise EagleError(
                f"head.aux_layers is {list(fresh.aux_layers)}, but {where} looks at {list(other.aux_layers)}; set "
                "head.aux_layers to that"
            )
    if isinstance(other, EagleHead) and isinstance(fresh, EagleHead) and other.config.fc_bias != fresh.config.fc_bias:
        raise EagleError(
            f"head.fc_bias is {fresh.config.fc_bias}, but {where} has fc_bias {other.config.fc_bias}; set head.fc_bias to "
            f"{other.config.fc_bias}"
        )


def _target_notes(recorded: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> Sequence[str]:
    if not recorded:
        return ["it does not say which target it was trained for"]
    fields: Sequence[str] = ("model", "architecture", "weights_sha256", "num_layers", "vocab_size")
    now = now or {}
    if recorded.get("weights_sha256") and recorded["weights_sha256"] == now.get("weights_sha256"):
        fields = fields[1:]  # under another name
    differing = [f for f in fields if f in recorded and f in now and recorded[f] != now[f]]
    if not differing:
        return []
    lines = ", ".join(f"{field} {_short(recorded[field])} there, {_short(now[field])} here" for field in differing)
    return [f"it was trained for another target: {lines}"]


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


# --- does it know anything ----------------------------------------------------------------------------------------


def chance(source: Documents, numbers: Sequence[int]) -> float:
    """The agreement of the best constant guess: the share of the likeliest token among the documents' supervised ones."""
    ids = [ids_T[2:][mask_T[2:]] for ids_T, mask_T in map(source.ids_and_mask, numbers)]
    counts = torch.bincount(torch.cat(ids)) if ids else torch.zeros(1)
    return float(counts.max() / counts.sum().clamp_min(1)) if counts.numel() else 0.0


def verdict(agreement: float | None, baseline: float, *, config: HeadConfig, check: str) -> str:
    """What to tell about a started head's agreement. Raises EagleError for one no better than chance when `check` is refuse.

    agreement: share of the supervised tokens at which its first guess is the target's choice (None: there were none).
    """
    if agreement is None:
        return "there was no supervised token to try it on"
    found = f"its first guess is the target's choice at {100 * agreement:.1f}% of the tokens it was tried on"
    against = f"always guessing the likeliest token gives {100 * baseline:.1f}%"
    if agreement > baseline:
        return f"{found} ({against})"
    if check == "refuse":
        raise EagleError(
            f"head.init_from {config.init_from}: {found}, expected more than chance ({against}): it was made for another "
            "target or other layers; give another head, set head.init_from to null, or train.warm_start_check to report"
        )
    return f"{found}, no better than chance ({against})"
