"""Unrolling a head over its own features: the chain of drafts from every index of a document at once.

T tokens of a document, K steps, h query heads, k key heads, d head size, I indices of a step. At step s index i takes
(the prediction of step s-1 at index i, e_{i+1+s}) at RoPE position i+s and predicts f_{i+1+s}; it attends to the step-0
keys j <= i, which come from true features, and to its own key of each step 1 .. s. That is what a chain drafted
after token i+1 computes, when its tokens are the document's (training-time test, arXiv 2503.01840, section 3.1).
"""

import torch

from eagle.heads import EagleHead

QUERY_BLOCK = 512
"""Queries scored at a time: bounds memory at h * QUERY_BLOCK * I scores."""


class ChainAttention:
    """The head's attention over one document at one chain step after the other: call it once per step, in order."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def __call__(self, query_BhId: torch.Tensor, key_BkId: torch.Tensor, value_BkId: torch.Tensor) -> torch.Tensor:
        """[B, h, I, d] -> [B, h, I, d]; a later step may have fewer indices (the document's end)."""
        groups = query_BhId.shape[1] // key_BkId.shape[1]
        self.keys.append(key_BkId.repeat_interleave(groups, dim=1))
        self.values.append(value_BkId.repeat_interleave(groups, dim=1))
        query_BhId = query_BhId * query_BhId.shape[-1] ** -0.5
        blocks = [
            self._block(query_BhId[:, :, start : start + QUERY_BLOCK], start)
            for start in range(0, query_BhId.shape[2], QUERY_BLOCK)
        ]
        return torch.cat(blocks, dim=2)

    def _block(self, query_BhCd: torch.Tensor, start: int) -> torch.Tensor:
        end = start + query_BhCd.shape[2]
        row_C1 = torch.arange(start, end, device=query_BhCd.device)[:, None]
        future_CI = torch.arange(end, device=query_BhCd.device) > row_C1
        true_BhCI = (query_BhCd @ self.keys[0][:, :, :end].mT).masked_fill(future_CI, float("-inf"))
        own = [(query_BhCd * key[:, :, start:end]).sum(dim=-1, keepdim=True) for key in self.keys[1:]]
        weights = torch.cat([true_BhCI, *own], dim=-1).softmax(dim=-1)
        out_BhCd = weights[..., :end] @ self.values[0][:, :, :end]
        for step, value in enumerate(self.values[1:]):
            out_BhCd = out_BhCd + weights[..., end + step, None] * value[:, :, start:end]
        return out_BhCd


def unroll(
    head: EagleHead, *, features_TH: torch.Tensor, embeddings_TH: torch.Tensor, depth: int
) -> list[torch.Tensor]:
    """The predictions of each chain step for one document of T >= 3 tokens: step s has [T - 2 - s, H].

    features_TH: the target's features; embeddings_TH: those of the document's tokens. Row i of step s predicts
    f_{i+1+s}. Fewer than `depth` steps come back where the document is too short.
    """
    indices = features_TH.shape[0] - 2
    attend, predictions = ChainAttention(), []
    inputs_IH = features_TH
    for step in range(min(depth, indices)):
        count = indices - step
        predicted_1IH = head(
            inputs_IH[None, :count],
            embeddings_TH[None, 1 + step : 1 + step + count],
            positions_BT=torch.arange(step, step + count, device=features_TH.device)[None],
            attend=attend,
        )
        inputs_IH = predicted_1IH[0]
        predictions.append(inputs_IH)
    return predictions
