"""SpeculativeDecoder: prefill -> draft -> verify -> commit, token for token what the target alone would say.

B rows (1 for now), N tree nodes, L prefix length, H hidden. Plain decoding is the same loop with trees of one node.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from eagle.cache import TreeCache
from eagle.checkpoint import check_fits, load_head
from eagle.config import DecodeConfig
from eagle.drafting import Drafter, EagleDrafter
from eagle.errors import EagleError
from eagle.heads import EagleHead
from eagle.stats import DecodeStats
from eagle.target import Target
from eagle.tree import DraftTree
from eagle.verify import Walk, coupled_walk


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's output (`sequences`: int64 [B, prompt + new]) with one DecodeStats per row."""

    stats: list[DecodeStats] | None = None


@dataclasses.dataclass(kw_only=True)
class _Generation:
    """State of one running generation."""

    cache: TreeCache
    eos: frozenset[int]
    max_new_tokens: int
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    stats: DecodeStats = dataclasses.field(default_factory=DecodeStats)
    finished: bool = False

    def emit(self, tokens: list[int]) -> list[int]:
        """Adds a block of tokens up to the length limit or the first EOS inside it; returns what was added."""
        block = tokens[: self.max_new_tokens - len(self.new_tokens)]
        stop = next((i for i, token in enumerate(block) if token in self.eos), None)
        if stop is not None:
            block = block[: stop + 1]
        self.new_tokens += block
        self.finished = stop is not None or len(self.new_tokens) == self.max_new_tokens
        if self.finished:
            self.stats.finish_reason = "length" if stop is None else "eos"
        self.stats.new_tokens = len(self.new_tokens)
        return block

    @contextmanager
    def clock(self, field: str, device: torch.device) -> Iterator[None]:
        """Adds the block's wall time to a stats field; waits for the device so that the time is the block's own."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        setattr(self.stats, field, getattr(self.stats, field) + 1e3 * (time.perf_counter() - start))


class SpeculativeDecoder:
    """Decodes with a drafter (None: plainly). Greedy, one row; everything else raises EagleError."""

    def __init__(self, target: Target, drafter: Drafter | None = None):
        self.target, self.drafter = target, drafter

    @classmethod
    def from_pretrained(
        cls,
        target: str | PreTrainedModel | Target,
        head: str | Path | EagleHead | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        decode: DecodeConfig | None = None,
        **target_config: Any,
    ) -> "SpeculativeDecoder":
        """target: path, hub id, .gguf file, loaded model or Target. head: folder, hub id, loaded head, or None (plain).

        decode: shape of the draft tree. target_config: fields of TargetConfig (dtype, device, revision ...).
        Raises EagleError when the head does not fit the target.
        """
        if not isinstance(target, Target):
            target = Target.from_pretrained(target, tokenizer, **target_config)
        if head is None:
            return cls(target)
        loaded = head if isinstance(head, EagleHead) else load_head(head)
        check_fits(loaded, target)
        loaded = loaded.to(device=target.device, dtype=target.dtype)
        decode = decode or DecodeConfig()
        drafter = EagleDrafter(loaded, target.tokens, budget=decode.budget, top_k=decode.top_k, depth=decode.depth)
        return cls(target, drafter)

    def plain(self) -> "SpeculativeDecoder":
        """The same engine without drafting: the baseline."""
        return SpeculativeDecoder(self.target)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int = 256,
        eos_token_id: int | list[int] | None = None,
        streamer: BaseStreamer | None = None,
        **unsupported: Any,
    ) -> SpeculativeOutput:
        """Greedy continuation of input_ids (int64 [1, T], T >= 1).

        eos_token_id: default the target's own. streamer: Hugging Face's protocol; gets the prompt, then committed
        tokens only. Raises EagleError for more than one row, padding, an empty prompt, a prompt that with
        max_new_tokens exceeds the target's positions, and for every argument it does not know.
        """
        if streamer is not None:
            streamer.put(input_ids.cpu())
        running = self._blocks(input_ids, attention_mask, max_new_tokens, eos_token_id, unsupported)
        generation = next(running)
        assert isinstance(generation, _Generation)
        for block in running:
            if streamer is not None:
                streamer.put(torch.tensor(block))
        if streamer is not None:
            streamer.end()
        new_1N = torch.tensor([generation.new_tokens], device=input_ids.device)
        return SpeculativeOutput(sequences=torch.cat([input_ids, new_1N], dim=1), stats=[generation.stats])

    def stream(self, input_ids: torch.Tensor, **arguments: Any) -> Iterator[str]:
        """`generate`'s text, piece by piece as tokens are committed."""
        if self.target.tokenizer is None:
            raise EagleError("streaming text needs the tokenizer; pass it to from_pretrained(..., tokenizer=...)")
        pieces = _Pieces(self.target.tokenizer, skip_prompt=True, skip_special_tokens=True)
        pieces.put(input_ids.cpu())
        mask = arguments.pop("attention_mask", None)
        limit, eos = arguments.pop("max_new_tokens", 256), arguments.pop("eos_token_id", None)
        running = self._blocks(input_ids, mask, limit, eos, arguments)
        next(running)
        for block in running:
            pieces.put(torch.tensor(block))
            yield from pieces.take()
        pieces.end()
        yield from pieces.take()

    def _blocks(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        max_new_tokens: int,
        eos_token_id: int | list[int] | None,
        unsupported: dict[str, Any],
    ) -> Iterator[Any]:
        """Yields the state, then every committed block of tokens."""
        self._check(input_ids, attention_mask, max_new_tokens, unsupported)
        eos = self.target.eos_token_ids if eos_token_id is None else eos_token_id
        prompt, room = input_ids.shape[1], 64
        generation = _Generation(
            cache=self.target.new_cache(rows=1, capacity=prompt + max_new_tokens + room),
            eos=frozenset((eos,) if isinstance(eos, int) else eos),
            max_new_tokens=max_new_tokens,
        )
        yield generation
        start = time.perf_counter()
        yield self._prefill(generation, input_ids)
        while not generation.finished:
            yield self._step(generation)
            generation.stats.total_ms = 1e3 * (time.perf_counter() - start)
        generation.stats.total_ms = 1e3 * (time.perf_counter() - start)

    def _prefill(self, generation: _Generation, input_ids: torch.Tensor) -> list[int]:
        """The prompt's features and the first token; the drafter sees them all."""
        with generation.clock("prefill_ms", self.target.device):
            lengths_B = torch.tensor([input_ids.shape[1]])
            features_1TH = self.target.prefill(input_ids, lengths_B, generation.cache)
            token = self._next_token(features_1TH[0, -1])
        if self.drafter is not None:
            with generation.clock("draft_ms", self.target.device):
                self.drafter.reset(rows=1, capacity=generation.cache.capacity)
                self.drafter.observe(features_1TH, torch.cat([input_ids[:, 1:].cpu(), torch.tensor([[token]])], dim=1))
        return generation.emit([token])

    def _step(self, generation: _Generation) -> list[int]:
        """One cycle: draft a tree, verify it in one forward, commit the accepted path."""
        with generation.clock("draft_ms", self.target.device):
            tree = self._propose(generation)
        with generation.clock("verify_ms", self.target.device):
            features_1NH = self.target.tree_forward(
                tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, generation.cache
            )
            walk = self._verify(tree, features_1NH)
        generation.cache.commit(torch.tensor([walk.path]), torch.tensor([len(walk.path)]))
        generation.stats.count_step(path_length=len(walk.path), at_leaf=walk.at_leaf)
        block = generation.emit(walk.tokens)
        if self.drafter is not None and not generation.finished:
            with generation.clock("draft_ms", self.target.device):
                self.drafter.observe(features_1NH[:, walk.path], torch.tensor([walk.tokens]))
        return block

    def _propose(self, generation: _Generation) -> DraftTree:
        if self.drafter is None:
            return DraftTree.roots(torch.tensor(generation.new_tokens[-1:]))
        tree = self.drafter.propose()
        if self.target.max_positions is None:
            return tree
        # No node beyond the last position: learned position tables end there.
        return tree.up_to_depth(self.target.max_positions - 1 - generation.cache.longest)

    def _verify(self, tree: DraftTree, features_1NH: torch.Tensor) -> Walk:
        """The coupled walk. On a CPU the LM head runs on visited nodes only; on a GPU on all, to wait for it once."""
        if features_1NH.device.type == "cpu":
            return coupled_walk(tree, 0, lambda row, node: self._next_token(features_1NH[row, node]))
        greedy_BN = self.target.logits(features_1NH).argmax(-1).tolist()
        return coupled_walk(tree, 0, lambda row, node: int(greedy_BN[row][node]))

    def _next_token(self, features_H: torch.Tensor) -> int:
        return int(self.target.logits(features_H).argmax())

    def _check(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        max_new_tokens: int,
        unsupported: dict[str, Any],
    ) -> None:
        # The defaults of Hugging Face's generate say nothing and are let through.
        defaults = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": True}
        asked = sorted(name for name, value in unsupported.items() if value is not None and defaults.get(name) != value)
        if asked:
            raise EagleError(f"generate does not support {', '.join(asked)}; it decodes greedily: leave them out")
        if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise EagleError(f"input_ids have shape {tuple(input_ids.shape)}; expected [1, T] with T >= 1")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise EagleError("attention_mask marks padding; with one row no padding is needed: pass the row without it")
        if max_new_tokens < 1:
            raise EagleError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        positions, asked_for = self.target.max_positions, input_ids.shape[1] + max_new_tokens
        if positions is not None and asked_for > positions:
            raise EagleError(
                f"a prompt of {input_ids.shape[1]} tokens and {max_new_tokens} new ones need {asked_for} positions, "
                f"{self.target.name} has {positions}; shorten the prompt or lower max_new_tokens"
            )
        high = int(input_ids.max())
        if high >= self.target.vocab_size or int(input_ids.min()) < 0:
            raise EagleError(
                f"token id {high} is outside the target's vocabulary of {self.target.vocab_size}; "
                "was the prompt encoded with this target's tokenizer?"
            )


class _Pieces(TextStreamer):
    """Collects the text that Hugging Face's streamer would print."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **arguments: Any):
        super().__init__(tokenizer, **arguments)
        self._pieces: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._pieces.append(text)

    def take(self) -> list[str]:
        pieces, self._pieces = [piece for piece in self._pieces if piece], []
        return pieces
