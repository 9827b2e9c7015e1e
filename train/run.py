"""What a training run starts from: checked settings, the store, the head with its initial weights, and its identity."""

import dataclasses
import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration

from eagle import launch
from eagle.config import Recipe, TrainConfig, as_dict
from eagle.data.devices import choose_gpu
from eagle.data.documents import Documents, leaked
from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig, aux_layers_of
from eagle.heads.vocabulary import DraftVocabulary
from eagle.kernels.dispatch import missing
from eagle.target.loading import eos_token_ids, load_config
from eagle.target.token_layers import TokenLayers
from eagle.train.batches import SHORTEST, Order, seeded_generator
from eagle.train.full_state import is_spread
from eagle.train_config import GLOBAL_BATCH

# Keys of a recipe's `train` section that a resumed run may change: they touch no weight. (batch_size and
# gradient_accumulation count as their product with the number of processes, epochs and max_steps as the total.)
FREE = {
    *("log_every", "save_every", "keep_checkpoints", "eval_every", "eval_documents", "chain_depth"),
    *("trackers", "project", "workers", "batch_size", "gradient_accumulation", "epochs", "max_steps"),
    *("packing", "max_tokens_per_row"),
    *("decode_every", "decode_prompts", "decode_count", "decode_tokens", "keep", "patience"),
    *("warm_start_check", "verify_store", "gradient_checkpointing", "kernels"),
}
FEATURES = "features (their target and data)"
"""Under this name a run's identity holds the fingerprint of its documents."""
DATA_FRACTION_STREAM = 2**31
"""Sets the generator that chooses documents apart from those of the epochs' orders, which are numbered from 0."""


def check_settings(config: TrainConfig, accelerator: Accelerator) -> None:
    """Raises EagleError for a number out of its range or a setting that this launch cannot honour."""
    positive = ("epochs", "batch_size", "gradient_accumulation", "lr", "eval_every", "eval_documents", "chain_depth")
    for name in (*positive, "save_every", "keep_checkpoints", "log_every", "clip_threshold"):
        if not getattr(config, name) > 0 or not math.isfinite(getattr(config, name)):
            raise EagleError(f"train.{name} is {getattr(config, name)}, expected a number above 0")
    if config.max_steps is not None and config.max_steps <= 0:
        raise EagleError(f"train.max_steps is {config.max_steps}, expected a number above 0, or null for no limit")
    for name in ("warmup_steps", "weight_decay", "workers", "seed"):
        if not 0 <= getattr(config, name) < math.inf:
            raise EagleError(f"train.{name} is {getattr(config, name)}, expected 0 or more")
    if not 0 < config.data_fraction <= 1:
        raise EagleError(f"train.data_fraction is {config.data_fraction}, expected a share above 0, up to 1")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise EagleError(f"train.betas is {list(config.betas)}, expected two numbers from 0 to below 1")
    if config.max_tokens_per_row < 1:
        raise EagleError(f"train.max_tokens_per_row is {config.max_tokens_per_row}, expected a number above 0")
    if config.features == "online" and config.workers > 0:
        raise EagleError(
            f"train.workers is {config.workers}, but train.features is online: the target computes features in the training "
            "process itself; set train.workers to 0"
        )
    reason = missing(accelerator.device) if config.kernels == "triton" else None
    if reason is not None:
        raise EagleError(f"train.kernels is triton, which cannot run: {reason}; set it to auto or reference")
    launch.check_world(accelerator)
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise EagleError(
            "this launch uses FSDP version 1, which is not supported; set fsdp_version: 2 in accelerate's file"
        )
    if config.clip == "value" and accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise EagleError(
            f"train.clip is value, but {accelerator.distributed_type.value} cannot clip gradients by value; "
            "set train.clip to norm (or none)"
        )


