"""The sampler: Hugging Face's filters, the joint order, exact frequencies, coupled draft scores."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle.errors import EagleError
from eagle.eval.statistics import chi_square_p_value
from eagle.sample.noise import gumbel
from eagle.sample.sampling import RowSampler, Sampling, draw, keep

INF = float("inf")


def hugging_face(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Hugging Face's warpers, in its order."""
    scores_1V, ids = logits_V[None], torch.zeros(1, 1, dtype=torch.int64)
    if sampling.temperature != 1:
        scores_1V = TemperatureLogitsWarper(sampling.temperature)(ids, scores_1V)
    if sampling.top_k:
        scores_1V = TopKLogitsWarper(sampling.top_k)(ids, scores_1V)
    if sampling.top_p < 1:
        scores_1V = TopPLogitsWarper(sampling.top_p)(ids, scores_1V)
    if sampling.min_p:
        scores_1V = MinPLogitsWarper(sampling.min_p)(ids, scores_1V)
    return scores_1V[0]


def near_threshold(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Tokens whose fate depends on rounding, or on the order in which a sort leaves ties: at the threshold of top-p
    (after top-k) or of min-p."""
    scores_V = (logits_V / sampling.temperature).double()
    if sampling.top_k:
        smallest = scores_V.topk(min(sampling.top_k, len(scores_V))).values[-1]
        scores_V = scores_V.masked_fill(scores_V < smallest, -INF)
    p_V = scores_V.softmax(-1)
    near_V = (p_V - sampling.min_p * p_V.max()).abs() < 1e-6
    if sampling.top_p < 1:
        ordered, order = p_V.sort(descending=True)
        before = torch.empty_like(p_V)
        before[order] = ordered.cumsum(0) - ordered
        last = p_V[before < sampling.top_p - 1e-6].min() if sampling.top_p > 1e-6 else p_V.max()
        near_V |= (before - sampling.top_p).abs() < 1e-5
        near_V |= p_V == last
    return near_V


@st.composite
def logits_and_sampling(draw: st.DrawFn) -> tuple[torch.Tensor, Sampling]:
    size = draw(st.sampled_from([1, 2, 7, 50, 700, 2000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits_V = torch.randn(size, generator=generator) * draw(st.sampled_from([0.1, 1.0, 5.0, 20.0]))
    if draw(st.booleans()):  # ties
        logits_V = (logits_V * 2).round() / 2
    if draw(st.booleans()) and size > 1:  # suppressed tokens
        logits_V[torch.rand(size, generator=generator) < 0.4] = -INF
        logits_V[int(torch.randint(0, size, (1,), generator=generator))] = 1.0
    return logits_V, Sampling(
        temperature=draw(st.sampled_from([0.3, 1.0, 1.7])),
        top_k=draw(st.sampled_from([0, 1, 3, 40, 5000])),
        top_p=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
    )


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True)
@given(logits_and_sampling())
def test_the_filters_keep_what_hugging_faces_warpers_keep(case: tuple[torch.Tensor, Sampling]) -> None:
    """Equal but for ties at top-p's threshold, of which Hugging Face keeps those that its sort puts first, and we all."""
    logits_V, sampling = case
    expected_V = hugging_face(logits_V, sampling)
    warped_V = RowSampler(sampling=sampling).warped(logits_V)
    differ_V = warped_V.isfinite() != expected_V.isfinite()
    assert not bool((differ_V & ~near_threshold(logits_V, sampling)).any())
    assert int(warped_V.argmax()) == int(logits_V.argmax())
    both_V = warped_V.isfinite() & expected_V.isfinite()
    assert torch.equal(warped_V[both_V], expected_V[both_V])


def test_ties_at_a_threshold_stay_together() -> None:
    logits_V = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    scores_V = logits_V.log_softmax(-1)
    assert keep(scores_V, Sampling(temperature=1, top_k=2)).tolist() == [True, True, True, True, False]
    assert keep(scores_V, Sampling(temperature=1, top_p=0.6)).tolist() == [True, True, True, True, False]
    assert keep(scores_V, Sampling(temperature=1, min_p=1.0)).tolist() == [True, False, False, False, False]


def test_a_flat_distribution_beyond_the_short_list_is_cut_where_top_p_says() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(5000, generator=generator) * 0.01
    kept_V = keep(logits_V, Sampling(temperature=1, top_p=0.5))
    assert 2400 < int(kept_V.sum()) < 2500
    assert float(logits_V.softmax(-1)[kept_V].sum()) == pytest.approx(0.5, abs=1e-3)


def test_filters_work_row_by_row() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(6, 900, generator=generator) * torch.tensor([0.01, 0.1, 1, 2, 5, 9])[:, None]
    for order in ("sequential", "joint"):
        sampling = Sampling(temperature=1, top_k=600, top_p=0.9, min_p=0.001, filter_order=order)
        together = keep(logits_NV, sampling)
        assert torch.equal(together, torch.stack([keep(logits_V, sampling) for logits_V in logits_NV]))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(logits_and_sampling())
def test_the_joint_order_is_the_intersection_of_the_filters(case: tuple[torch.Tensor, Sampling]) -> None:
    logits_V, both = case
    scores_V = logits_V / both.temperature
    alone = [
        keep(scores_V, Sampling(temperature=1, **{name: getattr(both, name)})) for name in ("top_k", "top_p", "min_p")
    ]
    joint = Sampling(
        temperature=both.temperature, top_k=both.top_k, top_p=both.top_p, min_p=both.min_p, filter_order="joint"
    )
    assert torch.equal(keep(scores_V, joint), alone[0] & alone[1] & alone[2])


def test_the_two_orders_differ_where_they_should() -> None:
    """p = (.4, .3, .2, .1), top-k 2, top-p .5: of the renormalised (.57, .43) the first is enough; of p it is not."""
    scores_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    sequential = Sampling(temperature=1, top_k=2, top_p=0.5)
    joint = Sampling(temperature=1, top_k=2, top_p=0.5, filter_order="joint")
    assert keep(scores_V, sequential).tolist() == [True, False, False, False]
    assert keep(scores_V, joint).tolist() == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings_",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 6},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "filter_order": "joint"},
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities(settings_: dict[str, float]) -> None:
    """Over positions at one seed, and over seeds at one position."""
    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(2)) * 2
    expected_V = RowSampler(sampling=Sampling(**settings_)).probabilities(logits_V)  # type: ignore[arg-type]
    one = RowSampler(sampling=Sampling(seed=9, **settings_))  # type: ignore[arg-type]
    by_position = torch.tensor([one.choose(logits_V, position) for position in range(2000)])
    by_seed = torch.tensor(
        [RowSampler(sampling=Sampling(seed=seed, **settings_)).choose(logits_V, 4) for seed in range(2000)]  # type: ignore[arg-type]
    )
    for draws in (by_position, by_seed):
        counts_V = draws.bincount(minlength=20)
        assert int(counts_V[expected_V == 0].sum()) == 0
        assert chi_square_p_value(counts_V.tolist(), expected_V.tolist()) > 1e-3


