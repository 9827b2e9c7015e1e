"""HeadDrafter: drafting with a draft head of either version, whatever the shape of its trees."""

from collections.abc import Sequence

import torch

from eagle.draft.by_level import LevelDrafter, TreeShape
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.kernels.placement import sent
from eagle.sample.row import Row
from eagle.target.attention import TreeStep
from eagle.target.cache import TreeCache
from eagle.target.fixed_cache import StaticCache
from eagle.target.fixed_forward import StaticForward
from eagle.target.token_layers import TokenLayers


class HeadDrafter(LevelDrafter):
    """The head's cache holds committed pairs (f_i, t_{i+1}) only, computed from the target's own states.

    tokens: the target's embedding and LM head; of the latter, only the rows of the head's draft vocabulary are used, and
    none when the head has an LM head of its own (EAGLE-3). static: runs the head's levels in fixed shapes (engine
    "cudagraph"); None: eagerly.
    Raises EagleError when a node of the shape has more children than there are draft tokens.
    """

    def __init__(self, head: DraftHead, tokens: TokenLayers, shape: TreeShape, *, static: StaticForward | None = None):
        # A target may be spread over devices: draft logits lie where the LM head does that makes them.
        own = next((parameter.device for parameter in head.logit_parameters()), None)
        vocabulary = DraftTokens(tokens, head.vocabulary, device=own)
        super().__init__(shape, vocabulary, target_size=tokens.vocab_size)
        self.head, self.tokens, self.aux_layers, self.static = head, tokens, head.aux_layers, static

    def reset(self, rows: Sequence[Row], *, capacity: int) -> None:
        self.begin(rows)
        room = capacity + self.shape.columns
        if self.static is None:
            self.cache = TreeCache(layers=1, rows=len(rows), capacity=room)
        else:
            self.__dict__.pop("cache", None)  # the last batch's buffers go back before buffers are taken
            self.cache = self.static.new_cache(rows=len(rows), capacity=room)
        self.roots_B, self.predicted_BH = torch.empty(0), torch.empty(0)  # until the first observe

    @torch.inference_mode()
    def observe(self, states_BKX: torch.Tensor, next_tokens_BK: torch.Tensor, counts_B: torch.Tensor) -> None:
        rows, count = next_tokens_BK.shape
        depths_BN = torch.arange(count).expand(rows, -1)
        step = TreeStep(lengths_B=self.cache.lengths_B, depths_BN=depths_BN, ancestors_BNW=None)
        predictions_BKH = self.run(self.head.fuse(states_BKX.to(self.head.fc.weight)), next_tokens_BK, step)
        self._committed(predictions_BKH, next_tokens_BK, counts_B, written_B=counts_B)

    def run(self, features_BNH: torch.Tensor, tokens_BN: torch.Tensor, step: TreeStep) -> torch.Tensor:
        features_BNH = features_BNH.to(self.head.fc.weight)
        tokens_BN = sent(tokens_BN, self.tokens.embedding_VH.device)
        if self.static is not None and self.static.takes(step):
            assert isinstance(self.cache, StaticCache)
            return self.static.run(self._forward, tokens_BN, step, self.cache, features_BNH=features_BNH)[0]
        self.cache.reserve(step.offset + tokens_BN.shape[1])
        positions_BN = step.positions_on(features_BNH.device)
        with self.cache.writing(self.cache.behind(count=tokens_BN.shape[1], offset=step.offset)):
            return self._forward(tokens_BN, positions_BN, step, self.cache, features_BNH)[0]

    def _forward(
        self,
        tokens_BN: torch.Tensor,
        positions_BN: torch.Tensor,
        step: TreeStep,
        cache: TreeCache,
        features_BNH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """A static_forward.Forward: the predictions."""
        assert features_BNH is not None

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = cache.update(key, value, 0)
            return step.attend(query, keys, values, scaling=query.shape[-1] ** -0.5, window=self.head.window)

        embeddings_BNH = self.tokens.embed(tokens_BN).to(features_BNH)
        return (self.head(features_BNH, embeddings_BNH, positions_BN, attend),)

    def draft_logits(self, predictions_BNH: torch.Tensor) -> torch.Tensor:
        return self.head.logits(predictions_BNH, self.vocabulary)
