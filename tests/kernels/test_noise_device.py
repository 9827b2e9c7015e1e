"""The noise inside Triton kernels is the CPU sampler's: bits exactly, Gumbel values to float rounding, coins exactly."""

from typing import get_args

import numpy as np
import pytest
import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Path
from eagle.kernels.noise.op import gumbel_rows
from eagle.kernels.noise.reference import COINS, COUPLING, DRAFTS, FINALS, coin, gumbel, random_bits

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
device_noise = pytest.importorskip("eagle.kernels.noise.device")

token_bits, token_gumbel, scattered_gumbel = (
    device_noise.token_bits,
    device_noise.token_gumbel,
    device_noise.scattered_gumbel,
)
gumbel_of, device_coin = device_noise.gumbel_of, device_noise.coin
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = [0, 7, 2**64 - 1, 0x1234_5678_9ABC_DEF0]


@triton.jit
def _draw(Bits, Dense, Scattered, Seed, Position, first, stream, BLOCK: tl.constexpr):
    seed, position = tl.load(Seed), tl.load(Position).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    tl.store(Bits + lane, token_bits(seed, position, first, stream, BLOCK).to(tl.int64))
    tl.store(Dense + lane, token_gumbel(seed, position, first, BLOCK))
    tl.store(Scattered + lane, scattered_gumbel(seed, position, first + lane))


@triton.jit
def _toss(Out, Seed, Position, index, stream):
    tl.store(Out, device_coin(tl.load(Seed), tl.load(Position).to(tl.int32), index, stream))


@triton.jit
def _transform(Out, Bits, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(Out + lane, gumbel_of(tl.load(Bits + lane).to(tl.uint32)))


def signed(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64)).to(DEVICE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("position", "first", "stream"), [(3, 0, COUPLING), (70_000, 1024, DRAFTS)])
def test_bits_and_gumbel_values_are_the_references(seed: int, position: int, first: int, stream: int) -> None:
    block = 64
    bits = torch.zeros(block, dtype=torch.int64, device=DEVICE)
    dense, scattered = torch.zeros(block, device=DEVICE), torch.zeros(block, device=DEVICE)
    at = torch.tensor([position], device=DEVICE)
    _draw[(1,)](bits, dense, scattered, signed(seed), at, first, stream, BLOCK=block)
    assert (bits.cpu() & 0xFFFFFFFF).tolist() == random_bits(seed, position, first + block, stream=stream)[
        first:
    ].tolist()
    expected = gumbel(seed, position, first + block)[first:]
    torch.testing.assert_close(dense.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(dense, scattered)


def test_gumbel_values_are_accurate_at_both_ends() -> None:
    """All words near 0 and 2^32, and powers of two: relative to the reference's float64 within a few roundings."""
    near = [*range(24), *(2**e + d for e in range(5, 33) for d in (-3, -2, -1, 0, 1))]
    words = torch.tensor(sorted({w for w in near if 0 <= w < 2**32} | {2**32 - 1 - w for w in range(24)}))
    count = triton.next_power_of_2(len(words))
    padded = torch.nn.functional.pad(words, (0, count - len(words)), value=1).to(DEVICE)
    out = torch.zeros(count, device=DEVICE)
    _transform[(1,)](out, padded, BLOCK=count)
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
    assert bool(out.isfinite().all())
    error = (out[: len(words)].cpu().double() - exact).abs()
    assert bool((error <= 4e-7 * exact.abs().clamp_min(1)).all()), error.max()


@pytest.mark.parametrize("seed", SEEDS)
def test_coins_are_the_references_to_the_last_bit(seed: int) -> None:
    out = torch.zeros(1, dtype=torch.float64, device=DEVICE)
    for position, index, stream in ((5, 0, COINS), (70_000, 3, COINS), (9, 0, FINALS)):
        _toss[(1,)](out, signed(seed), torch.tensor([position], device=DEVICE), index, stream)
        assert float(out) == coin(seed, position, index, stream=stream)


@pytest.mark.parametrize("tokens", [1, 1030])
def test_rows_of_noise_have_their_own_seeds_positions_and_cycles(tokens: int) -> None:
    seeds, positions, cycles = [5, 2**64 - 1], [3, 2**31 + 9], [0, 70_000]
    seed_B = torch.cat([signed(seed) for seed in seeds])
    at, cycle = torch.tensor(positions, device=DEVICE), torch.tensor(cycles, device=DEVICE)
    for backend in get_args(Path):
        drawn = gumbel_rows(seed_B, at, tokens, stream=DRAFTS, cycles_B=cycle, backend=backend)
        for row in range(2):
            expected = gumbel(seeds[row], positions[row], tokens, stream=DRAFTS, cycle=cycles[row])
            torch.testing.assert_close(drawn[row].cpu(), expected, rtol=1e-6, atol=1e-6)
    coupling = gumbel_rows(seed_B[:1], at[:1], tokens, backend="triton")
    torch.testing.assert_close(coupling[0].cpu(), gumbel(5, 3, tokens), rtol=1e-6, atol=1e-6)


def test_rows_of_other_types_are_refused() -> None:
    with pytest.raises(EagleError, match=r"positions are torch.int32 \(1,\).*expected int64"):
        gumbel_rows(signed(1), torch.zeros(1, dtype=torch.int32, device=DEVICE), 4)
