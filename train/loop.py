"""Training a head: `train(recipe)`, the code behind `eagle train RECIPE` and `accelerate launch -m eagle.train`."""

import collections
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.utils.logging import disable_progress_bar

from eagle.config import Recipe, as_dict
from eagle.data.documents import Documents, spread
from eagle.data.joined import JoinedStores
from eagle.data.online import TargetDocuments, open_documents
from eagle.data.store import FeatureStore
from eagle.files import clear_leftovers, write_json
from eagle.formats.checkpoint import load_head, save_head
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.memory import release_free_memory
from eagle.plots.tau import write_tau
from eagle.progress import ProgressBar, console
from eagle.train import checkpoints, full_state, run, selection
from eagle.train.batches import Layout, MicroBatches, Order, steps
from eagle.train.beginning import beginning
from eagle.train.draftable import Draftable
from eagle.train.estimate import require_disk
from eagle.train.head_call import HeadCall
from eagle.train.idle import refuse_idle_settings
from eagle.train.metrics import validate
from eagle.train.objective import Objective
from eagle.train.schedule import total_steps
from eagle.train.selection import Selection
from eagle.train.step import StepResult, Training, train_step
from eagle.train.store_check import check_store
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
    recipe = run.with_precision(recipe, accelerator)
    run.check_settings(recipe.train, accelerator)
    selection.check_settings(recipe)
    run.check_strategy(recipe, accelerator)
    objective = Objective.of(recipe)
    refuse_idle_settings(recipe, objective)
    if accelerator.is_main_process:
        checkpoints.remove_leftovers(recipe.train_dir)
        clear_leftovers(recipe.head_dir.parent, recipe.head_dir.name)
    accelerator.wait_for_everyone()
    source = open_documents(recipe, accelerator)
    order = run.training_order(source, recipe, processes=accelerator.num_processes)
    total = total_steps(recipe.train, order.steps_per_epoch)
    identity = run.run_identity(recipe, fingerprint=source.fingerprint(), order=order, total=total)
    say = _say if accelerator.is_main_process else _silent
    if run.finished(recipe, identity, total, former=source.fingerprint(with_name=True)):
        say(f"train: {recipe.head_dir} is complete ({total} steps)")
        return recipe.head_dir
    if 0 < total <= recipe.train.warmup_steps:
        say(
            f"train: warm-up takes {recipe.train.warmup_steps} steps, the whole run {total}: the learning rate never "
            "reaches train.lr; lower train.warmup_steps"
        )
    if recipe.train.precision == "bf16" and accelerator.device.type == "cpu":
        say("train: bf16 is several times slower than fp32 on most CPUs; train.precision fp32 may be what you want")

    if accelerator.is_main_process and (note := run.leak_note(source, order)):
        say(f"train: {note}")
    for store in _stores(source):
        check_store(store, accelerator, when=recipe.train.verify_store)
    training = _start(recipe, accelerator, source, order, total, identity, objective)
    first = training.progress.step
    if first:
        say(f"train: resuming at step {first} of {total}")
    chooser = _chooser(training, say)
    trackers = Trackers(recipe, accelerator, resumed_at=first)
    micro_batches = MicroBatches(
        training.source,
        order,
        layout=Layout(
            noise=objective.noise,
            packing=recipe.train.packing,
            max_tokens_per_row=recipe.train.max_tokens_per_row,
        ),
        start=first,
        end=total,
        micro_steps=recipe.train.gradient_accumulation,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
    quiet = not accelerator.is_main_process
    stopped_early = chooser is not None and selection.exhausted(training.progress, recipe.train)
    clock = time.monotonic()
    with closing(trackers), ProgressBar("train", total=total, done=first, unit="steps", quiet=quiet) as bar:
        for batches in () if stopped_early else steps(micro_batches, workers=recipe.train.workers):
            result = train_step(training, batches)
            seconds = time.monotonic() - clock
            loss = result.loss_sum / max(1, result.supervised)
            bar.advance(1, note=f"loss {loss:.4f}, {result.tokens / seconds:,.0f} tokens/s")
            _record(training, trackers, result, seconds)
            decoding = chooser if chooser is not None and _due(training, selection.interval(recipe.train)) else None
            if decoding is not None or _due(training, recipe.train.eval_every):
                _validate(training, trackers)
            if decoding is not None:
                _decode(training, trackers, decoding)
                stopped_early = selection.exhausted(training.progress, recipe.train)
            if stopped_early or _due(training, recipe.train.save_every):
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


def _stores(source: Documents) -> tuple[FeatureStore, ...]:
    """The stores on disk that the documents are read from; (): none."""
    if isinstance(source, JoinedStores):
        return source.stores
    return (source,) if isinstance(source, FeatureStore) else ()


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _silent(text: str) -> None:
    pass


def _start(
    recipe: Recipe,
    accelerator: Accelerator,
    source: Documents,
    order: Order,
    total: int,
    identity: dict[str, Any],
    objective: Objective,
) -> Training:
    """The head, its optimiser and where they stand: at the newest checkpoint, or at the initial weights."""
    config = recipe.train
    tokens = source.token_layers()
    chosen = run.draft_vocabulary(recipe, source)
    head = run.build_head(recipe, hidden_size=tokens.hidden_size, vocabulary=chosen, tokens=tokens)
    vocabulary = head.vocabulary
    source = source.for_layers(head.aux_layers)
    checkpoint = checkpoints.newest(recipe.train_dir)
    # In fp32 the target's logits are computed in float32 whatever its weights' dtype; under autocast in bfloat16.
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    draft_tokens = DraftTokens(tokens.to(accelerator.device, dtype), vocabulary)
    if checkpoint is None:
        head, notes = beginning(head, recipe, accelerator, source, order, tokens=draft_tokens, objective=objective)
        if notes and accelerator.is_main_process:
            _say(f"train: {notes}")
    progress = checkpoints.Progress(identity=identity)
    if checkpoint is not None:
        progress = checkpoints.read_progress(checkpoint)
        former = source.fingerprint(with_name=True)
        run.require_same_run(progress.identity, identity, where=str(checkpoint), former=former)
        run.require_not_past(progress.step, total, str(checkpoint))
        progress.identity = identity
        head = checkpoints.load_weights(checkpoint)
        draft_tokens = DraftTokens(draft_tokens.full, head.vocabulary)  # whatever would be chosen today
    if accelerator.is_main_process:
        _say(f"train: {require_disk(recipe.train_dir, head, keep=config.keep_checkpoints)}")
        write_json(recipe.train_dir / "recipe.json", as_dict(recipe))
    head.config.target_identity = source.target_identity
    head.requires_grad_(True).train()
    accelerator.gradient_accumulation_steps = config.gradient_accumulation
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        run.configure_deepspeed(accelerator, config)
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    model, optimizer = accelerator.prepare(HeadCall(head), optimizer)
    if checkpoint is not None:
        checkpoints.load_optimizer(checkpoint, accelerator, model, optimizer)
    return Training(
        recipe=recipe,
        accelerator=accelerator,
        source=source,
        objective=objective,
        tokens=draft_tokens,
        # A target in memory computes features whose last bits depend on the batch.
        draftable=Draftable(draft_tokens, memory="documents" if _stores(source) else "nothing"),
        order=order,
        total=total,
        model=model,
        optimizer=optimizer,
        progress=progress,
    )


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
    if training.accelerator.is_main_process:
        _say(f"train: step {training.progress.step}{_summary(summary)}")


def _summary(validation: dict[str, Any]) -> str:
    if not validation:
        return " (no validation documents)"
    agreement = validation["val_top1_agreement"]
    return (
        f": validation loss {validation['val_loss']:.4f}, top-1 agreement {100 * (agreement or 0):.1f}%, "
        f"estimated tau of a {len(validation['val_agreement'])}-chain {validation['val_tau']:.2f}"
    )


def _chooser(training: Training, say: Callable[[str], None]) -> Selection | None:
    """What compares heads by decoding, with its target in memory; None: the recipe wants none."""
    recipe, accelerator = training.recipe, training.accelerator
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
        _say(f"train: step {progress.step}: decoded tau {decoded.tau:.3f} over {chooser.count} prompts ({best})")


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
