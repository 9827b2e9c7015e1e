"""Which head is the best: held-out prompts are decoded with the real decoder, and the highest tau wins.

The training loss, and the acceptance estimated from stored documents, keep improving after the decoded acceptance length
has peaked; so heads are chosen by what they decode. The best one lies in train/best-00000500/, whole or not at all; the
checkpoints say which it is, and it is removed only when a checkpoint names a better one.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase

from eagle.config import Recipe, TrainConfig, as_dict
from eagle.data.conversations import read_conversations
from eagle.data.documents import Documents, spread
from eagle.data.sources import Rejected
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import DRAFTERS
from eagle.errors import EagleError
from eagle.files import sha256_text
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import DraftHead
from eagle.launch import whole_models
from eagle.sample.stats import AcceptanceLength, DecodeStats
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from eagle.train.checkpoints import Progress, disk_full_is_an_error

PREFIX = "best-"
ROWS = 8
"""Prompts decoded side by side."""


def interval(config: TrainConfig) -> int:
    """Optimiser steps between decodings; 0: none."""
    if config.decode_every is not None:
        return config.decode_every
    return config.eval_every if config.decode_prompts else 0


def check_settings(recipe: Recipe) -> None:
    """Raises EagleError for decoding settings out of range, or that would have no effect."""
    config = recipe.train
    for name in ("decode_count", "decode_tokens"):
        if getattr(config, name) < 1:
            raise EagleError(f"train.{name} is {getattr(config, name)}, expected 1 or more")
    if config.decode_every is not None and config.decode_every < 0:
        raise EagleError(f"train.decode_every is {config.decode_every}, expected 0 (never) or more, or null")
    if config.patience is not None and config.patience < 1:
        raise EagleError(f"train.patience is {config.patience}, expected 1 or more decodings, or null")
    if not interval(config):
        if config.patience is not None:
            raise EagleError(
                f"train.patience is {config.patience}, but nothing is decoded while training; set train.decode_every (or "
                "train.decode_prompts), or leave train.patience out"
            )
        return
    if not recipe.decode.drafter.reads_head:
        readers = ", ".join(name for name, kind in DRAFTERS.items() if kind.reads_head)
        raise EagleError(
            f'decode.drafter is "{recipe.decode.drafter.name}", which drafts without the head; to choose heads by what they '
            f"decode set it to {readers}, or train.decode_every to 0"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """Sums over all prompts and processes."""

    length: AcceptanceLength
    tokens: int
    """New tokens, the prefills' included"""
    seconds: float

    @property
    def tau(self) -> float:
        """What heads are compared by; 0 where every answer ended with its first token."""
        return self.length.tau or 0.0


class Selection:
    """The target, the prompts and the tree by which a run's heads are compared. Every process makes one.

    Raises EagleError: no prompt, prompts without an answer's room in the target's positions, a target that the documents
    are not of.
    """

    def __init__(
        self, recipe: Recipe, documents: Documents, accelerator: Accelerator, target: Target | None = None
    ) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        if target is None:
            own = dataclasses.replace(recipe.target, device=str(accelerator.device))
            with whole_models(accelerator):
                target = Target.from_config(own, recipe.data.chat_template)
        self.target = target
        _require_same_target(documents, target)
        prompts = _prompts(recipe, documents, target.tokenizer)
        room = (target.max_positions or 1 << 30) - recipe.train.decode_tokens
        fitting = [prompt for prompt in prompts if 0 < len(prompt) <= room]
        if not recipe.train.decode_prompts:
            fitting = [fitting[place] for place in spread(len(fitting), recipe.train.decode_count)]
        fitting = fitting[: recipe.train.decode_count]
        if not fitting:
            raise EagleError(
                f"none of the {len(prompts)} held-out prompts leaves room for train.decode_tokens ({recipe.train.decode_tokens}) "
                f"in the target's {target.max_positions} positions (or there is none); give train.decode_prompts, lower "
                "train.decode_tokens, or set train.decode_every to 0"
            )
        self.count = len(fitting)
        self._own = fitting[accelerator.process_index :: accelerator.num_processes]
        tree = dataclasses.replace(recipe.decode.as_published(), engine="eager")
        self._tree = tree
        counted = "tokens that reached the answers"
        self.measure = sha256_text(json.dumps([fitting, recipe.train.decode_tokens, as_dict(tree), counted]))[:16]
        """Heads are comparable when this is equal: prompts, answers' length, trees, what tau counts."""

    def decode(self, head: DraftHead) -> Decoded:
        """Answers the prompts, greedily (a collective). `head` is the caller's no more: it takes the target's dtype."""
        start = time.monotonic()
        head.config.target_identity = None  # compared once, above: it takes a hash of the target's weights
        decoder = SpeculativeDecoder.from_pretrained(self.target, head, decode=self._tree)
        rows = [
            row
            for first in range(0, len(self._own), ROWS)
            for row in self._answer(decoder, self._own[first : first + ROWS])
        ]
        own = AcceptanceLength.of((row.new_tokens, row.accepted) for row in rows)
        new_tokens = sum(row.new_tokens for row in rows)
        sums = torch.tensor(
            [own.committed, own.uncut, own.steps, new_tokens], dtype=torch.float64, device=self.accelerator.device
        )
        committed, uncut, steps, tokens = map(int, self.accelerator.reduce(sums, reduction="sum").tolist())
        length = AcceptanceLength(committed=committed, uncut=uncut, steps=steps)
        return Decoded(length=length, tokens=tokens, seconds=time.monotonic() - start)

    def _answer(self, decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]]) -> list[DecodeStats]:
        eos = self.target.eos_token_ids
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.recipe.train.decode_tokens,
            eos_token_id=list(eos) or None,
            pad_token_id=eos[0] if eos else 0,
        )
        rows = [torch.tensor(prompt) for prompt in prompts]
        out = decoder.generate(
            pad_sequence(rows, batch_first=True).to(self.target.device),
            pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self.target.device),
            generation_config=settings,
        )
        return list(out.stats or ())


