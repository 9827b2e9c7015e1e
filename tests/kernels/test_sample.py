"""The sampling kernel: its reference is eagle/sample/sampling.py row by row, and the Triton version is its reference."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.errors import EagleError
from eagle.kernels import dispatch
from eagle.kernels.sample.op import CAPACITY, sample, sample_and_describe
from eagle.kernels.sample.reference import Choice, scores
from eagle.kernels.sample.settings import RowSettings
from eagle.sample.processing import UnsoundScoresError
from eagle.sample.sampling import RowSampler, Sampling, keep
from tests.kernels.poison import poisoned

__all__ = ["poisoned"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

GREEDY = dict(temperature=0.0, top_k=3, top_p=0.3)
PLAIN = dict(temperature=1.0)
TOP_K = dict(temperature=0.7, top_k=5)
TOP_P = dict(temperature=1.3, top_p=0.8)
MIN_P = dict(temperature=1.0, min_p=0.05)
SEQUENCE = dict(temperature=1.1, top_k=9, top_p=0.7, min_p=0.02)
JOINT = dict(SEQUENCE, filter_order="joint")
WIDE = dict(temperature=1.0, top_k=200, top_p=0.7)  # top-p's share is one of what top-k left: much of it lies far down
BEST_ONLY = dict(temperature=2.0, top_p=0.0)
KINDS = [GREEDY, PLAIN, TOP_K, TOP_P, MIN_P, SEQUENCE, JOINT, WIDE, BEST_ONLY]


def row_settings(kinds: list[dict[str, Any]], *, seed: int = 5) -> RowSettings:
    off = dict(top_k=0, top_p=1.0, min_p=0.0, filter_order="sequential")
    columns = {name: [kind.get(name, off.get(name)) for kind in kinds] for name in ("temperature", *off)}
    seeds = [(seed + (2**61 + 1) * b) % 2**64 for b in range(len(kinds))]
    return RowSettings.of(seeds=seeds, device=DEVICE, **columns)  # type: ignore[arg-type]


def run(logits_RV: torch.Tensor, positions_R: torch.Tensor, rows: RowSettings, **options: Any) -> tuple[Choice, Choice]:
    """(Triton's, the reference's) result."""
    with dispatch.record() as paths:
        got = sample_and_describe(logits_RV, positions_R=positions_R, settings=rows, backend="triton", **options)
        expected = sample_and_describe(logits_RV, positions_R=positions_R, settings=rows, backend="reference")
    assert paths == Counter({("sample", "triton"): 1, ("sample", "reference"): 1})
    return got, expected


def same(logits_RV: torch.Tensor, kinds: list[dict[str, Any]], **options: Any) -> None:
    rows = row_settings(kinds)
    positions_R = torch.arange(len(logits_RV), device=DEVICE) * 1000 + 7
    got, expected = run(logits_RV, positions_R, rows, **options)
    assert got.tokens_R.tolist() == expected.tokens_R.tolist()
    torch.testing.assert_close(got.peaks_R, expected.peaks_R, rtol=0, atol=0)
    torch.testing.assert_close(got.log_totals_R, expected.log_totals_R, rtol=1e-5, atol=1e-5)
    of_R = torch.arange(len(logits_RV), device=DEVICE) // (len(logits_RV) // len(kinds))
    scores_RV = scores(logits_RV.float(), rows.temperature_B[of_R])
    kept = [scores_RV.isfinite() & (scores_RV >= one.thresholds_R[:, None]) for one in (got, expected)]
    assert torch.equal(*kept)


def logits(rows: int, vocab_size: int, *, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread).to(DEVICE)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40, 10**9]),
    top_p=st.sampled_from([0.0, 0.35, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    joint=st.booleans(),
    coarse=st.booleans(),
)
def test_the_reference_chooses_as_the_row_sampler(
    seed: int, position: int, temperature: float, top_k: int, top_p: float, min_p: float, joint: bool, coarse: bool
) -> None:
    logits_V = logits(1, 50, seed=seed % 1000)[0].cpu()
    if coarse:
        logits_V = logits_V.round()  # many ties
    order = "joint" if joint else "sequential"
    one = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, filter_order=order, seed=seed  # type: ignore[arg-type]
    )  # fmt: skip
    rows = RowSettings.of(
        seeds=[seed], temperature=[temperature], top_k=[top_k], top_p=[top_p], min_p=[min_p], filter_order=[order]
    )
    got = sample_and_describe(logits_V[None], positions_R=torch.tensor([position]), settings=rows, backend="reference")
    assert int(got.tokens_R) == RowSampler(sampling=one).choose(logits_V, position)
    if temperature > 0:
        kept_V = keep(one.tempered(logits_V), one)
        assert torch.equal(one.tempered(logits_V) >= got.thresholds_R, kept_V)
        p_V = torch.where(kept_V, (one.tempered(logits_V) - got.log_totals_R).exp(), 0.0)
        torch.testing.assert_close(p_V.double(), RowSampler(sampling=one).probabilities(logits_V), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 257])
def test_mixed_rows_of_small_vocabularies(vocab_size: int) -> None:
    """Every kind of row in one batch."""
    same(logits(len(KINDS), vocab_size), KINDS)


@pytest.mark.usefixtures("poisoned")
def test_nodes_share_the_settings_of_their_row() -> None:
    same(logits(6, 77), [GREEDY, TOP_K])


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("vocab_size", [4096, 8195])
def test_rows_that_end_at_or_behind_a_split(vocab_size: int) -> None:
    same(logits(3, vocab_size), [PLAIN, SEQUENCE, TOP_P])


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", [GREEDY, PLAIN, JOINT])
def test_one_row_of_a_real_vocabulary(kind: dict[str, Any]) -> None:
    same(logits(1, 32003, spread=2.0), [kind])


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("capacity", [1, 40])
def test_more_candidates_than_scratch_memory_holds(capacity: int) -> None:
    """Flat rows are searched as a whole: the same result."""
    same(logits(len(KINDS), 300, spread=0.3), KINDS, capacity=capacity)


@pytest.mark.slow
def test_a_flat_row_beyond_the_default_capacity() -> None:
    flat = torch.zeros(2, CAPACITY + 5, device=DEVICE)
    flat[:, 17] = 1e-3
    same(flat, [dict(temperature=1.0, top_p=0.5), dict(temperature=1.0, top_k=100)])


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ties_and_dtypes(dtype: torch.dtype) -> None:
    """Coarse logits: tokens as good as the k-th best, or as the last that top-p keeps, stay; the argmax is the first."""
    same(logits(len(KINDS), 130).round().to(dtype), KINDS)


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
def test_rows_with_padding_behind_them_and_forbidden_tokens() -> None:
    """Rows of a wider buffer that holds NaN; tokens of logit -inf are never drawn, by noise, filter or tie."""
    wide = torch.full((len(KINDS), 200), float("nan"), device=DEVICE)
    wide[:, :131] = logits(len(KINDS), 131)
    wide[:, 3:120] = float("-inf")
    same(wide[:, :131], KINDS)
    none_left = torch.full((1, 70), float("-inf"), device=DEVICE)
    none_left[0, 33] = 2.0
    same(none_left, [dict(temperature=1.0, top_k=5)])


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    same(logits(3, 100), [dict(temperature=temperature, **more) for more in ({}, {"top_k": 4}, {"top_p": 0.5})])


NAN, INF = float("nan"), float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GREEDY, PLAIN, TOP_K, TOP_P, MIN_P, SEQUENCE], ids=str)
@pytest.mark.parametrize("vocab_size", [70, 4200])
def test_rows_without_a_token_to_choose_say_so(kind: dict[str, Any], vocab_size: int) -> None:
    """As the row sampler, which raises there; a row beside them is chosen as ever."""
    values = logits(6, vocab_size, seed=3)
    values[1, 33], values[2, 33], values[3] = NAN, INF, -INF
    values[4, 65], values[4, 3] = NAN, INF
    values[5, -1] = NAN
    sampling = Sampling(seed=5, **kind)
    expected = []
    for row in range(6):
        sampler = RowSampler(sampling=sampling)
        try:
            expected.append(sampler.choose(sampler.processed(values[row].cpu(), [0] * row, []), row))
        except UnsoundScoresError:
            expected.append(-1)
    assert [token < 0 for token in expected] == [False, True, kind != GREEDY, True, True, True]
    rows = RowSettings.of(seeds=[5], **{name: [value] for name, value in kind.items()}, device=DEVICE)
    for backend in ("reference", "triton"):
        got = sample_and_describe(
            values, positions_R=torch.arange(6, device=DEVICE), settings=rows, backend=backend  # type: ignore[arg-type]
        )  # fmt: skip
        assert got.tokens_R.tolist() == expected
        assert got.peaks_R.isnan().tolist() == [token < 0 for token in expected]


def test_tokens_alone_are_those_that_come_with_a_description() -> None:
    for kinds in (KINDS, [GREEDY, PLAIN]):
        rows, values, positions_R = row_settings(kinds), logits(len(kinds), 90), torch.arange(len(kinds), device=DEVICE)
        got = sample(values, positions_R=positions_R, settings=rows, backend="triton")
        assert got.tolist() == sample(values, positions_R=positions_R, settings=rows, backend="reference").tolist()


def test_pieces_without_a_chance_are_those_that_no_noise_can_lift() -> None:
    """Far below the best logit nothing is drawn: not before the largest noise meets the smallest."""
    hopeless = float(pytest.importorskip("eagle.kernels.sample.triton")._HOPELESS.value)
    ends = (torch.tensor([0, 2**32 - 1]).double() + 0.5) * 2.0**-32
    largest, smallest = (-torch.log(-torch.log1p(-ends))).tolist()
    assert -(largest - smallest) - 0.5 < hopeless < -(largest - smallest)
    values = logits(1, 5000, spread=0.1)
    values[0, 0] = 8.0  # a piece away: others win by their noise
    rows = row_settings([PLAIN], seed=4)
    got, expected = run(values, torch.tensor([3], device=DEVICE), rows)
    assert got.tokens_R.tolist() == expected.tokens_R.tolist()
    assert int(got.tokens_R) >= 1024


def test_the_row_that_a_seed_belongs_to_decides() -> None:
    """Equal logits: rows differ by seed, nodes of a row by position."""
    rows = row_settings([PLAIN] * 4)
    values = torch.zeros(8, 300, device=DEVICE)
    positions_R = torch.tensor([4, 5] * 4, device=DEVICE)
    got, expected = run(values, positions_R, rows)
    assert got.tokens_R.tolist() == expected.tokens_R.tolist()
    assert len(set(got.tokens_R.tolist())) > 6


def test_no_rows() -> None:
    got = sample(
        torch.zeros(0, 9, device=DEVICE),
        positions_R=torch.zeros(0, dtype=torch.int64, device=DEVICE),
        settings=row_settings([PLAIN]),
    )
    assert got.shape == (0,)


def test_mistakes_are_named() -> None:
    rows, values = row_settings([PLAIN, PLAIN]), torch.zeros(3, 9, device=DEVICE)
    with pytest.raises(EagleError, match="3 rows of logits for 2 rows of settings"):
        sample(values, positions_R=torch.zeros(3, dtype=torch.int64, device=DEVICE), settings=rows)
    with pytest.raises(EagleError, match=r"positions are torch.float32 \(2,\), expected int64 \[2\]"):
        sample(values[:2], positions_R=torch.zeros(2, device=DEVICE), settings=rows)
    positions_R = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(EagleError, match=r"cannot run: logits are torch\.float64"):
        sample(values[:2].double(), positions_R=positions_R, settings=rows, backend="triton")
    with pytest.raises(EagleError, match=r"top_p is 1\.5, expected from 0"):
        RowSettings.of(seeds=[1], temperature=[1.0], top_p=[1.5])
    with pytest.raises(EagleError, match="1 values of top_k for 2 seeds"):
        RowSettings.of(seeds=[1, 2], temperature=[1.0, 1.0], top_k=[1])


def test_unfiltered_batches_know_it() -> None:
    assert not row_settings([PLAIN, GREEDY]).filtered  # a greedy row's filters mean nothing
    assert row_settings([PLAIN, dict(temperature=1.0, min_p=math.ulp(1.0))]).filtered
