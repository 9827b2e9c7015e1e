"""SpeculativeDecoder: prefill -> draft -> verify -> commit, token for token what the target alone would say.

B rows, N tree nodes, K accepted nodes, L prefix length, H hidden, V vocabulary. Rows are ragged: each has its own
length, seed and end, and its text does not depend on its batch mates. Plain decoding is the same loop with trees of
one node. Search (num_beams > 1) is in eagle/decode/beam.py.
"""

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from eagle.config import DecodeConfig
from eagle.decode.arguments import Arguments, resolve
from eagle.decode.beam import search
from eagle.decode.hypotheses import RowSearch
from eagle.decode.make import make_drafter
from eagle.decode.pieces import PieceStream
from eagle.draft.by_level import pick
from eagle.draft.drafter import Drafter
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead
from eagle.kernels.dispatch import Backend, missing, since, snapshot, using
from eagle.kernels.placement import sent
from eagle.sample.row import Row
from eagle.sample.stats import DecodeStats
from eagle.sample.stopwatch import Stopwatch
from eagle.target.cache import TreeCache
from eagle.target.loading import refuse_config
from eagle.target.target import Target, TargetStates
from eagle.verify.coupled import Coupled, Rule, Walk
from eagle.verify.rules import make_rule
from eagle.verify.verifier import Verifier, why_not_rule

TREE_ROOM = 64
"""Slots reserved behind the longest row for tree nodes; the cache grows when a tree is larger."""


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Hugging Face's output with statistics.

    sequences: int64 [B, prompt + longest answer], right-padded. scores (output_scores=True): one float32 [B, V] per new
    token, processors, temperature and filters applied; rows that ended hold zeros. stats: one DecodeStats per row.
    Of a search (num_beams above 1), rows are its num_return_sequences best answers per prompt, best first;
    sequences_scores: float32 [B], s / length ** length_penalty of each. stats: one per prompt.
    """

    sequences_scores: torch.Tensor | None = None
    stats: list[DecodeStats] | None = None


@dataclasses.dataclass(kw_only=True)
class _Batch:
    """The rows still running, in the order in which caches hold them."""

    rows: list[Row]
    cache: TreeCache
    verifier: Verifier
    device: torch.device
    stopwatch: Stopwatch
    number: int
    """Of the decoder's batches: its drafter serves the newest."""

    def clock(self, field: str) -> AbstractContextManager[None]:
        """Adds the block's wall time to a field of every running row's stats."""
        return self.stopwatch.clock(self.rows, field)


