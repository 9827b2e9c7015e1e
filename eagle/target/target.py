"""Target: one door to any Hugging Face decoder-only causal LM, by path, hub id, GGUF file or loaded object.

B rows, T tokens, N tree nodes, L prefix length, H hidden, V vocabulary, W = ceil(N / 64).
No modelling file is forked: keys and values go through a `Cache` of our own, tree attention through transformers'
attention interface (eagle/target/attention.py), aux features through hooks that live for one forward.
"""

import copy
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.kernels.placement import sent
from eagle.kernels.tree_attention.steady import SLOTS
from eagle.target import products
from eagle.target.attention import TreeStep, tree_attention
from eagle.target.cache import TreeCache
from eagle.target.cuda_graph import Capture
from eagle.target.endings import eos_sources, say_where_answers_end
from eagle.target.engine import Engine, EngineChoice, packed_copy, packed_layers, why_not_packed
from eagle.target.fixed_cache import StaticCache
from eagle.target.fixed_forward import StaticForward, check_capturable
from eagle.target.loading import load_model, load_tokenizer, refuse_config, tokenizer_identity
from eagle.target.model_parts import cache_keyword, decoder_layers, weights_hash
from eagle.target.probe import check_architecture, check_forward, longrope_switch
from eagle.target.token_layers import TokenLayers

PREFILL_CHUNK = 1024
"""Tokens per prefill forward: bounds the mask to chunk x prefix."""


class TargetStates(NamedTuple):
    """What one forward of the target tells about N positions."""

    features_BNH: torch.Tensor
    """The last hidden state, after the final norm."""
    aux_BNA: torch.Tensor | None = None
    """Hidden states after the layers that were asked for, concatenated in that order; None where none were."""


