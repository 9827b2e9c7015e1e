"""The noise: Philox's published answers, Triton's layout, the Gumbel distribution, and what the numbers depend on."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import EagleError
from eagle.sample.noise import COINS, COUPLING, DRAFTS, coin, gumbel, philox, random_bits, row_seeds

# Random123's kat_vectors: philox4x32, 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
EULER = 0.5772156649015329
GOLDEN_ROW_SEEDS = [8208617855645001075, 12012849991934950074, 218290471009979175]
GOLDEN_NOISE = [0.246019, 5.810614, -0.839592, 1.017803, -1.310075]


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    low, high = _words(key)
    c0, *rest = _words(counter)
    got = philox(low | high << 32, torch.tensor([c0]), *rest)
    assert [int(word) for word in got] == _words(expected)


def test_philox_takes_counters_as_numbers_or_tensors_and_computes_each_lane_alone() -> None:
    lanes = torch.tensor([0, 1, 2**32 - 1])
    together = philox(5, lanes, torch.tensor([7, 8, 9]), 1, 2)
    for lane, c1 in zip(range(3), (7, 8, 9)):
        alone = philox(5, lanes[lane : lane + 1], c1, 1, 2)
        assert [int(word[lane]) for word in together] == [int(word) for word in alone]


# Run in its own process: TRITON_INTERPRET is read when triton is imported.
_TRITON = """
import json, sys
import torch, triton, triton.language as tl

@triton.jit
def words(out, seed, position, stream, cycle, CALLS: tl.constexpr):
    calls = tl.arange(0, CALLS)
    a, b, c, d = tl.philox(seed, calls, calls * 0 + position, calls * 0 + stream, calls * 0 + cycle)
    tl.store(out + calls * 4, a.to(tl.int32, bitcast=True))
    tl.store(out + calls * 4 + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + calls * 4 + 2, c.to(tl.int32, bitcast=True))
    tl.store(out + calls * 4 + 3, d.to(tl.int32, bitcast=True))

@triton.jit
def rand4x(out, seed, offset, CALLS: tl.constexpr):
    calls = tl.arange(0, CALLS)
    a, b, c, d = tl.rand4x(seed, offset + calls)
    tl.store(out + calls * 4, a)
    tl.store(out + calls * 4 + 1, b)
    tl.store(out + calls * 4 + 2, c)
    tl.store(out + calls * 4 + 3, d)

seed, position, calls = json.loads(sys.argv[1])
bits = []
for stream, cycle in ((0, 0), (1, 0), (2, 5)):
    out = torch.zeros(4 * calls, dtype=torch.int32)
    words[(1,)](out, seed, position, stream, cycle, CALLS=calls)
    bits.append([x & 0xFFFFFFFF for x in out.tolist()])
