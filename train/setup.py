"""Everything before a training run's first step: `setup(recipe)` -> Training, at the newest checkpoint or at the beginning."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from eagle.config import HeadConfig, Recipe, TrainConfig, as_dict
from eagle.data.documents import Documents
from eagle.data.joined import JoinedStores
from eagle.data.online import open_documents
from eagle.data.store import FeatureStore
from eagle.errors import EagleError
from eagle.files import clear_leftovers, write_json
from eagle.heads.vocabulary import DraftTokens
from eagle.progress import console
from eagle.train import checkpoints, run, selection
from eagle.train.batches import Layout, MicroBatches, Order
from eagle.train.beginning import beginning
from eagle.train.draftable import Draftable
from eagle.train.full_state import HeadCall
from eagle.train.objective import PUBLISHED, Objective
from eagle.train.schedule import total_steps
from eagle.train.selection import interval
from eagle.train.step import Training
from eagle.train.store_check import check_store


def setup(recipe: Recipe, accelerator: Accelerator) -> Training | None:
    """Checks the recipe and its data, and makes the head, its optimiser and where they stand; None: the head is finished."""
    say = _say if accelerator.is_main_process else _silent
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
    if run.finished(recipe, identity, total):
        say(f"train: {recipe.head_dir} is complete ({total} steps)")
        return None
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
    if training.progress.step:
        say(f"train: resuming at step {training.progress.step} of {total}")
    return training


def micro_batches(training: Training) -> MicroBatches:
    """What is learnt from, from the step where the run stands on."""
    config = training.recipe.train
    return MicroBatches(
        training.source,
        training.order,
        layout=Layout(
            noise=training.objective.noise, packing=config.packing, max_tokens_per_row=config.max_tokens_per_row
        ),
        start=training.progress.step,
        end=training.total,
        micro_steps=config.gradient_accumulation,
        process=training.accelerator.process_index,
        processes=training.accelerator.num_processes,
    )


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
        run.require_same_run(progress.identity, identity, where=str(checkpoint))
        run.require_not_past(progress.step, total, str(checkpoint))
        progress.identity = identity
        head = checkpoints.load_weights(checkpoint)
        draft_tokens = DraftTokens(draft_tokens.full, head.vocabulary)  # whatever would be chosen today
    if accelerator.is_main_process:
        _say(f"train: {checkpoints.require_disk(recipe.train_dir, head, keep=config.keep_checkpoints)}")
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
        say=_say if accelerator.is_main_process else _silent,
    )


def _stores(source: Documents) -> tuple[FeatureStore, ...]:
    """The stores on disk that the documents are read from; (): none."""
    if isinstance(source, JoinedStores):
        return source.stores
    return (source,) if isinstance(source, FeatureStore) else ()


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


def _say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _silent(text: str) -> None:
    pass
