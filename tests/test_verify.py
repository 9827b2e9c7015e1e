"""Verification rules: exact output distributions by enumeration, the golden case, names, refusals, old bugs of others."""

import dataclasses
import math
from itertools import product
from typing import Any

import pytest
import torch

import eagle
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import RULES
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from eagle.verify.block import Block
from eagle.verify.coupled import Coupled
from eagle.verify.lossy import TopK, Typical
from eagle.verify.rejection import Rejection
from eagle.verify.rules import make_rule
from tests.decoding import decode_config
from tests.enumeration import (
    Chance,
    Table,
    TableView,
    distribution,
    expected_accepted,
    fixed_tree,
    joint,
    output,
    random_table,
    sampled_tree,
    top_tree,
    total_variation,
    without_replacement,
)
from tests.exact import TOLERANCE, apart
from tests.oracles import BatchOracle
from tests.tiny import tiny_model

EXACT = 1e-12
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=24))


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.3)).eval()


IDS = torch.tensor([[1, 3, 5, 4, 7]])


# Exact enumeration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "widths", "expanded", "zeros"),
    [
        (8, (1, 1), 1, 0.0),  # a chain
        (6, (1, 1), 1, 0.4),
        (4, (2, 2), 1, 0.0),  # which child is expanded depends on what was drawn
        (4, (2, 1), 2, 0.3),
        (5, (3, 1), 1, 0.4),  # q has fewer tokens than children are drawn: fillers
        (8, (2,), 1, 0.2),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_rejection_of_sampled_children_is_the_targets_distribution(
    vocab: int, widths: tuple[int, ...], expanded: int, zeros: float, seed: int
) -> None:
    p, q = random_table(vocab, 3, seed=seed, zeros=zeros), random_table(vocab, 2, seed=100 + seed, zeros=zeros)
    got = output(Rejection(), p, sampled_tree(q, widths=widths, expanded=expanded), 3)
    assert total_variation(got, joint(p, 3)) < EXACT


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_rejection_of_top_children_is_the_targets_distribution_and_accepts_all_that_can_be(
    seed: int, zeros: float
) -> None:
    p, q = random_table(8, 3, seed=seed, zeros=zeros), random_table(8, 2, seed=50 + seed)
    grow = top_tree(q, widths=(3, 2))
    assert total_variation(output(Rejection(), p, grow, 3), joint(p, 3)) < EXACT
    tree = grow(Chance([], []))
    bound = 0.0  # no rule accepts more than the target's probability of each node's path
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens_BN[0, 1:].tolist(), tree.parents_BN[0, 1:].tolist()):
        path = (*paths[parent], token)
        paths.append(path)
        bound += math.prod(float(p[path[:i]][x]) for i, x in enumerate(path))
    assert expected_accepted(Rejection(), p, grow) == pytest.approx(bound, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("vocab", "length", "zeros"), [(8, 1, 0.3), (6, 2, 0.0), (6, 2, 0.4), (4, 3, 0.0)])
def test_block_verification_is_the_targets_distribution_and_accepts_no_less_than_rejection(
    vocab: int, length: int, zeros: float, seed: int
) -> None:
    p, q = random_table(vocab, length + 1, seed=seed, zeros=zeros), random_table(vocab, length, seed=70 + seed)
    grow = sampled_tree(q, widths=(1,) * length)
    assert total_variation(output(Block(), p, grow, length + 1), joint(p, length + 1)) < EXACT
    gain = expected_accepted(Block(), p, grow) - expected_accepted(Rejection(), p, grow)
    assert gain > -1e-12
    assert length == 1 or gain > 1e-4  # it is not merely the same rule


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name != "coupled"])
def test_a_perfect_draft_is_accepted_whole(name: str) -> None:
    p = random_table(5, 3, seed=3, zeros=0.2)
    grow = sampled_tree(p, widths=(1, 1))
    assert expected_accepted(make_rule(name), p, grow) == pytest.approx(2.0, abs=1e-12)
    assert total_variation(output(make_rule(name), p, grow, 3), joint(p, 3)) < EXACT


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name != "coupled"])
def test_a_greedy_target_gets_its_own_token_for_certain(name: str) -> None:
    p = {
        path: torch.nn.functional.one_hot(row.argmax(), 5).double() for path, row in random_table(5, 3, seed=4).items()
    }
    q = random_table(5, 2, seed=5)
    got = output(make_rule(name), p, sampled_tree(q, widths=(1, 1)), 3)
    assert total_variation(got, joint(p, 3)) < EXACT


