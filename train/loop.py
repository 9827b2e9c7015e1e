"""Training a head: `train(recipe)`, the code behind `eagle train RECIPE` and `accelerate launch -m eagle.train`."""

import collections
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from eagle.config import Recipe, as_dict
from eagle.data.documents import spread
from eagle.data.online import TargetDocuments
from eagle.formats.checkpoint import load_head, save_head
from eagle.heads.eagle1 import DraftHead
from eagle.memory import release_free_memory
from eagle.plots.tau import write_tau
from eagle.progress import ProgressBar
from eagle.train import checkpoints, full_state, run, selection
from eagle.train.batches import steps
from eagle.train.metrics import validate
from eagle.train.selection import Selection
from eagle.train.setup import micro_batches, setup
from eagle.train.step import StepResult, Training, train_step
from eagle.train.trackers import Trackers

RELEASE_EVERY = 25
"""Optimiser steps between releases of freed memory, on CPUs."""


def train(recipe: Recipe, accelerator: Accelerator | None = None) -> Path:
    """Trains the recipe's head on its feature store, resuming the newest checkpoint, and returns the head's folder.

    Every process of a launch calls this. A finished head of the same recipe is left as it is. Raises EagleError: no
    store or nothing supervised in it, a setting that cannot be honoured, a checkpoint of another recipe, a loss or
    gradient that is not finite, a full disk.
    """
    with checkpoints.disk_full_is_an_error("what was saved is whole: make room and run the same command again"):
        return _train(recipe, accelerator or run.make_accelerator(recipe))


def _train(recipe: Recipe, accelerator: Accelerator) -> Path:
    disable_progress_bar()  # transformers' own, at every save_pretrained
    training = setup(recipe, accelerator)
    if training is None:
        return recipe.head_dir
    config, say = training.recipe.train, training.say
    chooser = _chooser(training)
    first, total = training.progress.step, training.total
    stopped_early = chooser is not None and selection.exhausted(training.progress, config)
    trackers = Trackers(training.recipe, accelerator, resumed_at=first)
    clock = time.monotonic()
    quiet = not accelerator.is_main_process
    with closing(trackers), ProgressBar("train", total=total, done=first, unit="steps", quiet=quiet) as bar:
        for batches in () if stopped_early else steps(micro_batches(training), workers=config.workers):
            result = train_step(training, batches)
            seconds = time.monotonic() - clock
            loss = result.loss_sum / max(1, result.supervised)
            bar.advance(1, note=f"loss {loss:.4f}, {result.tokens / seconds:,.0f} tokens/s")
            _record(training, trackers, result, seconds)
            decoding = chooser if chooser is not None and _due(training, selection.interval(config)) else None
            if decoding is not None or _due(training, config.eval_every):
                _validate(training, trackers)
            if decoding is not None:
                _decode(training, trackers, decoding)
                stopped_early = selection.exhausted(training.progress, config)
            if stopped_early or _due(training, config.save_every):
                _save(training)
            if stopped_early:
                break
            if accelerator.device.type == "cpu" and training.progress.step % RELEASE_EVERY == 0:
                release_free_memory()
            clock = time.monotonic()
    if stopped_early:
        say(
            f"train: stopped at step {training.progress.step} of {total}: {training.progress.without_gain} decodings "
            "without a higher tau (train.patience)"
        )
    _save_final(training, stopped_early=stopped_early)
    say(f"train: {recipe.head_dir} holds the head {_which(training)}{_summary(training.progress.validation)}")
    return recipe.head_dir


def _due(training: Training, every: int) -> bool:
    return training.progress.step % every == 0 or training.progress.step == training.total


def _record(training: Training, trackers: Trackers, result: StepResult, seconds: float) -> None:
    """Adds the step to the log window; every `log_every` steps the window becomes a line."""
    sums = {
        "loss": result.loss_sum,
        "regression": result.regression_sum,
        "classification": result.classification_sum,
        "distillation": result.distillation_sum,
        "supervised": result.supervised,
        "tokens": result.tokens,
        "seconds": seconds,
    }
    window = collections.Counter(training.progress.window)
    window.update(sums)
    training.progress.window = dict(window)
    if not _due(training, training.recipe.train.log_every):
        return
    count = max(1, window["supervised"])
    trackers.log(
        {
            **_place(training),
            "loss": window["loss"] / count,
            "regression": window["regression"] / count,
            "classification": window["classification"] / count,
            **({"distillation": window["distillation"] / count} if training.objective.distill_weight > 0 else {}),
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_second": window["tokens"] / window["seconds"],
            "supervised_tokens": int(window["supervised"]),
            "kernels": result.kernels,
            "time": time.time(),
        }
    )
    training.progress.window = {}


def _place(training: Training) -> dict[str, Any]:
    step = training.progress.step
    return {"step": step, "epoch": round(step / training.order.steps_per_epoch, 4)}