out = torch.zeros(4 * calls)
rand4x[(1,)](out, seed, position << 32, CALLS=calls)
print(json.dumps({"bits": bits, "rand4x": out.tolist()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "position"), [(7, 3), (0x1234_5678_9ABC_DEF0, 70_000)])
def test_the_bits_are_those_of_triton(seed: int, position: int, tmp_path: Path) -> None:
    """tl.philox with counter (token // 4, position, stream, cycle); tl.rand4x(seed, position << 32 | token // 4) is the
    coupling stream."""
    pytest.importorskip("triton")
    script = tmp_path / "kernels.py"
    script.write_text(_TRITON)
    run = subprocess.run(
        [sys.executable, str(script), json.dumps([seed, position, 8])],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    triton = json.loads(run.stdout)
    for (stream, cycle), expected in zip(((COUPLING, 0), (COINS, 0), (DRAFTS, 5)), triton["bits"]):
        assert random_bits(seed, position, 32, stream=stream, cycle=cycle).tolist() == expected
    # Triton makes floats of signed words: x >= 0 -> x * 2^-31 (nearly), x < 0 -> -x - 1.
    words = random_bits(seed, position, 32).numpy().astype(np.uint32).view(np.int32).astype(np.int64)
    uniforms = np.where(words < 0, -words - 1, words) * 4.6566127342e-10
    np.testing.assert_allclose(triton["rand4x"], uniforms, rtol=1e-6)


def test_the_noise_is_gumbel() -> None:
    """Mean, variance, skewness and the distribution function of 400,000 draws."""
    draws = torch.cat([gumbel(3, position, 4000) for position in range(100)]).double()
    deviation = math.pi / 6**0.5
    assert abs(draws.mean() - EULER) < 4 * deviation / len(draws) ** 0.5
    assert abs(draws.std() - deviation) < 0.01
    assert abs(((draws - EULER) / deviation).pow(3).mean() - 1.1395) < 0.06
    uniform = (-(-draws).exp()).exp().sort().values
    assert (uniform - (torch.arange(len(draws)) + 0.5) / len(draws)).abs().max() < 1.95 / len(draws) ** 0.5  # p > 0.001


@pytest.mark.slow
def test_the_largest_of_many_is_where_theory_puts_it() -> None:
    largest = torch.stack([gumbel(11, position, 1000).max() for position in range(2000)])
    assert abs(float(largest.mean()) - (math.log(1000) + EULER)) < 0.12


def test_the_noise_is_finite_at_both_ends_of_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for all bits set and none: u = (bits + 1/2) / 2^32 is never 0 or 1."""
    ends = torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    monkeypatch.setattr("eagle.kernels.noise.reference.random_bits", lambda *arguments, **named: ends)
    noise = gumbel(0, 0, 5)
    assert bool(noise.isfinite().all())
    assert bool((noise.diff() < 0).all())  # few bits: much noise, and every bit counts at that end
    assert noise[0] == pytest.approx(33 * math.log(2), rel=1e-6)
    assert noise[-1] == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)


def test_a_coin_is_never_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin of 0 accepts tokens of probability 0; one of 1 rejects certain ones."""
    for word in (0, 2**32 - 1):
        monkeypatch.setattr(
            "eagle.kernels.noise.reference.philox", lambda *arguments, word=word: (torch.tensor([word]),) * 4
        )
        assert 0 < coin(1, 2, 3) < 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    tokens=st.integers(1, 300),
    more=st.integers(0, 300),
)
def test_the_noise_depends_on_its_arguments_alone(seed: int, position: int, tokens: int, more: int) -> None:
    """Not on torch's generator, on what was drawn before, or on how many tokens are asked for."""
    expected = gumbel(seed, position, tokens)
    torch.manual_seed(position % 1000)
    gumbel(seed ^ 1, position, 8)
    assert torch.equal(gumbel(seed, position, tokens + more)[:tokens], expected)
    assert bool(expected.isfinite().all())


def test_seed_position_token_stream_and_cycle_all_change_the_bits() -> None:
    base = random_bits(1, 2, 4096)
    others = [
        random_bits(1 + 2**32, 2, 4096),
        random_bits(2, 2, 4096),
        random_bits(1, 3, 4096),
        random_bits(1, 2, 4096, stream=COINS),
        random_bits(1, 2, 4096, stream=DRAFTS),
        random_bits(1, 2, 4096, cycle=1),
        base.roll(1),
    ]
    for number, one in enumerate([base, *others]):
        for other in [base, *others][number + 1 :]:
            assert int((one == other).sum()) <= 1  # chance: 4096 / 2^32


def test_consecutive_positions_and_tokens_are_uncorrelated() -> None:
    noise = torch.stack([gumbel(5, position, 2048) for position in range(65)]).double()
    noise = (noise - noise.mean()) / noise.std()
    bound = 4.5 / noise[1:].numel() ** 0.5
    assert abs(float((noise[1:] * noise[:-1]).mean())) < bound
    assert abs(float((noise[:, 1:] * noise[:, :-1]).mean())) < bound


def test_an_int_seed_expands_as_documented() -> None:
    """Golden numbers: a saved seed must give the same text in every later version."""
    assert row_seeds(7, 3) == GOLDEN_ROW_SEEDS
    assert row_seeds(7, 1) == GOLDEN_ROW_SEEDS[:1]
    low, high, _, _ = philox(7, torch.tensor([2]), 0, 0, 1)
    assert row_seeds(7, 3)[2] == int(low) | int(high) << 32
    assert len(set(row_seeds(0, 1000) + row_seeds(1, 1000))) == 2000
    assert row_seeds(np.int64(7), 3) == GOLDEN_ROW_SEEDS  # type: ignore[arg-type]


def test_golden_noise() -> None:
    assert gumbel(7, 3, 5).tolist() == pytest.approx(GOLDEN_NOISE, rel=1e-6)


def test_given_seeds_are_taken_as_they_are() -> None:
    assert row_seeds([5, 2**64 - 1, -1], 3) == [5, 2**64 - 1, 2**64 - 1]
    with pytest.raises(EagleError, match="2 seeds for 3 rows; give an int or one seed per row"):
        row_seeds([1, 2], 3)


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(3)
    first, second = row_seeds(None, 4), row_seeds(None, 4)
    torch.manual_seed(3)
    assert row_seeds(None, 4) == first != second
    torch.manual_seed(4)
    assert row_seeds(None, 4) != first