def test_the_golden_case() -> None:
    """p = (.7, .3), q = (.4, .6): accepted 0.7, the residual is all on A, the output is p."""
    p: Table = {path: torch.tensor([0.7, 0.3], dtype=torch.float64) for path in [(), (0,), (1,)]}
    q: Table = {(): torch.tensor([0.4, 0.6], dtype=torch.float64)}
    grow = sampled_tree(q, widths=(1,))
    assert expected_accepted(Rejection(), p, grow) == pytest.approx(0.7, abs=1e-15)
    one = output(Rejection(), p, grow, 1)
    assert one[(0,)] == pytest.approx(0.7, abs=1e-15)
    assert one[(1,)] == pytest.approx(0.3, abs=1e-15)

    residuals = set()

    class Spy(TableView):
        def draw(self, weights_V: torch.Tensor, accepted: list[int]) -> int:
            if not accepted:  # the draft was rejected
                residuals.add(tuple(round(x, 12) for x in weights_V.tolist()))
            return super().draw(weights_V, accepted)

    pending: list[list[int]] = [[]]
    while pending:
        chance = Chance(pending.pop(), pending)
        Rejection().walk(grow(chance), 0, Spy(p, chance))
    assert residuals == {(1.0, 0.0)}


# Mutants that enumeration must catch


def _worst(rule: Any, grow: Any) -> float:
    """The largest total variation over random tables. grow: q -> trees."""
    worst = 0.0
    for seed in range(6):
        p, q = random_table(4, 3, seed=seed, sharpness=2.5), random_table(4, 2, seed=30 + seed, sharpness=2.5)
        worst = max(worst, total_variation(output(rule, p, grow(q), 3), joint(p, 3)))
    return worst


@pytest.mark.slow
def test_a_q_that_is_not_renormalised_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept_mass(weights_V: torch.Tensor, token: int) -> torch.Tensor:
        return weights_V.index_fill(0, torch.tensor([token]), 0.0)

    monkeypatch.setattr("eagle.verify.rejection.without", kept_mass)
    assert _worst(Rejection(), lambda q: sampled_tree(q, widths=(3,))) > 0.02


def test_pruning_sampled_children_after_the_draw_is_caught() -> None:
    def pruned(q_V: torch.Tensor, count: int, chance: Chance) -> list[int]:
        drawn = without_replacement(q_V, count + 1, chance)
        kept = sorted(drawn, key=lambda token: -float(q_V[token]))[:count]
        return [token for token in drawn if token in kept]

    assert _worst(Rejection(), lambda q: sampled_tree(q, widths=(2,), choose=pruned)) > 0.05


def test_deterministic_children_verified_as_if_drawn_are_caught() -> None:
    def best(q_V: torch.Tensor, count: int, chance: Chance) -> list[int]:
        tokens: list[int] = q_V.topk(count).indices.tolist()
        return tokens

    assert _worst(Rejection(), lambda q: sampled_tree(q, widths=(2, 1), choose=best)) > 0.1


def test_residuals_left_out_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle.verify.rejection.residual", lambda rest_V, q_V: rest_V)
    assert _worst(Rejection(), lambda q: sampled_tree(q, widths=(1, 1))) > 0.1


@pytest.mark.slow
def test_block_acceptance_without_its_carried_weight_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle.verify.block._chance", lambda weight, left: weight)
    assert _worst(Block(), lambda q: sampled_tree(q, widths=(1, 1))) > 0.005