class SpeculativeDecoder:
    """Decodes with a drafter (None: plainly) and a verification rule (one of eagle.verify.rules, or its name).

    kernels: what runs them (eagle/kernels/dispatch.py); auto: what an enclosing `using` block says, else Triton on CUDA
    devices, as far as kernels can express what is asked for (eagle/verify/verifier.py).
    Raises EagleError when "triton" was asked for and cannot run on the target's device or for the rule.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: Rule | str = "coupled",
        *,
        kernels: Backend = "auto",
    ):
        self.target, self.drafter, self.kernels = target, drafter, kernels
        self._batches = 0
        self._turn = threading.Lock()  # a drafter serves one batch: others are refused, not mixed in
        self.rule = make_rule(rule)
        reason = missing(target.device) or why_not_rule(self.rule)
        if kernels == "triton" and reason is not None:
            raise EagleError(f"decode.kernels is triton, which cannot run: {reason}; set it to auto or reference")

    @classmethod
    def from_pretrained(
        cls,
        target: str | PreTrainedModel | Target,
        head: str | Path | DraftHead | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        decode: DecodeConfig | None = None,
        rule: Rule | str | None = None,
        draft_model: str | Path | PreTrainedModel | Target | None = None,
        **target_config: Any,
    ) -> "SpeculativeDecoder":
        """target: path, hub id, .gguf file, loaded model or Target. head: folder, zoo name, hub id, loaded head, or None.

        decode: which drafter and its trees (default: EAGLE-2's with a head, plain decoding without, on the fastest engine, or
        the one that the target was given). rule: how they are verified, where that is not `decode`'s: by name, or a rule
        of one's own. draft_model: as target, for the drafter SmallModel. target_config: fields of TargetConfig
        (dtype, device, revision ...), for a target that is yet to be loaded.
        Raises EagleError when the head or the draft model does not fit the target, or is missing, and for what would have
        no effect.
        """
        if isinstance(target, Target):
            refuse_config(target_config | ({} if tokenizer is None else {"tokenizer": tokenizer}), "a loaded Target")
        else:
            target = Target.from_pretrained(target, tokenizer, **target_config)
        decode = DecodeConfig() if decode is None else decode
        target = target.on_engine(decode.engine)
        if rule is not None:
            decode = dataclasses.replace(decode, rule=make_rule(rule))
        drafter = make_drafter(target, decode, head=head, draft_model=draft_model)
        rule = "coupled" if drafter is None else make_rule(decode.rule)
        return cls(target, drafter, rule, kernels=decode.kernels)

    def plain(self) -> "SpeculativeDecoder":
        """The same engine without drafting: the baseline."""
        return SpeculativeDecoder(self.target, kernels=self.kernels)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        **arguments: Any,
    ) -> SpeculativeOutput:
        """Continues input_ids (int64 [B, T], padded left or right as attention_mask says).

        arguments: what Hugging Face's generate takes - generation_config (default: the model's own), logits_processor,
        stopping_criteria and the config's keywords (max_new_tokens, do_sample, temperature, top_k, top_p and min_p - each
        a number or one per row -, eos_token_id, stop_strings, num_return_sequences, repetition_penalty ...) - and seed,
        filter_order, presence_penalty, frequency_penalty (eagle.decode.arguments.resolve documents them).
        num_beams above 1: beam search of the target alone, without the drafter (eagle/decode/beam.py); length_penalty,
        early_stopping, num_return_sequences and the keywords of eagle.decode.beam_settings.BeamSettings say how.
        streamer: for one row; gets the prompt, then committed tokens only.
        Raises EagleError for everything that is not supported and for prompts beyond the target's positions.
        """
        call = resolve(self.target, input_ids, attention_mask, **arguments)
        if call.beams is not None:
            if streamer is not None:
                raise EagleError(
                    "a streamer cannot follow a search with num_beams: it may change its mind; leave one out"
                )
            if not isinstance(self.rule, Coupled):
                raise EagleError(
                    f"num_beams searches plainly, without the verification rule {self.rule.name}; call decoder.plain().generate"
                )
            with self._kernels(call.rows):
                searches = search(self.target, call.rows, call.beams)
            return _search_output(call, searches, input_ids)
        if streamer is not None:
            if len(call.rows) > 1:
                raise EagleError(f"a streamer takes one row, the batch has {len(call.rows)}; stream them one by one")
            streamer.put(input_ids.cpu())
        for blocks in self._run(call.rows):
            if streamer is not None:
                streamer.put(torch.tensor(blocks[0]))
        if streamer is not None:
            streamer.end()
        return _output(call, input_ids)

    def stream(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any
    ) -> Iterator[str]:
        """`generate`'s text for one row, piece by piece as tokens are committed. Raises at the call, as `generate`."""
        return (piece.text for piece in self.pieces(input_ids, attention_mask, **arguments) if piece.text)

    def pieces(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any
    ) -> PieceStream:
        """As `stream`, token by token: each with its text and how it came (drafted, bonus, correction, plain).

        The iterator's `stats` and `tokens` say how far it is; its `blocks()` gives the pieces of one verify step at a time.
        """
        if self.target.tokenizer is None:
            raise EagleError("streaming text needs the tokenizer; pass it to from_pretrained(..., tokenizer=...)")
        call = resolve(self.target, input_ids, attention_mask, **arguments)
        if call.beams is not None:
            raise EagleError("text of a search with num_beams cannot be streamed: it may change its mind; use generate")
        if len(call.rows) > 1:
            raise EagleError(f"text is streamed for one row, the batch has {len(call.rows)}; stream them one by one")
        return PieceStream(self._run(call.rows), call.rows[0], self.target.tokenizer)

    def _run(self, rows: list[Row]) -> Iterator[list[list[int]]]:
        """Yields, after every cycle, the tokens committed to each of `rows` (none for those that ended before)."""
        start = time.perf_counter()
        with self._turn, self._kernels(rows):
            batch, first = self._prefill(rows)
        yield first
        while True:
            with self._turn:
                batch = self._without_finished(batch)
            if not batch.rows:
                batch.stopwatch.settle(wait=True)
                return
            with self._turn, self._kernels(batch.rows):
                blocks = {id(row): block for row, block in zip(batch.rows, self._cycle(batch))}
            batch.stopwatch.settle()
            for row in batch.rows:
                row.stats.total_ms = 1e3 * (time.perf_counter() - start)
            yield [blocks.get(id(row), []) for row in rows]

    @contextmanager
    def _kernels(self, rows: Sequence[Row]) -> Iterator[None]:
        """Within the block, kernels run as this decoder wants, and the rows' stats count them."""
        before = snapshot()
        with nullcontext() if self.kernels == "auto" else using(self.kernels):
            yield
        for row in rows:
            row.stats.count_kernels(since(before))

    def _prefill(self, rows: list[Row]) -> tuple[_Batch, list[list[int]]]:
        """The prompts' features and every row's first token; the drafter sees them all."""
        verifier = Verifier(self.rule, self.target, rows)
        lengths_B = torch.tensor([len(row.tokens) for row in rows])
        ids_BT = pad_sequence([torch.tensor(row.tokens) for row in rows], batch_first=True)
        longest = max(len(row.tokens) + row.max_new_tokens for row in rows)
        cache = self.target.new_cache(rows=len(rows), capacity=longest + TREE_ROOM)
        device = self.target.device
        self._batches += 1
        batch = _Batch(
            rows=rows,
            cache=cache,
            verifier=verifier,
            device=device,
            stopwatch=Stopwatch(device),
            number=self._batches,
        )
        with batch.clock("prefill_ms"):
            states = self.target.prefill(ids_BT, lengths_B, cache, self._aux_layers)
            tokens_B = verifier.first(states.features_BNH[torch.arange(len(rows)), lengths_B - 1])
        batch.stopwatch.settle(wait=True)
        for row in rows:
            row.stats.total_ms = row.stats.prefill_ms
            row.stats.rule, row.stats.lossless = self.rule.name, self.rule.lossless
            row.stats.engine = self.target.engine
            row.stats.kv_bytes_per_token = cache.row_bytes // cache.capacity
        if self.drafter is not None:
            with batch.clock("draft_ms"):
                self.drafter.reset(rows, capacity=cache.capacity)
                next_BT = torch.cat([ids_BT[:, 1:], torch.zeros(len(rows), 1, dtype=torch.int64)], dim=1)
                next_BT[torch.arange(len(rows)), lengths_B - 1] = torch.tensor(tokens_B)
                self.drafter.observe(self._observed(states), next_BT, lengths_B)
        return batch, [row.emit([token]) for row, token in zip(rows, tokens_B)]

    def _cycle(self, batch: _Batch) -> list[list[int]]:
        """Drafts a tree per row, verifies them in one forward, commits the accepted paths. Returns each row's block.

        Trees are grown, run and walked where the target is; what was accepted is read once (eagle/verify/verifier.py), and
        only there does the host wait for a device on which the kernels run. All that is launched behind it comes from the host.
        """
        with batch.clock("draft_ms"):
            tree = self._propose(batch)
        for row in batch.rows:
            row.stats.nodes += tree.nodes
        with batch.clock("verify_ms"):
            states = self.target.tree_forward(
                tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, batch.cache, self._aux_layers
            )
        walks = batch.verifier.walks(tree, states.features_BNH, lambda: batch.clock("verify_ms"))
        # Where a row stops at a node its walk has no token behind it: the row is left out of the next cycle.
        path_BK = pad_sequence([torch.tensor(walk.path[: len(walk.tokens)]) for walk in walks], batch_first=True)
        counts_B = torch.tensor([len(walk.tokens) for walk in walks])
        batch.cache.commit(path_BK, counts_B)
        blocks = [self._commit(row, walk) for row, walk in zip(batch.rows, walks)]
        if self.drafter is not None and not all(row.finished for row in batch.rows):
            with batch.clock("draft_ms"):
                states_BNX = self._observed(states)
                states_BKX = pick(states_BNX, path_BK)
                next_BK = pad_sequence([torch.tensor(walk.tokens) for walk in walks], batch_first=True)
                self.drafter.observe(states_BKX, next_BK, counts_B)
        return blocks

    @property
    def _aux_layers(self) -> Sequence[int]:
        return () if self.drafter is None else self.drafter.aux_layers

    def _observed(self, states: TargetStates) -> torch.Tensor:
        """[B, N, X]: what the drafter asked to see."""
        if not self._aux_layers:
            return states.features_BNH
        assert states.aux_BNA is not None
        return states.aux_BNA

    def _propose(self, batch: _Batch) -> DraftTree:
        if self.drafter is None:
            return DraftTree.roots(sent(torch.tensor([row.tokens[-1] for row in batch.rows]), batch.device))
        if batch.number != self._batches:
            raise EagleError(
                "another text was begun with this decoder, whose drafter follows one batch at a time: end the first stream "
                "before the next, or make a decoder for each (SpeculativeDecoder.from_pretrained(decoder.target, head))"
            )
        tree = self.drafter.propose()
        if self.target.max_positions is None:
            return tree
        # No node beyond the last position: learned position tables end there.
        return tree.up_to_depth(self.target.max_positions - 1 - batch.cache.longest)

    def _commit(self, row: Row, walk: Walk) -> list[int]:
        row.stats.count_step(path_length=len(walk.path), at_leaf=walk.at_leaf)
        block = row.emit(walk.tokens)
        row.sampler.forget_before(len(row.tokens))
        return block

    def _without_finished(self, batch: _Batch) -> _Batch:
        """The batch without its finished rows: they cost nothing from here on."""
        running = [b for b, row in enumerate(batch.rows) if not row.finished]
        if len(running) == len(batch.rows):
            return batch
        if running:
            batch.cache.keep_rows(running)
            if self.drafter is not None and batch.number == self._batches:
                self.drafter.keep_rows(running)
        rows = [batch.rows[b] for b in running]
        return dataclasses.replace(batch, rows=rows, verifier=Verifier(self.rule, self.target, rows))


