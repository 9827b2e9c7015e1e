"""What is found in a Hugging Face model without knowing its family: a hash of its weights, its cache's name, its layers."""

import hashlib
import inspect

from torch import nn

from eagle.errors import EagleError


def weights_hash(model: nn.Module, samples: int = 1024) -> str:
    """SHA-256 over every tensor's name, shape and up to `samples` evenly spaced values: a fine-tune changes it, and it
    takes a second where hashing all bytes of a large model takes minutes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // samples)][:samples].float().cpu().contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(picked.numpy().tobytes())
    return digest.hexdigest()


def cache_keyword(decoder: nn.Module) -> str:
    """`past_key_values` until transformers 5.23, `cache` from 5.24 on."""
    parameters = inspect.signature(decoder.forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise EagleError(
        f"{type(decoder).__name__}.forward takes neither 'cache' nor 'past_key_values': it keeps no key/value cache, so a "
        "tree cannot be verified with it; use an attention-based causal LM"
    )


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise EagleError(
        f"{type(decoder).__name__} has no list of {count} decoder layers; this architecture is not supported"
    )