@pytest.mark.parametrize("drafts", ["fresh", "stale"])
def test_block_verification_needs_fresh_drafts_in_every_cycle(drafts: str) -> None:
    """A rejected draft behind the block's end has decided where it ends: drafting it again is caught."""
    p_V = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q_V = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    p: Table = dict.fromkeys([path for length in range(3) for path in product(range(3), repeat=length)], p_V)

    def chain(tokens: list[int]) -> DraftTree:
        count = len(tokens)
        return DraftTree.from_parents(
            torch.tensor([[0, *tokens]]),
            torch.arange(-1, count)[None],
            children="sampled",
            log_q_BEV=q_V.log().expand(1, count, -1),
            q_row_BN=torch.tensor([[*range(count), -1]]),
        )

    def run(chance: Chance) -> tuple[int, ...]:
        drafted = [chance.pick(q_V.tolist()) for _ in range(2)]
        tokens = Block().walk(chain(drafted), 0, TableView(p, chance)).tokens
        if len(tokens) == 1:  # the next cycle drafts the second position
            again = drafted[1] if drafts == "stale" else chance.pick(q_V.tolist())
            tokens += Block().walk(chain([again]), 0, TableView(p, chance)).tokens
        return tuple(tokens[:2])

    distance = total_variation(distribution(run), joint(p, 2))
    assert distance < EXACT if drafts == "fresh" else distance > 0.01


@pytest.mark.slow
def test_lossy_rules_are_lossy() -> None:
    grow = sampled_tree
    assert _worst(TopK(k=2), lambda q: grow(q, widths=(1, 1))) > 0.05
    assert _worst(Typical(), lambda q: grow(q, widths=(1, 1))) > 0.05


# Lossy rules


def test_top_k_accepts_exactly_the_targets_k_best() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    p: Table = {(): row, **{(x,): row for x in range(4)}}
    for k, accepted in [(1, {0}), (2, {0, 1}), (3, {0, 1, 2})]:
        for token in range(4):
            grow = fixed_tree([0, token], [-1, 0])
            assert expected_accepted(TopK(k=k), p, grow) == float(token in accepted)
    # The likeliest acceptable child is taken.
    assert output(TopK(k=3), p, fixed_tree([0, 2, 1, 3], [-1, 0, 0, 0]), 1)[(1,)] == pytest.approx(1.0)


def test_typical_acceptance_follows_its_threshold() -> None:
    row = torch.tensor([0.6, 0.25, 0.15, 0.0], dtype=torch.float64)
    p: Table = {(): row, **{(x,): row for x in range(4)}}
    entropy = -sum(x * math.log(x) for x in row.tolist() if x)
    for delta in (0.2, 0.5, 1.0):
        threshold = min(0.3, delta * math.exp(-entropy))
        for token, probability in enumerate(row.tolist()):
            grow = fixed_tree([0, token], [-1, 0])
            accepted = expected_accepted(Typical(delta=delta), p, grow)
            assert accepted == float(probability > threshold)


@pytest.mark.parametrize("rule", [TopK(k=9), Typical(epsilon=0.0), Rejection()], ids=lambda rule: rule.name)
def test_a_token_of_probability_zero_is_never_accepted(rule: Any) -> None:
    row = torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64)
    p: Table = {(): row, **{(x,): row for x in range(3)}}
    assert expected_accepted(rule, p, fixed_tree([0, 2], [-1, 0])) == 0.0


