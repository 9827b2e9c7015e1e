"""What a target must satisfy to be verified as a tree: checked at load, refused with the reason.

Two layers: what the config says (recurrent layers, chunked attention, encoder-decoders), then a forward of a dozen
tokens, where `logits(features)` must equal the model's logits and a tree forward, with siblings in between and a
commit in the middle, must equal the plain forward of each path.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from eagle.errors import EagleError
from eagle.target.routers import closest, routers_recorded

if TYPE_CHECKING:
    from eagle.target.target import Target

# Largest allowed difference, relative to the largest value. Matmuls of other shapes round differently; in half
# precision a mixture of experts may also route a token differently.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_architecture(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> None:
    """Raises EagleError for architectures that cannot be verified as a tree, as far as their config tells."""
    if model.config.is_encoder_decoder:
        raise EagleError(
            f"target {name} is an encoder-decoder ({type(model).__name__}); a decoder-only causal LM is needed"
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if "chunked_attention" in other:
        raise EagleError(
            f"target {name} has chunked-attention layers: their chunks are cut by cache index, which a tree does not follow"
        )
    if other or getattr(model, "_is_stateful", False):
        kinds = ", ".join(other) or type(model).__name__
        raise EagleError(
            f"target {name} has recurrent layers ({kinds}): their state cannot be rolled back to the accepted path of a "
            "tree; use a target whose layers are all full or sliding-window attention"
        )
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        raise EagleError(
            f"target {name} uses dynamic RoPE scaling: its frequencies depend on the length of each forward, so a tree would "
            "be rotated differently from plain decoding; set another rope_type (yarn, linear, llama3)"
        )


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The RoPE settings, of all kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]


def longrope_switch(config: PreTrainedConfig) -> int | None:
    """The length from which on LongRoPE rotates with its long factors; None: no LongRoPE."""
    own = getattr(config, "original_max_position_embeddings", None)
    found = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    lengths = [rope.get("original_max_position_embeddings") or own for rope in found]
    return min((length for length in lengths if length), default=None)


@torch.inference_mode()
def check_forward(target: "Target") -> None:
    """Raises EagleError when `logits(features)` or a tree forward differs from the model's own forward."""
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, target.vocab_size, (12,), generator=generator)
    decoys_N = torch.randint(0, target.vocab_size, (3,), generator=generator)

    output = target.model(input_ids=ids_T[None].to(target.device), use_cache=False)
    with routers_recorded(target.model) as routers:
        features_1TH, _ = target.features(ids_T[None])
    own = target.logits(features_1TH).to(output.logits.device)
    _compare(
        target,
        own,
        output.logits,
        "logits(features) differ from the model's own logits (an unknown scaling or soft-capping)",
    )
    embeddings = target.embed(ids_T[None])
    module = target.model.get_input_embeddings()(ids_T[None].to(target.device))
    _compare(target, embeddings, module, "the embedding layer does more than a lookup and a scale")

    try:
        got = _tree_features(target, ids_T, decoys_N)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError, IndexError) as error:
        raise EagleError(
            f"target {target.name} ({type(target.model).__name__}) cannot run a forward over a tree with a cache of ours "
            f"({str(error).splitlines()[0]}); its attention needs more than queries, keys, values and positions"
        ) from error
    expert = closest(routers)
    _compare(
        target,
        got,
        features_1TH[:, :10],
        f"its routers cannot tell experts apart, so rounding chooses between them and another forward of the same tokens differs "
        f"({expert})"
        if expert is not None and expert.tie
        else "a tree forward differs from the plain forward (attention that reads more than queries, keys, values and positions, "
        "such as ALiBi, or a cache of its own)",
    )


def _tree_features(target: "Target", ids_T: torch.Tensor, decoys_N: torch.Tensor) -> torch.Tensor:
    """Features [1, 10, H] of tokens 0 .. 9: a prefix of 6, then a tree that holds tokens 6, 7, 8 as one path with a decoy
    beside each, then token 9 after the path was committed."""
    cache = target.new_cache(rows=1, capacity=32)
    prefix = target.prefill(ids_T[None, :6], torch.tensor([6]), cache)
    tokens = [ids_T[6], decoys_N[0], ids_T[7], decoys_N[1], decoys_N[2], ids_T[8]]
    depths, ancestors = [0, 0, 1, 1, 2, 2], [0b1, 0b10, 0b101, 0b1010, 0b10101, 0b100101]
    tree = target.tree_forward(
        torch.stack(tokens)[None], torch.tensor([depths]), torch.tensor([[[bits] for bits in ancestors]]), cache
    )
    cache.commit(torch.tensor([[0, 2, 5]]), torch.tensor([3]))
    last = target.tree_forward(ids_T[None, 9:10], torch.tensor([[0]]), torch.tensor([[[1]]]), cache)
    return torch.cat([prefix.features_BNH, tree.features_BNH[:, [0, 2, 5]], last.features_BNH], dim=1)


def _compare(target: "Target", got: torch.Tensor, expected: torch.Tensor, reason: str) -> None:
    scale = expected.float().abs().max().clamp_min(1e-6)
    difference = float((got.float() - expected.float()).abs().max() / scale)
    tolerance = TOLERANCE.get(expected.dtype, 1e-1)
    if not difference <= tolerance:  # also catches NaN
        raise EagleError(
            f"target {target.name} ({type(target.model).__name__}): {reason}; largest relative difference {difference:.2g}, "
            f"allowed {tolerance:.0e}. This target cannot be decoded losslessly here"
        )
