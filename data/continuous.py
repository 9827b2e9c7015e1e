"""Continuous batching: many prompts answered by plain decoding, a new one taking the place of each that ends.

B rows (slots), T prompt tokens, H hidden, V vocabulary, R rows that are sampled. One `step` is one token for every live
row. What a row says depends on its prompt, temperature, seed and the target's own generation config only, never on its
batch mates.
"""

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle.data.own_settings import row_sampler
from eagle.data.shards import plan_batches
from eagle.errors import EagleError
from eagle.sample.sampling import RowSampler, keep
from eagle.target.target import Target

WINDOW = 8
"""Prompts are sorted by length within windows of WINDOW * batch_size, so that rows decoded together have similar length
while what is written first stays a fair sample of the whole."""


@dataclass(frozen=True, kw_only=True)
class Queued:
    """A rendered prompt that waits for its answer."""

    key: str
    """Identifies the row; with the seed it decides the row's random numbers."""
    input_ids_T: np.ndarray
    """int32 [T]"""
    temperature: float
    """0: greedy."""


@dataclass(kw_only=True)
class Answering:
    """A slot's occupant: its answer so far. The last token is not in the cache yet."""

    prompt: Queued
    noise: torch.Generator
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    """Whether the last token ends the answer (else the length limit did)."""
    sampler: RowSampler | None = None
    """Processors and filters of the target's own generation config; None: it has none."""

    def scores(self, logits_V: torch.Tensor) -> torch.Tensor:
        """float32 [V]: the logits after the target's own processors, -inf where its filters drop a token."""
        assert self.sampler is not None
        scores_V = self.sampler.processed(logits_V.float().clone(), self.prompt.input_ids_T.tolist(), self.tokens)
        if self.sampler.sampling.greedy:
            return scores_V
        return scores_V.masked_fill(
            ~keep(self.sampler.sampling.tempered(scores_V), self.sampler.sampling), float("-inf")
        )


