"""How far rounding alone moves a computation: it is run again with the last digit of every module's result drawn at random.

Two right ways of computing one thing (other kernels, other shapes of a product, another number of threads) round every
result on the way otherwise. How far the outcome moves by that follows from the dtype AND the weights: each layer, and each
depth of a draft, may make a difference grow. Of the largest logit, a random EAGLE-1 head in float32 moves by 1e-6 at depth 1
and by up to 2e-4 at depth 4, against float64 as against another kernel; an EAGLE-3 head, which norms what it is handed, by 1e-6
at every depth. No fixed number serves both, so it is measured: random rounding, the method known as CESTAC (Vignes, Math.
Comput. Simul. 35, 1993) or Monte Carlo arithmetic (Parker, UCLA CSD-970002, 1997).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROUNDINGS = 16
"""Times what `shaken` moves the outcome by that two right computations may lie apart. Over six families of random targets with
both versions of heads, two ways of computing lay 0.2 to 5 times as far apart: both sides round, and within modules too."""


@contextmanager
def shaken(*modules: nn.Module, seed: int) -> Iterator[None]:
    """Within the block, each number that a module, or one inside it, returns is moved by up to one unit of its last place."""
    generator = torch.Generator().manual_seed(seed)

    def shake(module: nn.Module, arguments: Any, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return None  # as it was
        moves = torch.rand(result.shape, generator=generator).mul_(2).sub_(1).to(result) * torch.finfo(result.dtype).eps
        return result * (1 + moves)

    inside = {inner: None for module in modules for inner in module.modules()}  # a module in two places is hooked once
    handles = [inner.register_forward_hook(shake) for inner in inside]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