class Target:
    """A frozen causal LM seen as what drafting needs: embeddings, features, logits, and a forward over a tree.

    features: the last hidden state AFTER the final norm, so that `logits(features)` are the model's logits.
    Construction probes the model (unless probe=False) and raises EagleError, with the reason, when `logits(features)`
    or a tree forward would not equal the model's own computation.

    Threads may share it, and its model: forwards wait for each other. A thread that calls the model itself meanwhile does
    so within `with target.lock:`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        probe: bool = True,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path or type(model).__name__
        self.decoder: nn.Module = model.get_decoder()
        self.lock = _lock_of(self.decoder)
        self._engine = self.decoder  # what tree forwards and prefills run on
        self.engine: Engine = "eager"
        self.static: StaticForward | None = None  # of the engine "cudagraph"
        self.capture: Capture = "cuda"
        self.config: PreTrainedConfig = self.decoder.config
        check_architecture(model, self.config, self.name)
        self.tokens = self._plain_tokens = TokenLayers.of_model(model, self.config)
        self._cache_keyword = cache_keyword(self.decoder)
        self._layers = self._engine_layers = decoder_layers(self.decoder, self.num_layers)
        self._views: WeakValueDictionary[EngineChoice, Target] = WeakValueDictionary()
        self._views[self.engine] = self
        if probe:
            with self.lock:
                check_forward(self)

    @classmethod
    def from_config(cls, config: TargetConfig, chat_template: str | None = None) -> "Target":
        """Loads the model and tokenizer that a recipe's `target` section names."""
        return cls._loaded(config, load_tokenizer(config, chat_template))

    @classmethod
    def from_pretrained(
        cls, model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **config: Any
    ) -> "Target":
        """`model`: a path, hub id, .gguf file or loaded model; `config`: the other fields of TargetConfig, for a model that
        is yet to be loaded. Raises EagleError for anything else, or where it would have no effect."""
        if isinstance(model, PreTrainedModel):
            refuse_config(config, "a loaded model")
            return cls(model, tokenizer)
        fields = [field.name for field in dataclasses.fields(TargetConfig) if field.name != "model"]
        for name in config:
            if name not in fields:
                raise EagleError(f"unknown target setting {name}; expected some of {', '.join(fields)}")
        named = TargetConfig(model=str(model), **config)
        return cls._loaded(named, load_tokenizer(named) if tokenizer is None else tokenizer)

    @classmethod
    def _loaded(cls, config: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> "Target":
        target = cls(load_model(config), tokenizer, name=config.model)
        say_where_answers_end(target.name, target.model, tokenizer)
        return target

    def as_before(self, facts: Mapping[str, Any]) -> "Target":
        """This target run as `engine_facts` of an earlier run say."""
        view = copy.copy(self)
        view.use_engine(facts["engine"], products_given=facts.get("products"))
        return view

    def on_engine(self, engine: EngineChoice, *, capture: Capture = "cuda") -> "Target":
        """This target run by an engine, as for `use_engine`: itself, or another view of the same model. Who decodes with this
        one keeps its engine."""
        if engine == "auto" and self.engine != "eager":
            return self
        view = self if self.engine == engine else self._views.get(engine)
        if view is None or (view.engine != engine and engine != "auto"):
            view = copy.copy(self)
            view.use_engine(engine, capture=capture)
            self._views[engine] = self._views[view.engine] = view
        return view

    def use_engine(
        self,
        engine: EngineChoice,
        *,
        capture: Capture = "cuda",
        products_given: Mapping[str, products.Product] | None = None,
    ) -> None:
        """Runs tree forwards and prefills with this engine (eagle/target/engine.py). `features` keeps to the model itself.

        "auto": what it has, if that is not eager; else cudagraph on a CUDA device where it can be captured, compiled on a CPU
        where it can be packed. capture: "none" (tests) runs the fixed shapes of "cudagraph" without a graph, on any device.
        products_given: of "compiled", those that an earlier run chose.
        Raises EagleError, with the reason, where the engine cannot be had.
        """
        if engine == self.engine:
            return
        if engine not in get_args(EngineChoice):
            raise EagleError(f"engine {engine!r} is not one; expected {', '.join(get_args(EngineChoice))}")
        if engine == "auto":
            if self.engine == "eager":
                self._use_fastest(capture)
            return
        static, packed = None, engine == "compiled"
        if engine == "cudagraph":
            static = StaticForward(layers=self.num_layers, device=self.device, capture=capture)
        with self.lock:
            if static is not None:
                check_capturable(
                    self.decoder,
                    lambda copied: partial(self._run, copied),
                    name=self.name,
                    layers=self.num_layers,
                    device=self.device,
                )
            self._engine = packed_copy(self.decoder, products_given) if packed else self.decoder
        self.tokens = self._plain_tokens.packed(products_given) if packed else self._plain_tokens
        self._engine_layers = decoder_layers(self._engine, self.num_layers)
        self.engine, self.static, self.capture = engine, static, capture

    def _use_fastest(self, capture: Capture) -> None:
        if self.device.type == "cuda":
            try:
                self.use_engine("cudagraph", capture=capture)
            except EagleError:  # not capturable, or spread over devices: the reason is told to who asks for it by name
                self.use_engine("eager")
        else:
            self.use_engine("compiled" if why_not_packed(self.model) is None else "eager")

    @property
    def running(self) -> nn.Module:
        """The decoder that the engine runs: the model's own, or the engine's copy of it."""
        return self._engine

    @property
    def engine_facts(self) -> dict[str, Any]:
        """What runs, for manifests and results: the engine and, of "compiled", its products and what their copies take."""
        if self.engine != "compiled":
            return {"engine": self.engine}
        return {"engine": self.engine} | products.facts([*packed_layers(self._engine), *packed_layers(self.tokens)])

    @property
    def hidden_size(self) -> int:
        return self.tokens.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.tokens.vocab_size

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def model_type(self) -> str:
        """Its family, as runtimes name it."""
        return str(self.config.model_type)

    @property
    def device(self) -> torch.device:
        return self.tokens.embedding_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.lm_head_VH.dtype

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that is decoded; None when the model does not say.

        That it is made for; under LongRoPE, what it was first trained on: beyond that its frequencies depend on the longest
        position of each forward, so that pieces of one text would be rotated differently.
        """
        longest: int | None = getattr(self.config, "max_position_embeddings", None)
        return longrope_switch(self.config) or longest

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: all that any source names (eagle/target/endings.py). `generate` keeps to the generation
        config, as Hugging Face's does; what answers a conversation passes these."""
        sources = eos_sources(self.model, self.tokenizer)
        return tuple(dict.fromkeys(token for ids in sources.values() for token in ids))

    def identity(self) -> dict[str, Any]:
        """What makes this target this one: stores and heads record it, and stale ones are refused by it."""
        return {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "weights_sha256": weights_hash(self.model),
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "vocab_size": self.vocab_size,
        }

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> [B, T, H]."""
        return self.tokens.embed(ids_BT)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]."""
        return self.tokens.logits(features)

    @torch.inference_mode()
    def features(self, ids_BT: torch.Tensor, aux_layers: Sequence[int] = ()) -> TargetStates:
        """int64 [B, T], right-padded (harmless: attention is causal) -> features [B, T, H], aux [B, T, len * H] or None.

        aux_layers: numbers of layers applied (Hugging Face's hidden_states index), concatenated in that order.
        """
        with self.lock, self._recording(self._layers, aux_layers) as recorded:
            out = self.decoder(input_ids=ids_BT.to(self.device), use_cache=False)
        return self._states(out.last_hidden_state, recorded, aux_layers)

    def new_cache(self, *, rows: int, capacity: int) -> TreeCache:
        """An empty cache for `rows` sequences of up to `capacity` tokens and tree nodes."""
        if self.static is not None:
            with self.lock:
                return self.static.new_cache(rows=rows, capacity=capacity)
        if self.engine == "compiled":
            capacity = -(-capacity // SLOTS) * SLOTS
        return TreeCache(layers=self.num_layers, rows=rows, capacity=capacity)

    @torch.inference_mode()
    def prefill(
        self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, cache: TreeCache, aux_layers: Sequence[int] = ()
    ) -> TargetStates:
        """Right-padded prompts int64 [B, T] of lengths_B tokens into an empty cache; commits them. -> their states.

        aux_layers: as for `features`.
        """
        assert not bool(cache.lengths_B.any()), "prefill needs an empty cache"
        rows, tokens = ids_BT.shape
        cache.reserve(tokens)
        chunks: list[TargetStates] = []
        for start in range(0, tokens, PREFILL_CHUNK):
            ids_chunk = ids_BT[:, start : start + PREFILL_CHUNK]
            depths_BN = torch.arange(ids_chunk.shape[1]).expand(rows, -1)
            cache.lengths_B = torch.full((rows,), start)
            counts_B = (lengths_B.cpu() - start).clamp(0, ids_chunk.shape[1])
            step = TreeStep(lengths_B=cache.lengths_B, depths_BN=depths_BN, ancestors_BNW=None, counts_B=counts_B)
            chunks.append(self.run_step(ids_chunk, step, cache, aux_layers))
        cache.lengths_B = lengths_B.to("cpu", torch.int64).clone()
        aux = [chunk.aux_BNA for chunk in chunks if chunk.aux_BNA is not None]
        return TargetStates(
            torch.cat([chunk.features_BNH for chunk in chunks], dim=1), torch.cat(aux, dim=1) if aux else None
        )

    @torch.inference_mode()
    def tree_forward(
        self,
        tokens_BN: torch.Tensor,
        depths_BN: torch.Tensor,
        ancestors_BNW: torch.Tensor,
        cache: TreeCache,
        aux_layers: Sequence[int] = (),
    ) -> TargetStates:
        """States of the N nodes behind each row's prefix; their keys and values wait for `cache.commit`."""
        step = TreeStep(lengths_B=cache.lengths_B, depths_BN=depths_BN, ancestors_BNW=ancestors_BNW)
        return self.run_step(tokens_BN, step, cache, aux_layers)

    @torch.inference_mode()
    def run_step(
        self, tokens_BN: torch.Tensor, step: TreeStep, cache: TreeCache, aux_layers: Sequence[int] = ()
    ) -> TargetStates:
        """States of any step's nodes (a tree, some levels of one, a causal chunk); commits nothing."""
        if self.static is not None and self.static.takes(step):
            assert isinstance(cache, StaticCache), "the cache was made before use_engine"
            forward = partial(self._run, self._engine, aux_layers=aux_layers)
            with self.lock:
                return TargetStates(*self.static.run(forward, tokens_BN, step, cache, variant=tuple(aux_layers)))
        if self.engine == "compiled":
            step.be_steady()
        cache.reserve(max(step.offset + tokens_BN.shape[1], step.slots - cache.longest))
        positions_BN = step.positions_on(self.device)
        place = cache.behind(count=tokens_BN.shape[1], offset=step.offset, slots=step.slots)
        with self.lock, cache.writing(place):
            return TargetStates(
                *self._run(self._engine, sent(tokens_BN, self.device), positions_BN, step, cache, aux_layers=aux_layers)
            )

    def _run(
        self,
        decoder: nn.Module,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        step: TreeStep,
        cache: TreeCache,
        features_BNH: torch.Tensor | None = None,
        *,
        aux_layers: Sequence[int] = (),
    ) -> tuple[torch.Tensor, ...]:
        """TargetStates' tensors; `decoder` is the model, packed or not. A static_forward.Forward but for the first argument."""
        with tree_attention(decoder.config, step), self._recording(self._engine_layers, aux_layers) as recorded:
            out = decoder(
                input_ids=tokens_BN, position_ids=positions_BN, use_cache=True, **{self._cache_keyword: cache}
            )
        if step.layers_served != self.num_layers:
            raise EagleError(
                f"target {self.name}: {step.layers_served} of {self.num_layers} layers went through transformers' attention "
                "interface; the others cannot be verified as a tree, so this target is not supported"
            )
        states = self._states(out.last_hidden_state, recorded, aux_layers)
        return (states.features_BNH,) if states.aux_BNA is None else (states.features_BNH, states.aux_BNA)

    def _states(
        self, features_BNH: torch.Tensor, recorded: dict[int, torch.Tensor], aux_layers: Sequence[int]
    ) -> TargetStates:
        if not aux_layers:
            return TargetStates(features_BNH)
        return TargetStates(features_BNH, torch.cat([recorded[c].to(self.device) for c in aux_layers], dim=-1))

    @contextmanager
    def _recording(self, layers: nn.ModuleList, aux_layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Within the block, inputs of the layers c in aux_layers (= hidden states after c layers) are recorded."""
        recorded: dict[int, torch.Tensor] = {}
        outside = [c for c in aux_layers if not 0 <= c < self.num_layers]
        if outside:
            raise EagleError(
                f"aux layers {outside} do not exist; {self.name} has hidden states 0 .. {self.num_layers - 1}"
            )

        def hook(c: int) -> Any:
            def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                recorded[c] = args[0] if args else kwargs["hidden_states"]

            return record

        handles = [layers[c].register_forward_pre_hook(hook(c), with_kwargs=True) for c in aux_layers]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def _lock_of(decoder: nn.Module) -> threading.RLock:
    """One a model, whatever Targets were made of it: a forward over a tree changes its configuration and its hooks."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(decoder, threading.RLock())


__all__ = ["Target", "TargetStates", "load_tokenizer", "tokenizer_identity", "weights_hash"]