def _require_same_target(documents: Documents, target: Target) -> None:
    recorded, identity = documents.target_identity or {}, target.identity()
    differing = [key for key in ("architecture", "weights_sha256") if recorded.get(key, identity[key]) != identity[key]]
    if differing:
        lines = "; ".join(f"{key} is {identity[key]}, expected {recorded[key]}" for key in differing)
        raise EagleError(
            f"the target {target.name} is not the one whose features are trained on ({lines}); set target.model back, or "
            "choose another output_dir"
        )


def _prompts(recipe: Recipe, documents: Documents, tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    """Ids of the prompts: train.decode_prompts' first user turns, or what precedes the validation documents' answers."""
    if not recipe.train.decode_prompts:
        return [_before_answer(documents, number) for number in documents.split("validation")]
    assert tokenizer is not None
    prompts: list[list[int]] = []
    for row in read_conversations(recipe.train.decode_prompts, split=recipe.data.split):
        if isinstance(row, Rejected):
            continue
        roles = [message["role"] for message in row.messages]
        prompts.append(prompt_ids(tokenizer, row.messages[: roles.index("user") + 1]))
        if len(prompts) >= 4 * recipe.train.decode_count:  # some may be too long
            break
    return prompts


def _before_answer(documents: Documents, number: int) -> list[int]:
    ids_T, mask_T = documents.ids_and_mask(number)
    supervised = mask_T.nonzero()[:, 0]
    return [] if not len(supervised) else list(ids_T[: int(supervised[0])].tolist())


# --- which one is the best ----------------------------------------------------------------------------------------


def judge(progress: Progress, decoded: Decoded, *, measure: str) -> bool:
    """Whether this step's head is the best so far; the earlier of equals stays."""
    if progress.best and decoded.tau <= progress.best["tau"]:
        progress.without_gain += 1
        return False
    progress.best = {"step": progress.step, "tau": decoded.tau, "measure": measure}
    progress.without_gain = 0
    return True


def exhausted(progress: Progress, config: TrainConfig) -> bool:
    """Whether so many decodings were no better that the run ends."""
    return config.patience is not None and progress.without_gain >= config.patience


def best_folder(directory: Path, step: int) -> Path:
    return directory / f"{PREFIX}{step:08d}"


def save_best(directory: Path, head: DraftHead, progress: Progress, *, weights: dict[str, torch.Tensor]) -> None:
    """Writes the head of this step beside the ones before it (`remove_others` clears them up). Main process only."""
    with disk_full_is_an_error("the last whole checkpoint is untouched: make room and run the same command again"):
        folder = best_folder(directory, progress.step)
        save_head(head, folder, extra={"step": progress.step, "decoded_tau": progress.best["tau"]}, weights=weights)


def remove_others(directory: Path, progress: Progress) -> None:
    """Removes the heads that are not the best any more, once a checkpoint says so. Main process only."""
    for folder in directory.glob(f"{PREFIX}*"):
        ours = folder.name.removeprefix(PREFIX).isdecimal()
        if ours and folder.name != best_folder(directory, progress.best.get("step", -1)).name:
            shutil.rmtree(folder)


def resume(directory: Path, progress: Progress, *, measure: str | None) -> str | None:
    """Drops a best head that cannot be compared with what comes (measure None: nothing is decoded now); returns why."""
    if not progress.best:
        return None
    step, reason = progress.best["step"], None
    if measure is None:
        reason = f"nothing is decoded any more: the last head counts, not the best so far, of step {step}"
    elif not best_folder(directory, step).is_dir():
        reason = f"the best head so far, of step {step}, is gone; the best head is chosen anew from here on"
    elif progress.best["measure"] != measure:
        reason = (
            "prompts, answers' length, trees or what tau counts changed, so earlier decodings cannot be compared; the best head "
            "is chosen anew from here on"
        )
    if reason is not None:
        progress.best, progress.without_gain = {}, 0
    return reason
