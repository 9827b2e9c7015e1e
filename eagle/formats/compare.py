"""Two heads side by side: largest difference of weights, and of logits along a draft. V vocabulary, T tokens, H hidden."""

import dataclasses

import torch

from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead
from eagle.heads.vocabulary import DraftTokens
from eagle.target.token_layers import TokenLayers

STEPS, TOKENS = 3, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The largest absolute ones."""

    weights: float
    logits: float


@torch.inference_mode()
def difference(one: DraftHead, other: DraftHead, tokens: TokenLayers, *, seed: int = 0) -> Difference:
    """Both computed in float32; the logits at TOKENS random positions and STEPS recursive steps.

    tokens: the target's layers (an EAGLE-1 head's logits are by its LM head, here over all V). Raises EagleError for heads of
    different shapes.
    """
    mine, theirs = one.state_dict(), other.state_dict()
    names = {
        name
        for name in mine.keys() | theirs.keys()
        if name not in ("d2t", "t2d") and (name not in mine or name not in theirs)
    }
    if names or one.version != other.version:
        raise EagleError(f"the two heads are different: {', '.join(sorted(names)) or 'versions'} in one of them alone")
    if one.window != other.window:  # which TOKENS positions might not show
        raise EagleError(f"the two heads are different: attention windows {one.window} and {other.window}")
    weights = max(
        float((mine[name].float() - theirs[name].float()).abs().max()) for name in mine.keys() & theirs.keys()
    )
    return Difference(
        weights=weights, logits=float((_logits(one, tokens, seed) - _logits(other, tokens, seed)).abs().max())
    )


def _logits(head: DraftHead, tokens: TokenLayers, seed: int) -> torch.Tensor:
    """[STEPS, T, V or D], from random features and the embeddings of random tokens."""
    dtype = next(head.parameters()).dtype
    generator = torch.Generator().manual_seed(seed)
    wide = head.fc.in_features if head.version == "eagle3" else head.config.hidden_size
    states_1TX = torch.randn(1, TOKENS, wide, generator=generator)
    ids_1T = torch.randint(tokens.vocab_size, (1, TOKENS + STEPS), generator=generator)
    embeddings_1TH = tokens.embed(ids_1T).float()
    plain = DraftTokens(tokens)
    try:
        head.float()
        features_1TH, out = head.fuse(states_1TX), []
        for step in range(STEPS):
            features_1TH = head(features_1TH, embeddings_1TH[:, step : step + TOKENS])
            out.append(
                head.logits(
                    features_1TH.to(tokens.lm_head_VH.dtype if head.version == "eagle1" else torch.float32), plain
                )
            )
        return torch.cat(out).float()
    finally:
        head.to(dtype)