def check_strategy(recipe: Recipe, accelerator: Accelerator) -> None:
    """Raises EagleError for a head that this launch's strategy cannot train.

    ZeRO-3 has a layer's weights in memory within that layer's own backward alone; an EAGLE-3 head's `lm_head` takes its
    gradients in the forward, a chunk of positions at a time (eagle/train/loss.py).
    """
    if recipe.head.version != "eagle3" or accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    if is_spread(accelerator):
        raise EagleError(
            "head.version is eagle3 and this launch uses DeepSpeed ZeRO stage 3, which cannot train a head with an LM head of "
            "its own; launch with FSDP (its weights are spread as well) or ZeRO stage 2"
        )


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The accelerator of this process, as `accelerate launch`, torchrun or a plain start has set it up.

    Mixed precision stays off in it: the loop has its own autocast, so that one place decides the precision. Raises EagleError
    when target.device names a GPU that is not there, or one for several processes.
    """
    choose_gpu(recipe.target)
    return launch.make_accelerator(
        cpu=True if recipe.target.device == "cpu" and torch.cuda.is_available() else None,
        mixed_precision="no",
        gradient_accumulation_steps=recipe.train.gradient_accumulation,
        log_with=list(recipe.train.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(recipe.train_dir), logging_dir=str(recipe.train_dir)),
    )


def with_precision(recipe: Recipe, accelerator: Accelerator) -> Recipe:
    """The recipe with train.precision decided: "auto" becomes what the device at hand is fast in."""
    if recipe.train.precision != "auto":
        return recipe
    device = accelerator.device
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, precision="bf16" if fast else "fp32"))


def autocast(config: TrainConfig, accelerator: Accelerator) -> torch.autocast:
    """bfloat16 for matrix products where train.precision says so; the weights stay float32."""
    return torch.autocast(accelerator.device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16")


def training_order(source: Documents, recipe: Recipe, *, processes: int) -> Order:
    """The order of the documents. Raises EagleError when the store has nothing to learn from."""
    documents = training_documents(source, recipe.train)
    if not documents:
        raise EagleError(
            f"{source.name} has no training document of {SHORTEST} tokens or more "
            f"({len(source)} documents in all); check data.sources with `eagle data inspect RECIPE`"
        )
    if not any(bool(source.ids_and_mask(number)[1][2:].any()) for number in documents):
        raise EagleError(
            f"none of the {len(documents)} training documents of {source.name} has a supervised (assistant) token; "
            "check the loss mask with `eagle data inspect RECIPE`"
        )
    return Order(
        documents=tuple(documents),
        lengths=tuple(int(source.lengths[number]) for number in documents),
        global_batch=recipe.train.batch_size * recipe.train.gradient_accumulation * processes,
        seed=recipe.train.seed,
        packing=recipe.train.packing,
    )


def training_documents(source: Documents, config: TrainConfig) -> list[int]:
    """The train.data_fraction of the training documents, ascending; at least one where there is any."""
    documents = long_enough(source, "train")
    if config.data_fraction == 1.0:
        return documents
    order = torch.randperm(len(documents), generator=seeded_generator(config.seed, DATA_FRACTION_STREAM)).tolist()
    count = max(1, round(config.data_fraction * len(documents)))
    return sorted(documents[place] for place in order[:count])


def leak_note(source: Documents, order: Order) -> str | None:
    """What to say where held-out documents ask what is trained on; a run's sides are never changed under way."""
    held_out = long_enough(source, "validation")
    count = leaked(source, trained_on=order.documents, held_out=held_out)
    if not count:
        return None
    return (
        f"{count:,} of {len(held_out):,} validation documents have the prompt of a training document, so validation flatters "
        "the head; to start over without, delete the data/ folder and run `eagle data prepare RECIPE` (which splits by prompt) "
        "and `eagle features RECIPE`"
    )


def learnt_from(source: Documents, documents: Sequence[int]) -> dict[str, int]:
    """{"documents", "tokens", "supervised_tokens"} of these documents: what the head's record says of its data."""
    supervised = sum(int(source.ids_and_mask(number)[1].sum()) for number in documents)
    tokens = int(source.lengths[list(documents)].sum())
    return {"documents": len(documents), "tokens": tokens, "supervised_tokens": supervised}


def long_enough(source: Documents, split: str) -> list[int]:
    """The split's documents that have at least one index to train on."""
    return [number for number in source.split(split) if source.lengths[number] >= SHORTEST]


def build_head(
    recipe: Recipe,
    *,
    hidden_size: int,
    vocabulary: DraftVocabulary | None = None,
    tokens: TokenLayers | None = None,
) -> DraftHead:
    """A new head in float32: random weights, a function of train.seed alone. head.init_from is not read here
    (eagle/train/warm_start.py).

    vocabulary: its reduced draft vocabulary. tokens: where an EAGLE-3 head's LM head starts when head.lm_head_init is
    target. Raises EagleError when the target is not as wide as the store's features, or layers do not fit it.
    """
    head = _new_head(recipe, hidden_size, draft_vocab_size=None if vocabulary is None else vocabulary.size)
    if vocabulary is not None:
        head.set_vocabulary(vocabulary)
    if isinstance(head, Eagle3Head) and recipe.head.lm_head_init == "target":
        assert tokens is not None, "the target's LM head is needed"
        head.copy_lm_head(tokens)
    return head


