"""Replayed trees accept exactly what decoding with them accepts, from one recording."""

import itertools

import pytest
import torch

from eagle.decode.arguments import resolve
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.make import make_drafter
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuning import TreeSettings
from eagle.eval.batch_answer import answer_batch
from eagle.eval.settings import Setting, parse_setting
from eagle.eval.tuner.calibration import ConfidenceCounts
from eagle.eval.tuner.replay import Replay, joined, record
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7, 8, 5, 6], [9, 10], [3, 4, 11, 12]]
TOKENS = 16
TOP_KS = (1, 2, 4)
TREES = [
    TreeSettings(budget=budget, top_k=top_k, depth=depth, level_cost=cost)
    for budget, top_k, depth, cost in [
        *((2, 1, 1, 0.0), (5, 1, 4, 0.0), (4, 2, 2, 0.0), (9, 2, 4, 0.0), (12, 4, 3, 0.0), (40, 4, 4, 0.0)),
        *((12, 4, 4, 0.3), (5, 1, 4, 0.2), (9, 2, 4, 0.5)),
    ]
]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(tiny_model(vocab_size=64, eos_token_id=None))


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    """A head whose guesses are right now and then: it passes on what it is told."""
    torch.manual_seed(2)
    head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.05)).eval()
    with torch.no_grad():
        head.fc.weight[:, -target.hidden_size :] += torch.eye(target.hidden_size)
    return head


def recorded(target: Target, head: EagleHead, setting: Setting) -> tuple[Replay, ConfidenceCounts]:
    texts = answer_batch(
        SpeculativeDecoder(target), PROMPTS, seeds=range(3), setting=setting, max_new_tokens=TOKENS
    ).tokens
    drafter = make_drafter(target, decode_config(budget=60, top_k=4, depth=4), head=head)
    assert isinstance(drafter, HeadDrafter)
    counts, replays = ConfidenceCounts(), []
    for rows in ([0, 1], [2]):
        width = max(len(PROMPTS[b]) for b in rows)
        ids = torch.tensor([[0] * (width - len(PROMPTS[b])) + PROMPTS[b] for b in rows])
        mask = torch.tensor([[0] * (width - len(PROMPTS[b])) + [1] * len(PROMPTS[b]) for b in rows])
        call = resolve(target, ids, mask, seed=rows, max_new_tokens=TOKENS, **setting.arguments())
        replays.append(
            record(target, drafter, call.rows, [texts[b] for b in rows], top_ks=TOP_KS, depth=4, counts=counts)
        )
    return joined(replays), counts


@pytest.mark.slow
@pytest.mark.parametrize("label", ["T=0", "T=1"])
def test_every_trees_accepted_counts_are_those_of_really_decoding_with_it(
    target: Target, head: EagleHead, label: str
) -> None:
    setting = parse_setting(label)
    replay, counts = recorded(target, head, setting)
    seen = set()
    for tree in TREES:
        decode = decode_config(budget=tree.budget, top_k=tree.top_k, depth=tree.depth, level_cost=tree.level_cost)
        decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
        replayed = replay.accepted(tree)
        nodes = 0
        for row, steps in enumerate(replay.steps(tree)):
            real = answer_batch(decoder, [PROMPTS[row]], seeds=[row], setting=setting, max_new_tokens=TOKENS).stats[0]
            # The last step's walk may go on behind the recorded text.
            assert replayed[steps].tolist()[:-1] == real.accepted[:-1], f"{tree}, row {row}"
            assert len(steps) == real.verify_steps
            nodes += real.nodes
        outcome = replay.outcome(tree)
        assert int(outcome.nodes.sum()) == nodes
        assert outcome.tau == pytest.approx(3 * (TOKENS - 1) / len(outcome.levels))
        seen |= set(replayed.tolist())
    assert {0, 1, 2} <= seen, "the head is right often enough for the comparison to mean something"
    assert counts.nodes.sum() > counts.accepted.sum() > 0


def test_halves_are_the_rows_of_even_and_odd_number(target: Target, head: EagleHead) -> None:
    replay, _ = recorded(target, head, parse_setting("T=0"))
    even, odd = replay.half(0), replay.half(1)
    tree = TREES[3]
    whole = replay.accepted(tree).tolist()
    ends = list(itertools.accumulate([0, *replay.rows]))
    assert even.rows == (replay.rows[0], replay.rows[2])
    assert even.accepted(tree).tolist() == whole[: ends[1]] + whole[ends[2] :]
    assert odd.accepted(tree).tolist() == whole[ends[1] : ends[2]]
