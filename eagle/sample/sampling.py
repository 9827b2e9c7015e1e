"""Sampling: one row's settings, which tokens they keep, and the token that plain sampling emits.

V vocabulary, X any leading shape. Order as in Hugging Face: processors that read the prefix, then temperature, top-k,
top-p, min-p. The emitted token is argmax(scores + G) over the kept ones, with G(row_seed, position, token) from
eagle/sample/noise.py: an exact sample (the Gumbel-max trick), without a softmax, and a pure function of seed and position.
Temperature 0 is the same with neither filters nor noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from eagle.errors import EagleError
from eagle.kernels.sample.settings import TEMPERATURES, RowSettings, is_temperature
from eagle.sample.noise import gumbel
from eagle.sample.processing import Processor, own_copy, process

FilterOrder = Literal["sequential", "joint"]

_SHORTLIST = 512
"""top-p first looks at this many best tokens; only a flatter distribution is sorted in full."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one row's tokens are chosen. Raises EagleError for a value out of its range."""

    temperature: float = 0.0
    """0: greedy, and the filters below mean nothing. Else from 1e-37 to 1e37: what float32 can divide by."""
    top_k: int = 0
    """Keep the k best tokens (ties at the k-th stay, as in Hugging Face); 0: all."""
    top_p: float = 1.0
    """Keep the best tokens up to this probability mass, the one that crosses it (and its ties) included; 1: all."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the best one's probability; 0: all."""
    filter_order: FilterOrder = "sequential"
    """sequential: each filter sees what the one before left, renormalised (Hugging Face). joint: a token stays when each
    filter, applied to the full distribution, keeps it."""
    seed: int = 0
    """The row's 64-bit seed."""

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (is_temperature(self.temperature), TEMPERATURES),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "top_p": (0 <= self.top_p <= 1, "from 0 (the best token) to 1 (off)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (off) to 1"),
            "filter_order": (self.filter_order in ("sequential", "joint"), "sequential or joint"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise EagleError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def tempered(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores divided by the temperature, the best one 0: no temperature overflows or hides the noise."""
        return (scores - scores.amax(-1, keepdim=True)) / self.temperature

    def filters(self, vocab_size: int) -> list[Callable[[torch.Tensor, "Sampling"], torch.Tensor]]:
        """Those that can drop a token, in Hugging Face's order."""
        asked = {
            _top_k: 0 < self.top_k < vocab_size,
            _top_p: self.top_p < 1,
            _min_p: self.min_p > 0,
        }
        return [one for one, does in asked.items() if does]


def row_settings(samplings: Sequence[Sampling], device: torch.device) -> RowSettings:
    """The rows' settings as the kernels take them, on their device."""
    return RowSettings.of(
        seeds=[one.seed for one in samplings],
        temperature=[one.temperature for one in samplings],
        top_k=[one.top_k for one in samplings],
        top_p=[one.top_p for one in samplings],
        min_p=[one.min_p for one in samplings],
        filter_order=[one.filter_order for one in samplings],
        device=device,
    )


def keep(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Which tokens the filters keep. scores: float32 [..., V] log-probabilities up to a constant, ALREADY divided by the
    temperature. bool [..., V]; the best token is always kept."""
    kept = torch.isfinite(scores)
    filtered = scores
    for one in sampling.filters(scores.shape[-1]):
        kept &= one(filtered, sampling)
        if sampling.filter_order == "sequential":
            filtered = scores.masked_fill(~kept, float("-inf"))
    return kept


def _top_k(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return scores >= scores.topk(sampling.top_k, dim=-1).values[..., -1:]


def _top_p(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Token i stays when the mass of the better tokens is below top_p."""
    log_total = scores.logsumexp(-1, keepdim=True)
    count = min(_SHORTLIST, scores.shape[-1])
    while True:
        best = scores.topk(count, dim=-1).values
        probabilities = (best - log_total).exp()
        before = probabilities.cumsum(-1) - probabilities
        if count == scores.shape[-1] or bool((before[..., -1] >= sampling.top_p).all()):
            break
        count = scores.shape[-1]
    stay = before < sampling.top_p
    stay[..., 0] = True
    threshold = best.masked_fill(~stay, float("inf")).amin(-1, keepdim=True)
    return scores >= threshold


def _min_p(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    best = scores.amax(-1, keepdim=True)
    return scores >= best + torch.tensor(sampling.min_p).log()


def draw(weights_V: torch.Tensor, coin: float) -> int:
    """The token at which the cumulated weights (not all zero) pass `coin`, from (0, 1), of their sum; none of weight 0."""
    cumulated_V = weights_V.double().cumsum(-1)
    return int(torch.searchsorted(cumulated_V, coin * cumulated_V[-1], right=True))


@dataclass(kw_only=True)
class RowSampler:
    """Chooses one row's tokens. Noise vectors are kept while their position can still be asked for."""

    sampling: Sampling
    processors: list[Processor] = field(default_factory=list)
    """The row's own: they may keep a state. Each is asked about a position once."""
    prompt_length: int = 0
    """Messages count steps behind it."""
    looks_ahead: bool = False
    """Processors are also asked about tokens that are then not accepted (Rule.looks_ahead): their state is taken back."""
    _earlier: dict[int, list[Processor]] = field(default_factory=dict, repr=False)
    """The processors before they were asked about a position, where looks_ahead."""
    _noise: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def processed(self, logits_V: torch.Tensor, tokens: list[int], accepted: list[int]) -> torch.Tensor:
        """float32 logits after the prefix-reading processors; the prefix is the row's unpadded tokens + `accepted`.

        Raises UnsoundScoresError where no token can be chosen: for nan, where all are -inf, and, unless greedy, for inf.
        (Hugging Face raises too when it samples; its greedy decoding emits the first nan, or token 0 where all are -inf.)
        """
        position = len(tokens) + len(accepted)
        ids_1T = torch.tensor([[*tokens, *accepted]], device=logits_V.device) if self.processors else torch.empty(1, 0)
        processors = self._as_of(position)
        step = position - self.prompt_length + 1
        return process(processors, ids_1T, logits_V[None], step=step, fits=self._fits)[0]

    def _fits(self, peak_M: torch.Tensor) -> torch.Tensor:
        return peak_M > float("-inf") if self.sampling.greedy else peak_M.isfinite()

    def _as_of(self, position: int) -> list[Processor]:
        if self.looks_ahead:
            self.processors = self._earlier.get(position, self.processors)
            self._earlier[position] = [own_copy(processor) for processor in self.processors]
        return self.processors

    def choose(self, processed_V: torch.Tensor, position: int) -> int:
        """The token that plain sampling emits at `position` (its index in the unpadded row)."""
        return int(self.contest(processed_V, position).argmax())

    def contest(self, processed_V: torch.Tensor, position: int) -> torch.Tensor:
        """float32 [V]: what `choose` takes the argmax of; -inf for tokens that the filters drop. Greedy: the logits."""
        if self.sampling.greedy:
            return processed_V
        scores_V = self.sampling.tempered(processed_V)
        kept_V = keep(scores_V, self.sampling)
        noisy_V = scores_V.add_(self.noise(position, len(scores_V)).to(scores_V.device))
        return noisy_V.masked_fill_(~kept_V, float("-inf"))

    def probabilities(self, processed_V: torch.Tensor) -> torch.Tensor:
        """float64 [..., V]: what `choose` draws from; greedy: all on the best token."""
        if self.sampling.greedy:
            return torch.nn.functional.one_hot(processed_V.argmax(-1), processed_V.shape[-1]).double()
        scores_V = self.sampling.tempered(processed_V)
        return scores_V.double().masked_fill(~keep(scores_V, self.sampling), float("-inf")).softmax(-1)

    def warped(self, processed_V: torch.Tensor) -> torch.Tensor:
        """Hugging Face's scores [V]: divided by the temperature, -inf where a filter drops the token."""
        if self.sampling.greedy:
            return processed_V
        kept_V = keep(self.sampling.tempered(processed_V), self.sampling)
        return (processed_V / self.sampling.temperature).masked_fill(~kept_V, float("-inf"))

    def draft_scores(
        self,
        logits_KV: torch.Tensor,
        position: int,
        target_ids_V: torch.Tensor | None = None,
        target_size: int | None = None,
    ) -> torch.Tensor:
        """log softmax(log q + T * G) over the tokens that the target's filters would keep; EAGLE-2's confidence.

        logits_KV: UNTEMPERED draft logits. target_ids_V: the target's id of each draft token (None: the same), among
        target_size (None: the largest of these ids + 1). Greedy rows get plain log q.
        """
        logits_KV = logits_KV.float()  # log q but for a constant, which no step below minds
        if self.sampling.greedy:
            return logits_KV.log_softmax(-1)
        if target_ids_V is None:
            noise_V = self.noise(position, logits_KV.shape[-1])
        else:
            noise_V = self.noise(position, target_size or int(target_ids_V.max()) + 1)[target_ids_V.cpu()]
        noisy_KV = logits_KV + self.sampling.temperature * noise_V.to(logits_KV.device)
        if self.sampling.filters(logits_KV.shape[-1]):
            kept_KV = keep(self.sampling.tempered(logits_KV), self.sampling)
            noisy_KV = noisy_KV.masked_fill_(~kept_KV, float("-inf"))
        return noisy_KV.log_softmax(-1)

    def draft_log_q(self, logits_ND: torch.Tensor) -> torch.Tensor:
        """float32 [..., D]: what draft tokens are drawn from: temperature and filters applied, -inf for what they drop.

        logits_ND: untempered draft logits. Greedy rows get plain log q.
        """
        if self.sampling.greedy:
            return logits_ND.float().log_softmax(-1)
        return self.probabilities(logits_ND.float()).log().float()

    def noise(self, position: int, tokens: int) -> torch.Tensor:
        """G(row_seed, position, .) for the first `tokens` ids: drafting and verification share it."""
        noise_V = self._noise.get(position)
        if noise_V is None or len(noise_V) < tokens:
            noise_V = self._noise[position] = gumbel(self.sampling.seed, position, tokens)
        return noise_V[:tokens]

    def forget_before(self, position: int) -> None:
        """Drops noise, and states of processors, that no later call can ask for."""
        for kept in (self._noise, self._earlier):
            for old in [p for p in kept if p < position]:
                del kept[old]