def test_a_sampler_that_draws_its_noise_once_fails_the_frequency_test() -> None:
    """The same noise at every step: facts' mutant."""

    class Frozen(RowSampler):
        def noise(self, position: int, tokens: int) -> torch.Tensor:
            return super().noise(0, tokens)

    logits_V = torch.randn(20, generator=torch.Generator().manual_seed(2))
    frozen = Frozen(sampling=Sampling(temperature=1, seed=1))
    counts_V = torch.tensor([frozen.choose(logits_V, position) for position in range(500)]).bincount(minlength=20)
    assert chi_square_p_value(counts_V.tolist(), logits_V.softmax(-1).tolist()) < 1e-12


def test_greedy_takes_the_best_token_whatever_filters_and_seed_say() -> None:
    logits_V = torch.tensor([0.0, 3.0, 2.0])
    for seed in range(20):
        sampler = RowSampler(sampling=Sampling(temperature=0, top_k=2, top_p=0.1, min_p=0.5, seed=seed))
        assert sampler.choose(logits_V, 5) == 1
        assert sampler.probabilities(logits_V).tolist() == [0, 1, 0]
        assert torch.equal(sampler.draft_scores(logits_V[None], 5)[0], logits_V.log_softmax(-1))


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-6])
def test_a_temperature_near_zero_is_nearly_greedy(temperature: float) -> None:
    logits_V = torch.tensor([0.0, 30.0, 29.99, -INF])
    sampler = RowSampler(sampling=Sampling(temperature=temperature, top_p=0.9))
    assert [sampler.choose(logits_V, position) for position in range(20)] == [1] * 20
    assert sampler.probabilities(logits_V).tolist() == [0, 1, 0, 0]
    assert sampler.draft_scores(logits_V[None], 3)[0].tolist() == [-INF, 0, -INF, -INF]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-1.0, 1e-46, 1e-38, 1e38, INF, float("nan"))],
        *[("top_p", value) for value in (-0.1, 1.1, float("nan"))],
        *[("min_p", value) for value in (-0.1, 1.1)],
        ("top_k", -1),
        ("filter_order", "both"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(EagleError, match=f"^{name} is {re.escape(repr(value))}, expected "):
        Sampling(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_a_draft_with_the_targets_logits_names_the_token_that_is_emitted(temperature: float) -> None:
    """Coupling: with q = p the most confident draft token IS the sampled one, at every position and temperature."""
    generator = torch.Generator().manual_seed(4)
    logits_NV = torch.randn(200, 300, generator=generator) * 3
    sampler = RowSampler(sampling=Sampling(temperature=temperature, top_k=40, top_p=0.9, min_p=0.01, seed=3))
    for position, logits_V in enumerate(logits_NV):
        assert int(sampler.draft_scores(logits_V[None], position).argmax()) == sampler.choose(logits_V, position)


def test_draft_scores_are_eagle_2s_confidence_with_the_targets_noise_over_kept_tokens() -> None:
    logits_KV = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)) * 2
    sampling = Sampling(temperature=0.7, top_k=5, seed=8)
    got_KV = RowSampler(sampling=sampling).draft_scores(logits_KV, 6)
    for logits_V, got_V in zip(logits_KV, got_KV):
        kept = logits_V.topk(5).indices
        noisy = logits_V.log_softmax(-1)[kept] + 0.7 * gumbel(8, 6, 50)[kept]
        torch.testing.assert_close(got_V[kept], noisy.log_softmax(-1))
        assert int(got_V.isfinite().sum()) == 5