class ContinuousDecoder:
    """The state of the batch: a cache of `batch_size` rows, who sits in which, who waits.

    while decoder.busy:
        for row in decoder.step(): ...   # rows that ended: prompt.key, tokens, finished
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Queued],
        *,
        batch_size: int,
        max_new_tokens: int,
        seed: int,
        prefill_tokens: int = 4096,
    ):
        self.target = target
        self.generated = 0
        """Tokens so far, over all rows."""
        self._max_new_tokens, self._seed, self._prefill_tokens = max_new_tokens, seed, prefill_tokens
        window = WINDOW * batch_size
        self._waiting: deque[Queued] = deque()
        for start in range(0, len(prompts), window):
            self._waiting.extend(sorted(prompts[start : start + window], key=lambda prompt: len(prompt.input_ids_T)))
        longest = max((len(prompt.input_ids_T) for prompt in prompts), default=0)
        self._capacity = longest + max_new_tokens
        rows = max(1, min(batch_size, len(prompts)))
        self._rows: list[Answering | None] = [None] * rows
        self._cache = target.new_cache(rows=rows, capacity=self._capacity)
        self._refill_at = max(1, rows // 16)  # free slots worth a prefill: one at a time would interrupt too often

    @property
    def live(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or self.live > 0

    @torch.inference_mode()
    def step(self) -> list[Answering]:
        """Seats waiting prompts in free slots, adds one token to every live row, returns the rows that ended."""
        free = len(self._rows) - self.live
        ended: list[Answering] = []
        if self._waiting and (free >= self._refill_at or free == len(self._rows)):
            ended += self._seat()
        if self.live == 0:
            return ended
        if not self._waiting and self.live <= 0.8 * len(self._rows):
            self._compact()
        tokens_B1 = torch.tensor([[0 if row is None else row.tokens[-1]] for row in self._rows])
        depths_B1 = torch.zeros_like(tokens_B1)
        own_bit_B11 = torch.ones(len(self._rows), 1, 1, dtype=torch.int64)
        features_B1H = self.target.tree_forward(tokens_B1, depths_B1, own_bit_B11, self._cache).features_BNH
        self._cache.commit(depths_B1, torch.tensor([row is not None for row in self._rows]).long())
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        seated = [row for row in self._rows if row is not None]
        for slot, row in zip(live, self._extend(seated, features_B1H[live, 0])):
            if row is not None:
                ended.append(row)
                self._leave(slot)
        return ended

    def _seat(self) -> list[Answering]:
        """Prefills as many waiting prompts as there are free slots; each gets its first token."""
        slots = [slot for slot, row in enumerate(self._rows) if row is None][: len(self._waiting)]
        rows = []
        for _ in slots:
            prompt = self._waiting.popleft()
            sampler = row_sampler(
                self.target,
                prompt=len(prompt.input_ids_T),
                limit=self._max_new_tokens,
                temperature=prompt.temperature,
            )
            rows.append(Answering(prompt=prompt, noise=row_generator(self._seed, prompt.key), sampler=sampler))
        ended: list[Answering] = []
        for batch_B in plan_batches(np.array([len(row.prompt.input_ids_T) for row in rows]), self._prefill_tokens):
            group = [rows[i] for i in batch_B]
            lengths_B = torch.tensor([len(row.prompt.input_ids_T) for row in group])
            ids_BT = torch.zeros(len(group), int(lengths_B.max()), dtype=torch.int64)
            for b, row in enumerate(group):
                ids_BT[b, : lengths_B[b]] = torch.from_numpy(row.prompt.input_ids_T)
            cache = self.target.new_cache(rows=len(group), capacity=ids_BT.shape[1])
            features_BTH = self.target.prefill(ids_BT, lengths_B, cache).features_BNH
            over = self._extend(group, features_BTH[torch.arange(len(group)), lengths_B - 1])
            for b, row in enumerate(group):
                if over[b] is not None:
                    ended.append(row)
                    continue
                slot = slots.pop(0)
                self._rows[slot] = row
                self._cache.copy_row(slot, cache, b)
        return ended

    def _extend(self, rows: Sequence[Answering], features_BH: torch.Tensor) -> list[Answering | None]:
        """Gives each row the token that follows features_BH; names those that this ends."""
        tokens = choose_tokens(self.target.logits(features_BH), rows)
        self.generated += len(rows)
        over: list[Answering | None] = []
        for row, token in zip(rows, tokens):
            row.tokens.append(token)
            row.finished = token in self.target.eos_token_ids
            over.append(row if row.finished or len(row.tokens) >= self._max_new_tokens else None)
        return over

    def _leave(self, slot: int) -> None:
        self._rows[slot] = None
        self._cache.lengths_B[slot] = 0

    def _compact(self) -> None:
        """Moves the live rows to a smaller cache: nobody waits for the free slots."""
        live = [slot for slot, row in enumerate(self._rows) if row is not None]
        smaller = self.target.new_cache(rows=len(live), capacity=self._capacity)
        for slot, old in enumerate(live):
            smaller.copy_row(slot, self._cache, old)
        self._cache, self._rows = smaller, [self._rows[slot] for slot in live]


def row_generator(seed: int, key: str) -> torch.Generator:
    """A row's own random numbers: seeded by the first 63 bits of SHA-256("seed:key")."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def choose_tokens(logits_BV: torch.Tensor, rows: Sequence[Answering]) -> list[int]:
    """The next token of each row: the argmax, or at temperature T > 0 the winner of an exponential race.

    argmax_x p(x) / E(x) with p = softmax(logits / T) and E ~ Exp(1) is a sample from p (the Gumbel-max trick). From 31
    random bits: u = (bits + 1/2) / 2^31, E = -log1p(-u): never 0, and fine-grained near 0, where races are won.
    """
    own = [b for b, row in enumerate(rows) if row.sampler is not None]
    if own:
        logits_BV = logits_BV.float()
        logits_BV[own] = torch.stack([rows[b].scores(logits_BV[b]) for b in own])
    best_B, tokens_B = logits_BV.max(dim=-1)
    if not torch.isfinite(best_B).all():
        raise EagleError("the target's logits are not finite; run it in bfloat16 or float32 (target.dtype)")
    tokens: list[int] = tokens_B.tolist()
    sampled = [b for b, row in enumerate(rows) if row.prompt.temperature > 0]
    if sampled:
        bits_RV = torch.empty(len(sampled), logits_BV.shape[1], dtype=torch.int32)
        for bits_V, b in zip(bits_RV, sampled):
            bits_V.random_(generator=rows[b].noise)
        minus_time_RV = bits_RV.to(logits_BV.device).float().add_(0.5).mul_(-(2.0**-31)).log1p_()
        temperature_R1 = torch.tensor([[rows[b].prompt.temperature] for b in sampled], device=logits_BV.device)
        weights_RV = (logits_BV[sampled].float() - best_B[sampled, None].float()).div_(temperature_R1).exp_()
        for b, token in zip(sampled, weights_RV.div_(minus_time_RV).argmin(dim=-1).tolist()):
            tokens[b] = token
    return tokens