def _validate(training: Training, trackers: Trackers) -> None:
    config = training.recipe.train
    numbers = run.long_enough(training.source, "validation")
    documents = [numbers[place] for place in spread(len(numbers), config.eval_documents)]
    if not documents:
        return
    tally = validate(
        full_state.whole_head(training.accelerator, training.model),
        training.source,
        documents,
        tokens=training.tokens,
        objective=training.objective,
        depth=config.chain_depth,
        accelerator=training.accelerator,
        autocast=training.autocast(),
    )
    summary = tally.summary(training.objective)
    training.progress.validation = {**_place(training), **summary}
    trackers.log({**training.progress.validation, "time": time.time()})
    training.say(f"train: step {training.progress.step}{_summary(summary)}")


def _summary(validation: dict[str, Any]) -> str:
    if not validation:
        return " (no validation documents)"
    agreement = validation["val_top1_agreement"]
    return (
        f": validation loss {validation['val_loss']:.4f}, top-1 agreement {100 * (agreement or 0):.1f}%, "
        f"estimated tau of a {len(validation['val_agreement'])}-chain {validation['val_tau']:.2f}"
    )


def _chooser(training: Training) -> Selection | None:
    """What compares heads by decoding, with its target in memory; None: the recipe wants none."""
    recipe, accelerator, say = training.recipe, training.accelerator, training.say
    chooser = None
    if selection.interval(recipe.train):
        say(f"train: the target decodes held-out prompts every {selection.interval(recipe.train)} steps")
        target = training.source.target if isinstance(training.source, TargetDocuments) else None
        chooser = Selection(recipe, training.source, accelerator, target)
    if accelerator.is_main_process:
        selection.remove_others(recipe.train_dir, training.progress)
    accelerator.wait_for_everyone()
    measure = None if chooser is None else chooser.measure
    reason = selection.resume(recipe.train_dir, training.progress, measure=measure)
    if reason is not None:
        say(f"train: {reason}")
    return chooser


def _decode(training: Training, trackers: Trackers, chooser: Selection) -> None:
    """Measures the head's tau; keeps its weights where they are the best so far."""
    progress, recipe, accelerator = training.progress, training.recipe, training.accelerator
    decoded = chooser.decode(full_state.copied_head(accelerator, training.model))
    if selection.judge(progress, decoded, measure=chooser.measure):
        weights = full_state.full_weights(accelerator, training.model)
        if accelerator.is_main_process:
            head = full_state.bare(accelerator, training.model)
            selection.save_best(recipe.train_dir, head, progress, weights=weights)
    trackers.log(
        {
            **_place(training),
            "decoded_tau": decoded.tau,
            "decoded_tau_raw": decoded.length.raw,
            "estimated_tau": progress.validation.get("val_tau"),
            "decoded_verify_steps": decoded.length.steps,
            "decoded_tokens": decoded.tokens,
            "best_tau": progress.best["tau"],
            "best_step": progress.best["step"],
            "decode_seconds": decoded.seconds,
            "time": time.time(),
        }
    )
    if accelerator.is_main_process:
        write_tau(recipe.train_dir)
        best = "the best so far" if progress.best["step"] == progress.step else f"best {progress.best['tau']:.3f}"
        training.say(
            f"train: step {progress.step}: decoded tau {decoded.tau:.3f} over {chooser.count} prompts ({best})"
        )


def _save(training: Training) -> None:
    recipe, accelerator = training.recipe, training.accelerator
    checkpoints.save(
        recipe.train_dir,
        training.progress,
        accelerator,
        training.model,
        training.optimizer,
        keep=recipe.train.keep_checkpoints,
    )
    if accelerator.is_main_process:
        selection.remove_others(recipe.train_dir, training.progress)


def _keeps_best(training: Training) -> bool:
    return bool(training.progress.best) and training.recipe.train.keep == "best_tau"


def _which(training: Training) -> str:
    best = training.progress.best
    if _keeps_best(training):
        return f"of step {best['step']}, whose decoded tau of {best['tau']:.3f} is the highest of {training.progress.step} steps"
    return f"after {training.progress.step} steps"


def _save_final(training: Training, *, stopped_early: bool) -> None:
    accelerator, recipe, progress = training.accelerator, training.recipe, training.progress
    weights = full_state.full_weights(accelerator, training.model)
    if accelerator.is_main_process:
        record = {
            **_place(training),
            "head_step": progress.best["step"] if _keeps_best(training) else progress.step,
            "decoded": progress.best,
            "stopped_early": stopped_early,
            "metrics": progress.validation,
            "learnt_from": run.learnt_from(training.source, training.order.documents),
            "recipe": as_dict(recipe),
            "identity": progress.identity,
            "versions": run.versions(),
        }
        head: DraftHead = full_state.bare(accelerator, training.model)
        if _keeps_best(training):
            weights = load_head(selection.best_folder(recipe.train_dir, progress.best["step"])).state_dict()
        with checkpoints.disk_full_is_an_error(
            "the last checkpoint is whole: make room and run the same command again"
        ):
            save_head(head, recipe.head_dir, extra=record, weights=weights)
    accelerator.wait_for_everyone()
