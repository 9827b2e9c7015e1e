"""Several prompts answered in one ragged batch by our own decoder."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig

from eagle.decode.decoder import SpeculativeDecoder
from eagle.eval.settings import Setting
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target


@contextmanager
def bare_generation_config(target: Target) -> Iterator[None]:
    """Within the block the checkpoint's own generation defaults (penalties, temperatures ...) do not apply, to nobody's loop:
    what is compared is what the evaluation asks for."""
    before, eos = target.model.generation_config, list(target.eos_token_ids)
    target.model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, use_cache=True
    )
    try:
        yield
    finally:
        target.model.generation_config = before


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchAnswer:
    """What a batch said."""

    tokens: list[list[int]]
    """New tokens of each row"""
    stats: list[DecodeStats]
    seconds: float
    """Wall clock behind the prefill"""

    @property
    def answers(self) -> list[tuple[int, list[int]]]:
        """(New tokens, accepted drafts of each verify step) of each row, as AcceptanceLength takes them."""
        return [(row.new_tokens, row.accepted) for row in self.stats]

    @property
    def new_tokens(self) -> int:
        """Those made behind the prefill, over all rows."""
        return sum(len(row) - 1 for row in self.tokens)


def answer_batch(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    *,
    seeds: Sequence[int],
    setting: Setting,
    max_new_tokens: int,
) -> BatchAnswer:
    """prompts: token ids, padded on the left here; seeds: one per row."""
    width = max(len(ids) for ids in prompts)
    ids_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    for row, ids in enumerate(prompts):
        ids_BT[row, width - len(ids) :] = torch.tensor(ids)
        mask_BT[row, width - len(ids) :] = 1
    device = decoder.target.device
    with bare_generation_config(decoder.target):
        start = time.perf_counter()
        out = decoder.generate(
            ids_BT.to(device),
            mask_BT.to(device),
            max_new_tokens=max_new_tokens,
            seed=list(seeds),
            **setting.arguments(),
        )
        seconds = time.perf_counter() - start
    assert out.stats is not None
    return BatchAnswer(
        tokens=[row[width : width + stats.new_tokens].tolist() for row, stats in zip(out.sequences, out.stats)],
        stats=out.stats,
        seconds=seconds - out.stats[0].prefill_ms / 1e3,
    )