# In the decoder


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_extreme_coins_neither_accept_the_impossible_nor_reject_the_certain(
    target: Target, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """sglang 35771 (coin <= 0), 30822 (coins clamped)."""
    monkeypatch.setattr("eagle.kernels.noise.reference.philox", lambda seed, c0, c1, c2, c3=0: (c0 * 0 + bits,) * 4)
    row = _row(target, temperature=1.0, top_k=1)
    view = _view(target, row)
    assert not view.accepts(0.0, [], 0)
    assert view.accepts(1.0, [], 0)
    weights_V = torch.tensor([0.0, 0.0, 0.2, 0.0, 0.8, 0.0], dtype=torch.float64)
    assert view.draw(weights_V, []) == (2 if bits == 0 else 4)


def test_temperature_filters_and_penalties_reach_the_targets_probabilities(target: Target) -> None:
    """vllm 10198, sglang 10617, vllm 42744."""
    row = _row(target, temperature=0.5, top_k=3, repetition_penalty=1.7)
    view = _view(target, row)
    prefix = [*row.tokens, 9]
    logits_V = target.logits(target.features(IDS)[0][0, 0]).clone()
    for token in set(prefix):
        logits_V[token] = logits_V[token] / 1.7 if logits_V[token] > 0 else logits_V[token] * 1.7
    best = (logits_V / 0.5).topk(3)
    expected_V = torch.zeros(24, dtype=torch.float64).index_put((best.indices,), best.values.double().softmax(-1))
    assert apart(view.probabilities(0, [9]), expected_V) < TOLERANCE[torch.float32]


def _row(target: Target, **arguments: Any) -> Any:
    from eagle.decode.arguments import resolve

    return resolve(target, IDS, max_new_tokens=4, do_sample=True, seed=1, **arguments).rows[0]


def _view(target: Target, row: Any) -> Any:
    from eagle.verify.node_view import views

    with torch.inference_mode():
        features_1NH = target.features(IDS)[0]
    nodes = features_1NH.shape[1]
    chain = DraftTree.from_parents(torch.zeros(1, nodes, dtype=torch.int64), torch.arange(-1, nodes - 1)[None])
    return views([row], target, chain, features_1NH)[0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block", "top_k", "typical"])
def test_every_rule_decodes_by_name_and_says_whether_it_is_lossless(target: Target, head: EagleHead, rule: str) -> None:
    decode = decode_config(budget=8, top_k=1 if rule == "block" else 3, depth=3)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule)
    arguments: dict[str, Any] = dict(max_new_tokens=12, eos_token_id=[], seed=5)
    sampled = decoder.generate(IDS, do_sample=True, temperature=1.0, num_return_sequences=3, **arguments)
    assert sampled.stats is not None
    assert {(stats.rule, stats.lossless) for stats in sampled.stats} == {(rule, RULES[rule].lossless)}
    again = decoder.generate(IDS, do_sample=True, temperature=1.0, num_return_sequences=3, **arguments)
    assert torch.equal(sampled.sequences, again.sequences)
    if RULES[rule].lossless:
        greedy = decoder.generate(IDS, do_sample=False, **arguments)
        assert torch.equal(greedy.sequences, decoder.plain().generate(IDS, do_sample=False, **arguments).sequences)


@pytest.mark.slow
@pytest.mark.parametrize("children", ["coupled", "sampled", "top"])
def test_the_coupled_walk_says_plain_decodings_text_over_every_kind_of_tree(
    target: Target, head: EagleHead, children: Any
) -> None:
    decode = decode_config(budget=9, top_k=3, depth=3, children=children)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
    arguments: dict[str, Any] = dict(max_new_tokens=20, do_sample=True, temperature=1.3, top_p=0.9, seed=[4, 5, 6])
    ids = IDS.expand(3, -1)
    expected = decoder.plain().generate(ids, eos_token_id=[], **arguments).sequences
    assert torch.equal(decoder.generate(ids, eos_token_id=[], **arguments).sequences, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_coupled_walk_says_plain_decodings_text_over_random_trees(target: Target, seed: int) -> None:
    arguments: dict[str, Any] = dict(max_new_tokens=25, do_sample=True, temperature=0.9, eos_token_id=[], seed=[seed])
    expected = SpeculativeDecoder(target).generate(IDS, **arguments).sequences
    decoder = SpeculativeDecoder(target, BatchOracle(expected.tolist(), seed=seed, vocab=24), Coupled())
    out = decoder.generate(IDS, **arguments)
    assert torch.equal(out.sequences, expected)
    assert out.stats is not None
    assert out.stats[0].tau > 1.2  # the trees held some of it


def test_block_noise_is_fresh_in_every_cycle(target: Target, head: EagleHead) -> None:
    """What lies behind a block's end decided where it ends: drawing it again for the next cycle would be biased."""
    from eagle.sample.noise import DRAFTS, gumbel

    first = gumbel(3, 10, 8, stream=DRAFTS, cycle=7)
    assert not torch.equal(first, gumbel(3, 10, 8, stream=DRAFTS, cycle=8))
    assert not torch.equal(first, gumbel(3, 10, 8))
    coins: list[tuple[int, int]] = []
    row = _row(target, temperature=1.0)

    class Spy(TableView):
        def accepts(self, probability: float, accepted: list[int], attempt: int) -> bool:
            coins.append((len(row.tokens) + len(accepted), attempt))
            return super().accepts(probability, accepted, attempt)

    chance = Chance([], [])
    p = random_table(4, 3, seed=1)
    Block().walk(sampled_tree(random_table(4, 2, seed=2), widths=(1, 1, 1))(chance), 0, Spy(p, chance))
    assert coins == [(len(row.tokens), i) for i in range(1, len(coins) + 1)]  # all at the root's position


# Names and refusals


def test_rules_by_name() -> None:
    assert list(RULES) == ["coupled", "rejection", "block", "top_k", "typical"]
    assert make_rule(eagle.TopK(k=5)) == TopK(k=5)
    assert isinstance(make_rule("rejection"), Rejection)


def test_unknown_rules_are_named_with_the_nearest_and_options_kept_in_range() -> None:
    with pytest.raises(EagleError, match="did you mean rejection"):
        make_rule("rejecton")
    with pytest.raises(EagleError, match="coupled, rejection, block"):
        make_rule("nothing like it")
    with pytest.raises(EagleError, match=r"decode\.rule\.k is 0"):
        TopK(k=0)
    with pytest.raises(EagleError, match=r"decode\.rule\.delta is 1\.5"):
        Typical(delta=1.5)


@pytest.mark.parametrize(
    ("rule", "children", "top_k", "message"),
    [
        ("rejection", "coupled", 3, '"sampled" or "top"'),
        ("block", "coupled", 1, 'expected "sampled"'),
        ("block", "top", 1, 'expected "sampled"'),
        ("block", "sampled", 2, "expected a chain"),
    ],
)
def test_trees_that_a_rule_cannot_verify_are_refused(
    target: Target, head: EagleHead, rule: Any, children: Any, top_k: int, message: str
) -> None:
    with pytest.raises(EagleError, match=message):
        decode_config(budget=9, top_k=top_k, depth=2, rule=rule, children=children)
    decode = decode_config(budget=9, top_k=top_k, depth=2, rule="top_k", children=children)
    with pytest.raises(EagleError, match=message):
        SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule)


def test_a_rule_refuses_a_tree_it_meets_unprepared() -> None:
    p = random_table(4, 2, seed=0)
    tree = fixed_tree([0, 1, 2], [-1, 0, 0], children="coupled")(Chance([], []))
    for rule in (Rejection(), Block()):
        with pytest.raises(EagleError, match="coupled"):
            rule.walk(tree, 0, TableView(p, Chance([], [])))
    siblings = sampled_tree(p, widths=(2,))(Chance([], []))
    with pytest.raises(EagleError, match="chain"):
        Block().walk(siblings, 0, TableView(p, Chance([], [])))


def test_a_sampled_tree_keeps_its_record_when_levels_are_cut() -> None:
    q = random_table(4, 2, seed=0)
    tree = sampled_tree(q, widths=(2, 2))(Chance([], []))
    cut = tree.up_to_depth(1)
    assert (cut.nodes, cut.children) == (3, "sampled")
    torch.testing.assert_close(cut.q_after(0, 0), tree.q_after(0, 0))
    assert dataclasses.replace(cut).children_of(0) == [[1, 2], [], []]
    assert DraftTree.roots(torch.tensor([3])).children_of(0) == [[]]