def _output(call: Arguments, input_ids: torch.Tensor) -> SpeculativeOutput:
    """Hugging Face's layout: the input as it was given (its padding included), then the answers, right-padded."""
    rows, copies = call.rows, len(call.rows) // len(input_ids)
    answers_BN = pad_sequence(
        [torch.tensor(row.new_tokens) for row in rows], batch_first=True, padding_value=call.pad_token_id
    ).to(input_ids.device)
    scores = None
    if call.output_scores:
        blank_V = torch.zeros_like(rows[0].scores[0])
        scores = tuple(
            torch.stack([row.scores[step] if step < len(row.new_tokens) else blank_V for row in rows])
            for step in range(answers_BN.shape[1])
        )
    sequences = torch.cat([input_ids.repeat_interleave(copies, dim=0), answers_BN], dim=1)
    return SpeculativeOutput(sequences=sequences, scores=scores, stats=[row.stats for row in rows])


def _search_output(call: Arguments, searches: list[RowSearch], input_ids: torch.Tensor) -> SpeculativeOutput:
    """As `_output`, with the answers that the searches found."""
    answers = [answer for one in searches for answer in one.answers()]
    answers_BN = pad_sequence(
        [torch.tensor(answer.tokens, dtype=torch.int64) for answer in answers],
        batch_first=True,
        padding_value=call.pad_token_id,
    ).to(input_ids.device)
    copies = len(answers) // len(input_ids)
    return SpeculativeOutput(
        sequences=torch.cat([input_ids.repeat_interleave(copies, dim=0), answers_BN], dim=1),
        sequences_scores=torch.tensor([answer.score for answer in answers], device=input_ids.device),
        stats=[row.stats for row in call.rows],
    )