def test_a_reduced_vocabulary_drafts_with_the_noise_of_the_targets_ids() -> None:
    target_ids = torch.tensor([3, 17, 18, 44])
    logits_KV = torch.randn(2, 4, generator=torch.Generator().manual_seed(6))
    full_KV = torch.full((2, 50), -INF)
    full_KV[:, target_ids] = logits_KV
    got = RowSampler(sampling=Sampling(temperature=1.1, seed=2)).draft_scores(logits_KV, 9, target_ids)
    expected = RowSampler(sampling=Sampling(temperature=1.1, seed=2)).draft_scores(full_KV, 9)[:, target_ids]
    torch.testing.assert_close(got, expected)


def test_noise_is_shared_by_drafting_and_verification_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counting(seed: int, position: int, tokens: int) -> torch.Tensor:
        drawn.append(position)
        return gumbel(seed, position, tokens)

    monkeypatch.setattr("eagle.sample.sampling.gumbel", counting)
    sampler = RowSampler(sampling=Sampling(temperature=1, seed=1))
    logits_V = torch.randn(30)
    sampler.draft_scores(logits_V[None], 5)
    first = sampler.choose(logits_V, 5)
    sampler.choose(logits_V, 6)
    assert drawn == [5, 6]
    sampler.forget_before(6)
    assert list(sampler._noise) == [6]
    assert sampler.choose(logits_V, 5) == first  # drawn again, the same
    assert drawn == [5, 6, 5]


def test_processors_see_the_unpadded_row_and_the_nodes_own_ancestors() -> None:
    seen: list[list[int]] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids[0].tolist())
        return scores - input_ids[0, -1]

    sampler = RowSampler(sampling=Sampling(), processors=[processor, lambda ids, scores: scores * 2])
    out = sampler.processed(torch.ones(4, dtype=torch.bfloat16), [7, 8], [9])
    assert seen == [[7, 8, 9]]
    assert out.dtype == torch.float32
    assert out.tolist() == [-16.0] * 4


def test_a_draw_never_lands_on_a_token_of_weight_zero() -> None:
    weights_V = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0])
    assert draw(weights_V, 2.0**-33) == 1
    assert draw(weights_V, 0.3 - 1e-7) == 1
    assert draw(weights_V, 0.3 + 1e-7) == 3
    assert draw(weights_V, 1 - 2.0**-33) == 3
