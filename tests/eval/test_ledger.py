"""The ledger: costs from timing, predictions from the other half of the prompts, and what they are held against."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.config import Recipe, read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.eval import harness
from eagle.eval.answers import Answer, Request
from eagle.eval.ledger import ledger as ledgers
from eagle.eval.ledger.cost import (
    DraftCost,
    Standing,
    TargetCost,
    Timing,
    measure_draft,
    measure_target,
    resized,
    states,
)
from eagle.eval.ledger.flops import target_flops
from eagle.eval.ledger.ledger import Fit, halves
from eagle.eval.results import Results, parse
from eagle.eval.settings import parse_setting
from eagle.eval.statistics import falls_through_one
from eagle.eval.suites.prompt import Prompt
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.recipes import write_recipe
from tests.tiny import tiny_model

torch.set_num_threads(1)


def timing(ms: float) -> Timing:
    return Timing(median=ms, low=ms, high=ms, samples=1)


def cost(batch: int = 1, **points: float) -> TargetCost:
    return TargetCost(batch=batch, points={int(name[1:]): timing(ms) for name, ms in points.items()})


def test_alpha_and_beta_are_those_of_the_line_that_was_put_in() -> None:
    line = cost(batch=2, **{f"n{nodes}": 20 + 0.5 * 2 * nodes for nodes in (1, 2, 8, 32)})
    assert line.alpha == pytest.approx(20)
    assert line.slope == pytest.approx(0.5)
    assert [line.beta(nodes) for nodes in (1, 8, 32)] == pytest.approx([0.5] * 3)
    assert line.at(4) == pytest.approx(24), "between two points"
    assert line.at(64) == pytest.approx(84), "beyond the last one"
    bent = cost(n1=20.0, n8=20.0, n16=20.0, n64=68.0)
    assert bent.beta(64) > bent.beta(16)
    assert bent.at(12) == 20


def test_a_trees_drafting_cost_is_read_between_the_widths_and_levels_measured() -> None:
    draft = DraftCost(batch=1, points={(k, d): timing(1 + k * d) for k in (1, 5) for d in (1, 3)})
    assert draft.at(1, 2) == pytest.approx(3)
    assert draft.at(3, 3) == pytest.approx(10)
    assert draft.at(5, 4) == pytest.approx(21)


def test_a_resized_tree_keeps_its_most_confident_nodes_connected_or_gains_unlikely_ones() -> None:
    tree = DraftTree.from_parents(
        torch.tensor([[9, 1, 2, 3, 4]]),
        torch.tensor([[-1, 0, 0, 1, 2]]),
        torch.tensor([[0.0, -0.5, -2.0, -0.7, -2.5]]),
    )
    small = resized(tree, 3)
    assert small.tokens_BN.tolist() == [[9, 1, 3]]
    assert small.parents_BN.tolist() == [[-1, 0, 1]]
    assert small.log_confidence_BN[0].tolist() == pytest.approx([0.0, -0.5, -0.7])
    large = resized(tree, 7)
    assert large.nodes == 7
    assert large.tokens_BN[0, :5].tolist() == tree.tokens_BN[0].tolist()
    assert float(large.log_confidence_BN[0, 5:].max()) < -10
    assert resized(tree, 1).tokens_BN.tolist() == [[9]]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    target = Target.from_pretrained(tiny_model())
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()
    return SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(budget=6, top_k=2, depth=3))


@pytest.mark.parametrize("label", ["T=0", "T=1"])
def test_timing_commits_nothing_and_proposes_what_decoding_proposes(decoder: SpeculativeDecoder, label: str) -> None:
    prompts, setting = [[5, 6, 7], [8, 9]], parse_setting(label)
    standing = Standing(decoder, prompts, setting, room=8)
    lengths, tree = standing.cache.lengths_B.tolist(), standing.propose()
    for _ in range(3):
        assert standing.verifying(tree) > 0
    assert standing.cache.lengths_B.tolist() == lengths == [3, 2]
    again = standing.propose()
    assert again.tokens_BN.tolist() == tree.tokens_BN.tolist()
    seen = []
    propose = decoder._propose
    try:
        decoder._propose = lambda batch: seen.append(propose(batch)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
        mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
        decoder.generate(ids, mask, max_new_tokens=3, seed=[0, 1], **setting.arguments())
    finally:
        del decoder._propose
    assert seen[0].tokens_BN.tolist() == tree.tokens_BN.tolist()


def test_every_point_that_was_asked_for_is_timed_and_the_drafters_shape_is_left_as_it_was(
    decoder: SpeculativeDecoder,
) -> None:
    setting = parse_setting("T=0")
    costs = measure_target(decoder, [[5, 6], [7]], setting=setting, batches=[2, 1], nodes=[4], repeats=2)
    assert {batch: list(one.points) for batch, one in costs.items()} == {1: [1, 4], 2: [1, 4]}
    assert costs[1].points[4].samples == 4, "two states, two repeats"
    shape = decoder.drafter.shape  # type: ignore[union-attr]
    draft = measure_draft(decoder, [[5, 6]], setting=setting, batch=1, shapes=[(1, 1), (2, 3)], repeats=2)
    assert set(draft.points) == {(1, 1), (2, 3)}
    assert decoder.drafter.shape is shape  # type: ignore[union-attr]


def test_costs_are_timed_behind_prompts_from_the_whole_list_and_are_what_many_cycles_cost_together() -> None:
    """A suite's tasks come one after the other, and their prompts' lengths differ by a factor of ten."""
    assert list(states(range(60), 1)) == [[0], [10], [20], [30], [40], [50]]
    assert list(states(range(5), 2)) == [[0, 1], [2, 3]]
    assert list(states(range(4), 4)) == [[0, 1, 2, 3]]
    # Two short prefixes and a long one: the middle sample knows nothing of the long one, a request does.
    assert Timing.of([[9.0, 10.0, 11.0], [10.0, 10.0, 90.0], [40.0]]).median == pytest.approx(20.0)
    requests = [request(f"p{i}") for i in range(30)]
    prompts = [Prompt(id=f"p{i}", category="a", turns=("x" * i,), reference=(), source="s") for i in range(30)]
    target = Target.from_pretrained(tiny_model())
    target.tokenizer = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledgers, "prompt_ids", lambda tokenizer, messages: [0] * len(messages[-1]["content"]))
        lengths = [len(ids) for ids in ledgers._contexts(target, requests, prompts, count=3)]
    half = len(requests[0].answers["plain"].tokens) // 2
    assert [length - half for length in lengths] == [0, 10, 20]


def test_a_measured_curve_is_shown_beside_a_prediction_of_the_same_drafter_only() -> None:
    target = Target.from_pretrained(tiny_model())
    head = EagleHead(EagleHeadConfig.for_target(target.config))
    methods = harness.make_methods(
        ("plain", "eagle2", "chain", "ngram"), target, head, decode=decode_config(), chain_depth=2
    )
    measured = [{"setting": "T=0", "drafter": "eagle2", "points": []}]
    found = {name: ledgers._curve_of(methods[name], parse_setting("T=0"), measured) for name in methods}
    assert found == {"plain": None, "eagle2": measured[0], "chain": None, "ngram": None}
    assert ledgers._curve_of(methods["eagle2"], parse_setting("T=1"), measured) is None


def test_operations_are_two_per_weight_and_attention_per_key() -> None:
    target = Target.from_pretrained(tiny_model())
    flops = target_flops(target)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    assert flops.node == 2 * 3 * layer
    assert flops.node_and_key == 4 * 3 * 32
    assert flops.logits == 2 * 32 * 384
    assert flops.per_node(10) == flops.node + 10 * flops.node_and_key
    experts = target_flops(Target.from_pretrained(tiny_model("mixtral")))
    router, expert = 32 * 4, 3 * 32 * 64
    assert experts.node == 2 * 3 * (32 * 32 * 2 + 32 * 16 * 2 + router + 2 * expert)


def test_the_curve_crosses_one_between_the_sizes_around_it() -> None:
    assert falls_through_one([(1, 1.5), (2, 1.25), (4, 0.75), (8, 0.5)]) == 3.0
    assert falls_through_one([(1, 1.5), (2, None), (3, 0.5)]) is None, "where between 1 and 3 nobody measured"
    assert falls_through_one([(1, 1.5), (2, 0.5), (3, 1.5)]) is None
    assert falls_through_one([(1, 1.5), (2, 1.2)]) is None
    assert falls_through_one([(1, 0.9), (2, 0.8)]) is None


def answer(*, accepted: list[int], seconds: float, draft: float, verify: float, nodes: int) -> Answer:
    return Answer(
        tokens=[0] * (1 + len(accepted) + sum(accepted)),
        seconds=seconds,
        first_token_seconds=0.1,
        accepted=accepted,
        nodes=nodes,
        prefill_seconds=0.1,
        draft_seconds=draft,
        verify_seconds=verify,
    )


def request(prompt: str) -> Request:
    return Request(
        prompt=prompt,
        turn=0,
        category="a",
        setting="T=0",
        seed=0,
        prompt_tokens=3,
        order=["plain", "eagle2"],
        answers={
            "plain": answer(accepted=[0] * 8, seconds=0.1 + 0.8 + 0.08, draft=0, verify=0.8, nodes=8),
            "eagle2": answer(accepted=[1, 1, 1, 1], seconds=0.1 + 0.6 + 0.04, draft=0.1, verify=0.5, nodes=24),
        },
    )


def other(prompt: str) -> Request:
    """As `request`, but the head is of no use, drafting is slow, and its text is the shorter one."""
    answers = {
        "plain": answer(accepted=[0] * 8, seconds=0.1 + 0.8 + 0.08, draft=0, verify=0.8, nodes=8),
        "eagle2": answer(accepted=[0] * 4, seconds=0.1 + 1.2 + 0.08, draft=0.4, verify=0.8, nodes=16),
    }
    return dataclasses.replace(request(prompt), answers=answers)


def silent(prompt: str) -> Request:
    """The target ends its answer with the first token: no verify step."""
    ended = answer(accepted=[], seconds=0.1001, draft=0, verify=0, nodes=0)
    return dataclasses.replace(request(prompt), answers=dict.fromkeys(("plain", "eagle2", "chain"), ended))


def ledger_of_requests(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = ("plain", "eagle2")
) -> dict[str, Any] | None:
    """Parts that are timed are given: a target of 100 ms for one node and 125 for six, a proposal of 20."""
    target = Target.from_pretrained(tiny_model())
    head = EagleHead(EagleHeadConfig.for_target(target.config))
    methods = harness.make_methods(names, target, head, decode=decode_config(), chain_depth=2)
    monkeypatch.setattr(ledgers, "_contexts", lambda *a, **k: [[1]])
    monkeypatch.setattr(ledgers, "measure_proposals", lambda *a, **k: {1: (timing(20.0), 6, 3)})
    monkeypatch.setattr(
        ledgers, "measure_target", lambda *a, batches, **k: {batch: cost(n1=100.0, n6=125.0) for batch in batches}
    )
    return ledgers.ledger(target, methods, [parse_setting("T=0")], requests, [])


def test_the_prediction_is_the_cost_model_fitted_on_every_other_prompt_and_held_against_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [request("a"), other("b"), request("c"), other("d")]
    first, second = halves(requests)
    assert ["".join(r.prompt for r in half) for half in (first, second)] == ["ac", "bd"]
    fit = Fit.of([r.answers["eagle2"] for r in first])
    assert (fit.tau, fit.nodes) == (2.0, 6.0)
    assert (fit.draft_ms, fit.target_ms, fit.host_ms) == pytest.approx((25.0, 125.0, 10.0))
    found = ledger_of_requests(requests, monkeypatch)
    assert found is not None
    (entry,) = found["settings"][0]["methods"]
    # Of the fitted half, though the other one accepts nothing and drafts four times as long.
    assert (entry["tau"], entry["nodes"], entry["draft_ms"], entry["host_ms"]) == pytest.approx((2.0, 6.0, 25.0, 10.0))
    expected = 2.0 * (100 + 10) / (25 + 125 + 10)
    assert entry["predicted"] == pytest.approx(expected)
    assert entry["predicted_from_run"] == pytest.approx(expected)
    # Of the other half alone; four tokens behind the prefill stand against as many of plain's eight.
    measured = (0.88 / 8) / (1.28 / 4)
    assert entry["measured"]["pooled"] == pytest.approx(measured)
    assert entry["measured"]["median"] == pytest.approx(measured)
    assert entry["measured"]["samples"] == 2
    assert entry["error"] == pytest.approx(expected / measured - 1)
    assert entry["gain"]["breakeven_tau"] == pytest.approx(160 / 110)
    assert entry["gain"]["holds"] is (entry["predicted"] > 1) is (160 / 2 < 110)
    assert entry["rejected"]["nodes_rejected"] == 2 * (24 - 8) + 2 * (16 - 4)
    assert entry["rejected"]["share"] == pytest.approx((32 + 24) / (48 + 32))


def test_pooled_requests_count_by_their_tokens_behind_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request("a"), request("b"), request("c"), other("d")]
    found = ledger_of_requests(requests, monkeypatch)
    assert found is not None
    (entry,) = found["settings"][0]["methods"]
    plain = 0.88 / 8
    assert entry["measured"]["pooled"] == pytest.approx((plain * 8 + plain * 4) / (0.64 + 1.28))


def test_a_method_whose_answers_in_one_half_end_with_their_first_token_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ledger_of_requests([silent("a"), request("b")], monkeypatch) is None
    assert ledger_of_requests([request("a"), silent("b")], monkeypatch) is None
    drafts_later = [silent("a"), request("b"), silent("c")]
    spoken = answer(accepted=[1, 1], seconds=0.5, draft=0.1, verify=0.2, nodes=6)
    requests = [dataclasses.replace(one, answers={**one.answers, "chain": spoken}) for one in drafts_later]
    found = ledger_of_requests(requests, monkeypatch, names=("plain", "eagle2", "chain"))
    assert found is not None
    assert [entry["method"] for entry in found["settings"][0]["methods"]] == ["chain"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = read_recipe(write_recipe(tmp_path))
    torch.manual_seed(0)
    target = Target.from_config(recipe.target)
    save_head(EagleHead(EagleHeadConfig.for_target(target.config)), recipe.head_dir)
    return recipe


@pytest.mark.slow
def test_an_evaluation_writes_its_ledger_and_prints_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledgers, "NODES", (1, 2, 4))
    overrides = ["--eval.batches=[1,2]", "--eval.methods=[plain,eagle2,chain]", "--eval.max_new_tokens=6"]
    overrides.append("--eval.ledger=on")
    result = harness.evaluate(read_recipe(tmp_path / "recipe.yaml", overrides))
    assert result == json.loads((recipe.eval_dir / "results.json").read_text())
    assert parse(Results, result).ledger is not None
    (one,) = result["ledger"]["settings"]
    assert (one["setting"], one["main"], one["held_out"]) == ("T=0", "eagle2", True)
    assert [entry["method"] for entry in one["methods"]] == ["eagle2", "chain"]
    tree = one["methods"][0]
    assert tree["nodes"] == 6
    assert tree["levels"] in (2, 3)
    assert tree["predicted"] > 0
    assert [point["batch"] for point in one["curve"]] == [1, 2]
    assert all(point["measured"] is not None for point in one["curve"])
    assert {cost["batch"] for cost in one["target"]} == {1, 2}
    # One row is timed whatever eval.batches asks for.
    again = harness.evaluate(read_recipe(tmp_path / "recipe.yaml", [*overrides, "--eval.batches=[2]"]))
    points = again["ledger"]["settings"][0]["curve"]
    assert [(point["batch"], point["measured"] is None) for point in points] == [(1, True), (2, False)]
    printed = " ".join(capsys.readouterr().out.split())
    assert "predicted" in printed
    assert "diagnosis, T=0, eagle2:" in printed
    assert "speed-up by batch" in printed


@pytest.mark.slow
def test_switched_off_or_without_drafts_there_is_no_ledger(recipe: Recipe, tmp_path: Path) -> None:
    overrides = ["--eval.methods=[plain,eagle2]", "--eval.max_new_tokens=3"]
    result = harness.evaluate(read_recipe(tmp_path / "recipe.yaml", overrides))
    assert result["ledger"] is None
    plain = dataclasses.replace(recipe.eval, methods=("hf", "plain"), max_new_tokens=3, ledger="on")
    assert harness.evaluate(dataclasses.replace(recipe, eval=plain))["ledger"] is None
