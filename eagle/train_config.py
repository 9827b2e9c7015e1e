"""The `train` section of a recipe (eagle/config.py)."""

import dataclasses
from typing import Literal

GLOBAL_BATCH = "train.batch_size x train.gradient_accumulation x processes"
"""Under this name a run's identity holds the documents of an optimiser step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop. Defaults: the EAGLE-1 recipe (arXiv 2401.15077, section 4.2 and the reference code)."""

    epochs: int = 20
    """Passes over the training documents."""
    max_steps: int | None = None
    """Optimiser steps to end at, when earlier than the epochs."""
    data_fraction: float = 1.0
    """Share of the training documents to learn from, (0, 1]: a choice by train.seed, smaller shares within larger ones. One
    store so gives a curve of tau by data size."""
    features: Literal["store", "online"] = "store"
    """Where the target's features come from: store: what `eagle features` wrote; online: the target itself, in memory, runs
    over each micro-step's documents (no disk needed; every epoch computes them again)."""
    batch_size: int = 4
    """Documents per process and micro-step."""
    packing: Literal["none", "documents"] = "none"
    """none: a document a row. documents: rows are filled with the micro-step's documents, which do not see each other: the
    same gradients with less padding; raise batch_size with it."""
    max_tokens_per_row: int = 2048
    """Packing's longest row, in tokens; a longer document has a row of its own."""
    gradient_accumulation: int = 1
    """Micro-steps per optimiser step."""
    lr: float = 3e-5
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments' decay."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup_steps: int = 2000
    """Optimiser steps of linear warm-up."""
    clip: Literal["value", "norm", "none"] = "value"
    """Gradient clipping, by value (the reference) or by global norm."""
    clip_threshold: float = 0.5
    """The value or norm to clip at."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: autocast with fp32 master weights. auto: bf16 on GPUs that compute in it, else fp32; what was taken stands in the
    run's record."""
    kernels: Literal["auto", "reference", "triton"] = "auto"
    """What computes the soft cross-entropy and its gradient (eagle/kernels/draft_loss). auto: Triton on CUDA devices, else plain
    PyTorch; reference: plain PyTorch; triton: Triton, or an error where it cannot run. metrics.jsonl says what ran."""
    unroll_steps: int | None = None
    """Steps that the head is unrolled over its own predictions in training. null: as published for head.version (eagle1: 1,
    eagle3: 7; HASS is eagle1 with 3)."""
    unroll_weight: float | None = None
    """Step k's losses count unroll_weight^k; null: 1 for eagle1 (and HASS), 0.8 for eagle3."""
    detach_between_steps: bool | None = None
    """Stop gradients at the predictions that a step goes on from; null: true for eagle1 (HASS), false for eagle3."""
    gradient_checkpointing: bool = False
    """Compute each unroll step a second time in the backward instead of keeping what is inside: less memory, more time."""
    regression_weight: float | None = None
    """Weight of SmoothL1 between predicted and true features; null: 1 for eagle1, 0 for eagle3 (whose predictions are no
    features of the target)."""
    classification_weight: float | None = None
    """Weight of the divergence between the target's and the head's token distributions; null: 0.1 for eagle1, 1 for eagle3."""
    divergence: Literal["soft_ce", "kl", "reverse_kl", "js", "tv"] = "soft_ce"
    """That divergence. soft_ce: -sum p log q, as published; kl: the same less p's entropy; reverse_kl: KL(q||p); js:
    Jensen-Shannon; tv: total variation (what sampling rejects; needs a head that knows something already)."""
    distill_weight: float = 0.0
    """Weight of the cross-entropy over the target's likeliest tokens alone; HASS: 1."""
    distill_top_k: int = 10
    """How many tokens that is."""
    noise: float | None = None
    """Input features get uniform noise in (-noise, noise); 0: none; null: 0.1 for eagle1, 0 for eagle3."""
    eval_every: int = 500
    """Optimiser steps between validations."""
    eval_documents: int = 64
    """Validation documents used each time, spread over the split."""
    chain_depth: int = 5
    """Length of the draft chain whose acceptance per depth the validation estimates."""
    decode_every: int | None = None
    """Optimiser steps between decodings of held-out prompts with the target and `decode`'s trees, which measure tau itself
    (the target is in memory for that); 0: never; null: every eval_every steps where decode_prompts are given, else never."""
    decode_prompts: tuple[str, ...] = ()
    """What is decoded: conversation files (the first user turn of each row); none: prompts of
    validation documents, spread over the split."""
    decode_count: int = 16
    """Prompts decoded each time, shared out among the processes."""
    decode_tokens: int = 64
    """Longest answer to them, in tokens (greedy)."""
    keep: Literal["best_tau", "last"] = "best_tau"
    """The head that ends up in head/: the one of the highest decoded tau, or the last. Without decoding: the last."""
    patience: int | None = None
    """Stop after this many decodings without a higher tau; null: go on to the end."""
    warm_start_check: Literal["refuse", "report", "off"] = "refuse"
    """What head.init_from is put to before training, on a few documents. refuse: it must guess the target's choices better
    than the likeliest constant token does; report: say so and go on; off: no check."""
    verify_store: Literal["once", "always", "never"] = "once"
    """Compare the store's files with their recorded SHA-256 before training: once per file (until it changes), at every start,
    or never."""
    save_every: int = 500
    """Optimiser steps between checkpoints."""
    keep_checkpoints: int = 2
    """Older ones are removed."""
    log_every: int = 10
    """Optimiser steps between lines of metrics.jsonl."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers besides metrics.jsonl (always written); wandb runs offline without a key."""
    project: str = "eagle"
    """The trackers' project name."""
    workers: int = 0
    """Loader processes per training process."""
    seed: int = 0
    """Seed of initial weights, document order and noise."""
