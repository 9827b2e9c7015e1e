"""Features in 8 bits: e4m3 with a float32 scale per token and block. S tokens, N blocks (1, or one per aux layer), H wide.

e4m3 has 3 bits of mantissa: a normal value is off by at most 1/16 of itself, and values below scale * 2^-6 by at most
scale * 2^-10.
"""

import torch

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
"""e4m3's largest finite value."""


def quantise(values_SA: torch.Tensor, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, blocks * H] -> float8 [S, blocks * H] and scales float32 [S, blocks], values = float8 * scale.

    scale = max |value| / 448 of the token's block, 1 where all are zero. Values that are not finite stay so (NaN).
    """
    values_SNH = values_SA.float().unflatten(-1, (blocks, -1))
    largest_SN = values_SNH.abs().amax(dim=-1)
    scale_SN = (largest_SN / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scale_SN = torch.where(largest_SN == 0, torch.ones_like(scale_SN), scale_SN)
    # Rounding of the division may lead a hair beyond the largest value, which e4m3 would make a NaN.
    scaled_SNH = (values_SNH / scale_SN[..., None]).clamp(-LARGEST, LARGEST)
    return scaled_SNH.to(DTYPE).flatten(-2), scale_SN


def dequantise(values_SA: torch.Tensor, scale_SN: torch.Tensor) -> torch.Tensor:
    """float32 [S, blocks * H] from what `quantise` made."""
    return (values_SA.float().unflatten(-1, (scale_SN.shape[1], -1)) * scale_SN[..., None]).flatten(-2)
