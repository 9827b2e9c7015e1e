"""What holds decoding back is named from the parts of its cycle: from made-up parts, and from faults provoked for real."""

import dataclasses

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval.ledger.diagnosis import Cycle, cycle_of, diagnose
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.faults import Case, SlowRule, measure, random_head
from tests.tiny import tiny_model

torch.set_num_threads(1)

# A 7B target on one GPU with a published head: tau 4 from 60 nodes that cost hardly more than one.
GOOD = Cycle(
    batch=1,
    nodes=60,
    levels=6,
    tau=4.0,
    draft_ms=6.0,
    target_ms=26.0,
    host_ms=1.0,
    one_ms=24.0,
    plain_host_ms=0.5,
)


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("healthy", {}),
        ("acceptance", {"tau": 1.02}),
        ("acceptance", {"tau": 1.6}),
        ("compute", {"nodes": 200.0, "target_ms": 150.0}),
        ("compute", {"batch": 32, "one_ms": 30.0, "target_ms": 130.0, "tau": 2.6}),
        ("draft", {"draft_ms": 90.0}),
        ("host", {"host_ms": 100.0}),
        # Everything is bad: the head would not pay even if all the rest were free.
        ("acceptance", {"tau": 1.0, "draft_ms": 20.0, "host_ms": 10.0}),
    ],
)
def test_the_single_change_that_recovers_most_is_named(cause: str, changes: dict[str, float]) -> None:
    found = diagnose(dataclasses.replace(GOOD, **changes))
    assert found.cause == cause
    assert found.speedup == pytest.approx(dataclasses.replace(GOOD, **changes).speedup)


def test_a_product_that_is_slow_for_few_rows_is_not_called_the_machines_limit() -> None:
    """Three nodes that take longer than four: seen where a library's product is made for one row or for many."""
    slow = dataclasses.replace(GOOD, nodes=3.0, target_ms=90.0, one_ms=58.0, tau=2.0, levels=2)
    assert diagnose(dataclasses.replace(slow, more_nodes=4, more_nodes_ms=95.0)).name == "compute saturated"
    found = diagnose(dataclasses.replace(slow, more_nodes=4, more_nodes_ms=74.0))
    assert (found.cause, found.name) == ("compute", "verification too dear")
    assert "4 nodes take 74.0 ms" in found.figure


def test_the_speedup_and_what_each_ideal_recovers_follow_the_cost_model() -> None:
    assert GOOD.speedup == pytest.approx(4.0 * 24.5 / 33.0)
    assert GOOD.breakeven_tau == pytest.approx(33.0 / 24.5)
    perfect = {
        "acceptance": dataclasses.replace(GOOD, tau=7.0),
        "draft": dataclasses.replace(GOOD, draft_ms=0.0),
        "compute": dataclasses.replace(GOOD, target_ms=24.0),
        "host": dataclasses.replace(GOOD, host_ms=0.0),
    }
    for cause, cycle in perfect.items():
        assert GOOD.recoverable[cause] == pytest.approx(cycle.speedup / GOOD.speedup), cause  # type: ignore[index]


def test_the_words_hold_the_figure_that_says_so_and_a_large_batch_is_told_from_a_large_tree() -> None:
    batch = dataclasses.replace(GOOD, batch=32, one_ms=30.0, target_ms=300.0)
    text = str(diagnose(batch, alone=GOOD))
    assert "compute saturated" in text
    assert "batch of 32" in text
    assert "10.0 times" in text
    assert "for a single row it takes 1.1 times" in text
    assert "smaller batches" in text
    tree = str(diagnose(dataclasses.replace(GOOD, nodes=200.0, target_ms=240.0)))
    assert "200 nodes" in tree
    assert "decode.drafter.budget" in tree
    assert "100.0 ms of a cycle's 132.0 ms" in str(diagnose(dataclasses.replace(GOOD, host_ms=100.0)))


