"""Penalties on tokens that the answer already holds, which Hugging Face has no processor for."""

import torch


class CountPenalty:
    """Presence and frequency penalties: logit -= presence * [n > 0] + frequency * n, n = occurrences in the answer so far.

    prompt: unpadded prompt length; its tokens are not counted. Hugging Face's processor protocol.
    """

    def __init__(self, *, prompt: int, presence: float, frequency: float):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [M, T], scores float32 [M, V] -> [M, V]."""
        scores = scores.clone()
        for row_scores, row_ids in zip(scores, input_ids):
            seen, counts = row_ids[self.prompt :].unique(return_counts=True)
            row_scores[seen] -= self.presence + self.frequency * counts.to(scores.dtype)
        return scores
