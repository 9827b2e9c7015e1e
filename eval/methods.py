"""The methods an evaluation compares, behind one call: prompt ids in, an `Answer` out, timed the same way."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eagle.config import DecodeConfig
from eagle.decode import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval.answers import Answer
from eagle.heads import EagleHead
from eagle.target import Target

Method = Callable[[torch.Tensor, int], Answer]
"""(ids_1T int64 on the target's device, max_new_tokens) -> Answer."""

HF, PLAIN, EAGLE2, CHAIN = "hf", "plain", "eagle2", "chain"


class FirstTokenClock(BaseStreamer):
    """Notes when the first new token arrives; the prompt, which is streamed first, is passed over."""

    def __init__(self, device: torch.device):
        self._device, self._prompt_came = device, False
        self.start = _now(device)
        self.first: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_came:
            self._prompt_came = True
        elif self.first is None:
            self.first = _now(self._device)

    def end(self) -> None:
        pass

    def times(self) -> tuple[float, float]:
        """(seconds since the start, seconds to the first token)."""
        end = _now(self._device)
        return end - self.start, (end if self.first is None else self.first) - self.start


def make_methods(target: Target, head: EagleHead, *, decode: DecodeConfig, chain_depth: int) -> dict[str, Method]:
    """The four methods by name. Raises EagleError when the head does not fit the target, or for another drafter."""
    if decode.drafter != "eagle2":
        raise EagleError(
            f'decode.drafter is "{decode.drafter}", but the evaluation compares the head\'s EAGLE-2 trees and chains; '
            "set it to eagle2 to evaluate"
        )
    chain = DecodeConfig(budget=chain_depth + 1, top_k=1, depth=chain_depth, engine=decode.engine)
    return {
        HF: _hugging_face(target),
        PLAIN: _ours(SpeculativeDecoder(target)),
        EAGLE2: _ours(SpeculativeDecoder.from_pretrained(target, head, decode=decode)),
        CHAIN: _ours(SpeculativeDecoder.from_pretrained(target, head, decode=chain)),
    }


def rotated(methods: Mapping[str, Any], turn: int) -> list[str]:
    """The order in which request number `turn` runs the methods: each method comes first equally often."""
    names = list(methods)
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def _ours(decoder: SpeculativeDecoder) -> Method:
    def answer(ids_1T: torch.Tensor, max_new_tokens: int) -> Answer:
        clock = FirstTokenClock(ids_1T.device)
        out = decoder.generate(ids_1T, max_new_tokens=max_new_tokens, do_sample=False, streamer=clock)
        seconds, first = clock.times()
        assert out.stats is not None
        (stats,) = out.stats
        return Answer(
            tokens=out.sequences[0, ids_1T.shape[1] :].tolist(),
            seconds=seconds,
            first_token_seconds=first,
            accepted=stats.accepted,
            attempts_per_depth=stats.attempts_per_depth,
            accepted_per_depth=stats.accepted_per_depth,
            draft_seconds=stats.draft_ms / 1e3,
            verify_seconds=stats.verify_ms / 1e3,
        )

    return answer


def _hugging_face(target: Target) -> Method:
    eos = list(target.eos_token_ids)
    greedy = GenerationConfig(
        do_sample=False, eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, use_cache=True
    )

    def answer(ids_1T: torch.Tensor, max_new_tokens: int) -> Answer:
        with _generation_config(target.model, greedy), torch.inference_mode():
            clock = FirstTokenClock(ids_1T.device)
            sequences = target.model.generate(
                ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=max_new_tokens, streamer=clock
            )
            seconds, first = clock.times()
        return Answer(tokens=sequences[0, ids_1T.shape[1] :].tolist(), seconds=seconds, first_token_seconds=first)

    return answer


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Generates with `config` alone: a checkpoint's own generation defaults (penalties, ...) are not plain greedy."""
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