def test_what_to_change_is_something_that_the_drafter_has() -> None:
    few_accepted, slow_draft = dataclasses.replace(GOOD, tau=1.02), dataclasses.replace(GOOD, draft_ms=90.0)
    for drafter, by_name in (("ngram", "decode.drafter."), ("model", "draft model")):
        for cycle in (few_accepted, slow_draft):
            found = diagnose(cycle, drafter=drafter)
            assert by_name in found.change
            assert "eagle tune" not in found.change
            assert "train the head" not in found.change
            # Only the advice differs, not what is found.
            assert (found.cause, found.figure) == (diagnose(cycle).cause, diagnose(cycle).figure)
    assert "train the head" in diagnose(few_accepted).change
    assert "eagle tune finds" in diagnose(few_accepted).change
    tuned = diagnose(few_accepted, drafter="tuned").change
    assert "train the head" in tuned
    assert "eagle tune" not in tuned
    assert "eagle tune" in diagnose(slow_draft, drafter="chain").change


def test_parts_are_the_stats_per_verify_step() -> None:
    drafted = [
        DecodeStats(
            accepted=[1, 0, 2], new_tokens=7, nodes=24, draft_ms=6.0, verify_ms=30.0, prefill_ms=5.0, total_ms=44.0
        ),
        DecodeStats(accepted=[1], new_tokens=3, nodes=8, draft_ms=2.0, verify_ms=10.0, prefill_ms=5.0, total_ms=18.0),
    ]
    plain = [DecodeStats(accepted=[0] * 7, verify_ms=56.0, prefill_ms=5.0, total_ms=68.0)]
    cycle = cycle_of(drafted, plain, batch=1, levels=3)
    assert (cycle.nodes, cycle.tau, cycle.draft_ms, cycle.target_ms, cycle.host_ms) == (8, 2.0, 2.0, 10.0, 1.0)
    assert (cycle.one_ms, cycle.plain_host_ms, cycle.levels) == (8.0, 1.0, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(tiny_model(num_hidden_layers=6))


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleHeadConfig.for_target(target.config)).eval()


PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


def decoder(target: Target, head: EagleHead, rule: SlowRule | None = None) -> SpeculativeDecoder:
    decode = decode_config(budget=4, top_k=1, depth=3)
    return SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule)


@pytest.mark.slow
def test_an_untrained_head_and_a_slow_host_are_told_apart_in_real_runs(target: Target, head: EagleHead) -> None:
    untrained = Case(name="untrained", expected="acceptance", decoder=decoder(target, random_head(head)))
    cycle = measure(untrained, PROMPTS, max_new_tokens=10)
    assert cycle.levels == 3
    assert cycle.nodes == 4
    # A tiny target's forward costs what any forward costs: only its acceptance is told reliably here.
    assert cycle.tau < 1.5
    assert cycle.recoverable["acceptance"] > 2.5
    slow = Case(name="slow", expected="host", decoder=decoder(target, head, SlowRule(0.3)))
    cycle = measure(slow, PROMPTS, max_new_tokens=5)
    found = diagnose(cycle)
    assert found.cause == "host"
    assert cycle.host_ms > 300
    assert "outside the forwards" in found.figure


@pytest.mark.slow
def test_an_oversized_tree_and_a_huge_batch_are_compute_bound_in_real_runs() -> None:
    """Wide enough a target that its products, not Python, take the time."""
    target = Target.from_pretrained(
        tiny_model(hidden_size=256, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    )
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(target.config)
    head = EagleHead(config).eval()
    # Trees of one level: what is lost to a head that guesses nothing is at most a factor of two.
    for name, budget, batch in (("as it is", 2, 1), ("oversized tree", 300, 1), ("huge batch", 24, 32)):
        decode = decode_config(budget=budget, top_k=budget - 1, depth=1)
        made = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
        case = Case(name=name, expected="compute", decoder=made, batch=batch)
        prompts = [PROMPTS[row % 2] for row in range(max(2, batch))]
        found = diagnose(measure(case, prompts, max_new_tokens=6))
        assert (found.cause == "compute") == (name != "as it is"), f"{name}: {found}"


def test_a_target_that_says_nothing_has_no_cycle_to_diagnose(head: EagleHead) -> None:
    target = Target.from_pretrained(tiny_model(num_hidden_layers=6))
    case = Case(name="silent", expected=None, decoder=decoder(target, head))
    first = int(target.model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())
    target.model.generation_config.eos_token_id = first
    with pytest.raises(EagleError, match=r"all 2 prompts with their first token.*name others in --prompts"):
        measure(case, [PROMPTS[0]] * 2, max_new_tokens=4)
