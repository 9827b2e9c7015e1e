"""How likely the target itself finds a text. V vocabulary."""

from collections.abc import Sequence

import torch

from eagle.target.target import Target

_CHUNK = 64
"""Positions whose logits are held at a time."""


@torch.inference_mode()
def negative_log_likelihood(target: Target, prompt_ids: Sequence[int], tokens: Sequence[int]) -> float:
    """Nats: -sum of log p(token | all before it) over `tokens`, the target at temperature 1, without filters or processors."""
    ids_1T = torch.tensor([[*prompt_ids, *tokens]], device=target.device)
    features_1TH, _ = target.features(ids_1T[:, :-1])
    features_NH, next_N = features_1TH[0, len(prompt_ids) - 1 :], ids_1T[0, len(prompt_ids) :]
    total = 0.0
    for start in range(0, len(next_N), _CHUNK):
        log_p_NV = target.logits(features_NH[start : start + _CHUNK]).float().log_softmax(-1)
        total -= float(log_p_NV.gather(1, next_N[start : start + _CHUNK, None]).double().sum())
    return total
