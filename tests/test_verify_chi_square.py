"""The whole decoder, drawing: joint counts of several tokens against the target's exact probabilities, at fixed seeds.

Lossless rules must pass and every broken variant must fail, with a head whose q is far from the target's p.
"""

import pytest
import torch

from eagle.eval.checks.chi_square import LOSSLESS, NEW_TOKENS, exact_joint, holm, p_values
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.sampling import Sampling
from eagle.target.target import Target
from tests.mutants import MUTANTS, measure, verdict
from tests.tiny import tiny_model

IDS = torch.tensor([[1, 3, 5, 4, 1]])
SAMPLING = Sampling(temperature=0.7, top_k=6, seed=11)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=8))


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.15)).eval()


@pytest.mark.slow
def test_lossless_rules_draw_from_the_targets_distribution(target: Target, head: EagleHead) -> None:
    lines = verdict(measure(target, head, IDS, SAMPLING, rows=800, batch=400, variants=list(LOSSLESS)))
    assert not [(name, line) for name, line in lines.items() if line["told apart"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_broken_verification_is_told_apart(target: Target, head: EagleHead, name: str) -> None:
    lines = verdict(measure(target, head, IDS, SAMPLING, rows=400, batch=400, variants=[name]))
    assert lines[name]["told apart"]


@pytest.mark.slow
def test_a_broken_rule_is_whole_again_behind_its_context(target: Target, head: EagleHead) -> None:
    def output() -> list[dict[str, float]]:
        return list(measure(target, head, IDS, SAMPLING, rows=20, variants=["rejection, sampled tree"]).values())

    before = output()
    for mutant in MUTANTS.values():
        with mutant.broken():
            pass
    assert output() == before


def test_the_exact_joint_is_the_chain_rule_over_what_the_filters_keep(target: Target) -> None:
    sampling = Sampling(temperature=0.5, top_k=2)
    cells = exact_joint(target, IDS, sampling, tokens=2)
    assert len(cells) == 4
    assert sum(cells.values()) == pytest.approx(1.0)
    for tokens, mass in cells.items():
        expected = 1.0
        for i, token in enumerate(tokens):
            ids = torch.cat([IDS, torch.tensor([tokens[:i]], dtype=torch.int64)], dim=1)
            best = (target.model(ids).logits[0, -1] / 0.5).topk(2)
            expected *= float(best.values.softmax(-1)[best.indices == token])
        assert mass == pytest.approx(expected, rel=1e-4)


def test_counts_off_the_support_and_wrong_dependence_give_tiny_p_values() -> None:
    exact = {(a, b, c, 0): 1 / 8 for a in (0, 1) for b in (0, 1) for c in (0, 1)}
    even = [cell for cell in exact for _ in range(20)]
    assert min(p_values(even, exact).values()) > 0.9
    assert p_values([*even, (0, 2, 0, 0)], exact)["tokens 2-3"] == 0.0
    together = [(a, b, b, 0) for a in (0, 1) for b in (0, 1) for _ in range(40)]  # right margins, wrong joint
    assert p_values(together, exact)["tokens 2-3"] < 1e-6
    assert all(len(cell) == NEW_TOKENS for cell in exact)


def test_holms_adjustment() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
