"""Divergences are found where they are, and only numerical ties are excused."""

import pytest
import torch

from eagle.eval.checks.exactness import at_filters_edge, divergence, first_difference, tie_margin
from eagle.sample.noise import gumbel
from eagle.sample.sampling import Sampling
from eagle.target.target import Target
from tests.tiny import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(tiny_model())


def test_the_first_difference_is_found() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2, "an answer that ends early differs there"


def test_a_divergence_carries_the_targets_own_margin_at_that_place(target: Target) -> None:
    prompt, reference = [5, 6, 7], [8, 9, 10]
    found = divergence(target, prompt_ids=prompt, tokens=[8, 99, 10], reference=reference, versus="plain")
    assert found is not None
    logits = target.model(torch.tensor([[*prompt, 8]])).logits[0, -1]
    top = logits.topk(2).values
    assert (found["index"], found["token"], found["expected"]) == (1, 99, 9)
    assert found["margin"] == pytest.approx(float(top[0] - top[1]), abs=1e-5)
    assert not found["tie"]


def test_only_the_two_best_tokens_within_the_margin_are_a_tie(target: Target) -> None:
    prompt = [5, 6, 7]
    logits = target.model(torch.tensor([prompt])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    with torch.no_grad():  # make the two best logits equal, whatever the feature: equal rows of the LM head
        rows = target.tokens.lm_head_VH
        saved = rows[second].clone()
        rows[second] = rows[best]
    try:
        tied = divergence(target, prompt_ids=prompt, tokens=[second], reference=[best], versus="plain")
        other = divergence(target, prompt_ids=prompt, tokens=[(best + 1) % 300], reference=[best], versus="plain")
    finally:
        with torch.no_grad():
            rows[second] = saved
    assert tied is not None
    assert tied["tie"]
    assert tied["margin"] < 1e-4
    assert other is not None
    assert not other["tie"]


def test_with_sampling_the_margin_is_that_of_the_noisy_scores(target: Target) -> None:
    prompt, sampling = [5, 6, 7], Sampling(temperature=0.8, top_k=5, seed=3)
    logits = target.model(torch.tensor([prompt])).logits[0, -1].float()
    kept = logits >= logits.topk(5).values[-1]
    noisy = (logits / 0.8 + gumbel(3, len(prompt), len(logits))).masked_fill(~kept, float("-inf"))
    best, second, third = noisy.topk(3).indices.tolist()
    found = divergence(target, prompt_ids=prompt, tokens=[third], reference=[best], versus="plain", sampling=sampling)
    assert found is not None
    assert found["margin"] == pytest.approx(float(noisy[best] - noisy[second]), abs=1e-5)
    assert found["tie_below"] == pytest.approx(1e-4 / 0.8)
    assert not found["tie"]


def test_a_token_on_a_filters_very_edge_is_a_tie_and_one_clearly_inside_or_outside_is_not(target: Target) -> None:
    logits = target.model(torch.tensor([[5, 6, 7]])).logits[0, -1].float().detach()
    order = logits.argsort(descending=True)
    mass = float((logits / 0.8).softmax(-1)[order[:3]].double().sum())  # what the three best tokens hold
    edge = Sampling(temperature=0.8, top_p=mass)
    assert at_filters_edge(logits, edge, int(order[3])), "it is kept when rounding makes the three a little lighter"
    assert not at_filters_edge(logits, edge, int(order[0]))
    assert not at_filters_edge(logits, edge, int(order[9]))
    assert not at_filters_edge(logits, Sampling(temperature=0.8, top_p=mass + 1e-3), int(order[3]))
    tied = logits.clone()
    tied[order[4]] = tied[order[3]] - 1e-6
    assert at_filters_edge(tied, Sampling(temperature=0.8, top_k=4), int(order[4]))


def test_an_answer_cut_short_is_never_a_tie(target: Target) -> None:
    found = divergence(target, prompt_ids=[5], tokens=[1], reference=[1, 2], versus="plain")
    assert found is not None
    assert not found["tie"]


def test_half_precision_is_judged_by_its_own_spacing() -> None:
    assert tie_margin(torch.float32, 30.0) == 1e-4
    assert tie_margin(torch.float16, 30.0) < tie_margin(torch.bfloat16, 30.0) < 1.0