def _new_head(recipe: Recipe, hidden_size: int, *, draft_vocab_size: int | None) -> DraftHead:
    target = load_config(recipe.target)
    target_size = int(getattr(target, "hidden_size", hidden_size))
    if target_size != hidden_size:
        raise EagleError(
            f"the feature store has features of size {hidden_size}, but {recipe.target.model} has hidden size "
            f"{target_size}: it is another target's; set target.model back, or choose another output_dir"
        )
    aux_layers = aux_layers_of(recipe.head, int(target.num_hidden_layers))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        if recipe.head.version == "eagle3":
            if recipe.head.fc_bias:
                raise EagleError("head.fc_bias is true, but an EAGLE-3 head's fc has no bias; set it to false")
            of_three = Eagle3HeadConfig.for_target(target, aux_layers=aux_layers, draft_vocab_size=draft_vocab_size)
            return Eagle3Head(of_three).float()
        config = EagleHeadConfig.for_target(target, fc_bias=recipe.head.fc_bias, draft_vocab_size=draft_vocab_size)
        return EagleHead(config).float()


def draft_vocabulary(recipe: Recipe, source: Documents) -> DraftVocabulary | None:
    """A new head's draft vocabulary: the head.draft_vocab_size most frequent tokens of the training documents' supervised
    positions, the target's EOS ids always among them. None: all tokens."""
    wanted = recipe.head.draft_vocab_size
    if wanted is None:
        return None
    size = source.token_layers().vocab_size
    if wanted == size:
        return None
    counts_V = torch.zeros(size, dtype=torch.int64)
    for number in training_documents(source, recipe.train):
        ids_T, mask_T = source.ids_and_mask(number)
        counts_V += torch.bincount(ids_T[mask_T], minlength=size)
    return DraftVocabulary.most_frequent(counts_V, wanted, always=eos_token_ids(recipe.target))


def run_identity(recipe: Recipe, *, fingerprint: str, order: Order, total: int) -> dict[str, Any]:
    """What a run may not change when it resumes: flat, by recipe key where there is one."""
    train = {key: value for key, value in as_dict(recipe.train).items() if key not in FREE}
    if recipe.train.schedule != "constant":
        train["epochs/max_steps (total steps, which shape the schedule)"] = total
    return {
        **{f"head.{key}": value for key, value in as_dict(recipe.head).items()},
        **{f"train.{key}": value for key, value in train.items()},
        GLOBAL_BATCH: order.global_batch,
        FEATURES: fingerprint,
    }


def require_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> None:
    """Raises EagleError naming each key that differs from the run that wrote `where`."""
    differing = [key for key in {**now, **saved} if saved.get(key) != now.get(key)]
    if differing:
        lines = "; ".join(f"{key} was {saved.get(key)!r}, is {now.get(key)!r}" for key in differing)
        raise EagleError(
            f"{where} is of a run with another recipe: {lines}; set it back to resume, choose another output_dir, "
            "or delete the train/ and head/ folders to start over"
        )


def finished(recipe: Recipe, identity: dict[str, Any], total: int) -> bool:
    """Whether the head folder holds this recipe's head already. Raises EagleError when it holds another's.

    A run that train.patience ended is finished as long as train.patience stays what it was.
    """
    record = recipe.head_dir / "training.json"
    if not record.is_file():
        return False
    try:
        values = json.loads(record.read_text(encoding="utf-8"))
        saved, step, before = values["identity"], values["step"], values["recipe"]["train"]
    except (ValueError, KeyError, TypeError) as error:
        raise EagleError(f"{record} is not a training record ({error!r}); delete {recipe.head_dir}") from error
    require_same_run(saved, identity, where=str(recipe.head_dir))
    require_not_past(step, total, str(recipe.head_dir))
    config = recipe.train
    stopped = bool(values.get("stopped_early")) and before.get("patience") == config.patience
    return bool(step == total or stopped) and before.get("keep", config.keep) == config.keep


def require_not_past(step: int, total: int, where: str) -> None:
    """Raises EagleError when a run has gone further than the recipe asks."""
    if step > total:
        raise EagleError(
            f"{where} is at step {step}, but the recipe ends at step {total}; raise train.max_steps (or train.epochs), "
            "choose another output_dir, or delete the train/ and head/ folders to start over"
        )


def versions() -> dict[str, str]:
    """The library versions that a head's record keeps."""
    names: Sequence[str] = ("eagle-draft-toolkit", "torch", "transformers", "accelerate", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def configure_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Gives DeepSpeed what it would otherwise take from a data loader or its own config file."""
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = config.batch_size
    settings["gradient_accumulation_steps"] = config.gradient_accumulation
    settings["train_batch_size"] = config.batch_size * config.gradient_accumulation * accelerator.num_processes
    settings["gradient_clipping"] = config.clip_threshold if config.clip == "norm" else 0.0
    settings["torch_autocast"] = {
        "enabled": config.precision == "bf16",
        "dtype": "bfloat16",
        # No module: else DeepSpeed reduces the gradients of linear layers (all of a head's) in bfloat16.
        "lower_precision_safe_modules": [],
    }
