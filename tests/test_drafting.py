"""EAGLE-2 drafting against a reference that runs the head on each path's whole text, without cache or mask."""

from typing import Any

import pytest
import torch

from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target
from tests.exact import LOG_Q, head_in_float64, in_float64
from tests.head_drafters import eagle2_drafter
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.3)).eval()


@torch.inference_mode()
def log_q_after(
    head: EagleHead, target: Target, features_LH: torch.Tensor, next_L: list[int], path: list[int]
) -> torch.Tensor:
    """log q(. | committed text, path): the head's own predictions are the features from the root on."""
    features = features_LH
    for length in range(len(path) + 1):
        tokens = torch.tensor([next_L + path[:length]])
        predicted = head(features[None], target.embed(tokens))[0]
        features = torch.cat([features_LH, predicted[len(features_LH) - 1 :]])
    return target.logits(predicted[-1]).log_softmax(-1)


def reference_tree(
    head: EagleHead,
    target: Target,
    features_LH: torch.Tensor,
    next_L: list[int],
    *,
    budget: int,
    top_k: int,
    depth: int,
) -> dict[tuple[int, ...], float]:
    """path -> log confidence of the nodes that EAGLE-2 keeps."""
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    made: dict[tuple[int, ...], float] = {}
    for _ in range(depth):
        level = {}
        for path, score in beam.items():
            best = log_q_after(head, target, features_LH, next_L, list(path)).topk(top_k)
            for token, log_q in zip(best.indices.tolist(), best.values.tolist()):
                level[(*path, token)] = score + log_q
        made |= level
        beam = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    return dict(sorted(made.items(), key=lambda item: -item[1])[: budget - 1])


@pytest.mark.parametrize(("budget", "top_k", "depth"), [(20, 4, 4), (60, 10, 3), (6, 1, 5), (5, 4, 1), (200, 3, 3)])
def test_proposed_trees_are_those_of_the_plain_procedure(
    target: Target, head: EagleHead, budget: int, top_k: int, depth: int
) -> None:
    target, head = in_float64(target), head_in_float64(head)
    torch.manual_seed(2)
    ids = torch.randint(3, 300, (15,))
    features_TH = target.features(ids[None])[0][0]
    drafter = eagle2_drafter(head, target.tokens, budget=budget, top_k=top_k, depth=depth)
    row = Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)
    drafter.reset([row], capacity=32)
    fed = 0
    # Observed in uneven blocks, with proposals in between: what a tree left in the cache must not matter.
    for block in (9, 1, 3):
        drafter.observe(
            features_TH[None, fed : fed + block], ids[None, fed + 1 : fed + block + 1], torch.tensor([block])
        )
        fed += block
        tree = drafter.propose()
        expected = reference_tree(
            head, target, features_TH[:fed], ids[1 : fed + 1].tolist(), budget=budget, top_k=top_k, depth=depth
        )
        paths: list[tuple[int, ...]] = []
        for node, (token, parent) in enumerate(zip(tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist())):
            assert parent < node
            paths.append(() if parent < 0 else (*paths[parent], token))
        assert tree.tokens_BN[0, 0] == ids[fed]
        assert set(paths[1:]) == set(expected)
        for path, confidence in zip(paths[1:], tree.log_confidence_BN[0, 1:].tolist()):
            assert confidence == pytest.approx(expected[path], rel=0, abs=LOG_Q)


def grown(
    target: Target, head: EagleHead, *, level_cost: float, prompts: int = 1, sampling: Sampling | None = None
) -> tuple[DraftTree, int]:
    """The tree behind `prompts` random texts, and how many levels the head was run for."""
    drafter = eagle2_drafter(head, target.tokens, budget=40, top_k=4, depth=6, level_cost=level_cost)
    ids_BT = torch.randint(3, 300, (prompts, 16), generator=torch.Generator().manual_seed(2))
    features_BTH = target.features(ids_BT).features_BNH
    sampler = RowSampler(sampling=sampling or Sampling())
    drafter.reset([Row(prompt_length=1, tokens=[1] * 16, sampler=sampler, max_new_tokens=9)] * prompts, capacity=32)
    drafter.observe(features_BTH[:, :15], ids_BT[:, 1:], torch.full((prompts,), 15))
    levels = 0
    run = drafter.run

    def counted(*args: Any) -> torch.Tensor:
        nonlocal levels
        levels += 1
        return run(*args)

    drafter.run = counted  # type: ignore[method-assign, assignment]
    return drafter.propose(), levels


@pytest.fixture(scope="module")
def hesitant(target: Target) -> EagleHead:
    """Its four best guesses at a node hold about half of the confidence."""
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


@pytest.fixture(scope="module")
def unsure(target: Target) -> EagleHead:
    """Its guesses are close to uniform."""
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.02)).eval()


def beam_mass(tree: DraftTree, row: int, depth: int, beam: int) -> float:
    """Confidence of the `beam` best nodes at a depth."""
    at_depth = tree.log_confidence_BN[row][tree.depths_BN[row] == depth]
    return float(at_depth.exp().topk(min(beam, len(at_depth))).values.sum())


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=4)], ids=["greedy", "sampled"])
def test_a_level_is_drafted_only_where_enough_confidence_is_left(
    target: Target, hesitant: EagleHead, sampling: Sampling | None
) -> None:
    """The levels that are drafted are the published tree's, as many as its beams are worth."""
    full, levels = grown(target, hesitant, level_cost=0.0, sampling=sampling)
    assert (levels, int(full.depths_BN.max())) == (5, 6)
    # What the beam at depth d holds bounds what depth d + 1 adds. All of level 1 is in the tree, so it is known exactly.
    mass = beam_mass(full, 0, 1, 4)
    assert grown(target, hesitant, level_cost=mass * 1.01, sampling=sampling)[1] == 0
    shallow, some = grown(target, hesitant, level_cost=mass * 0.99, sampling=sampling)
    assert 1 <= some < 5
    assert int(shallow.depths_BN.max()) == some + 1


def test_a_head_that_is_sure_goes_deep(target: Target, unsure: EagleHead) -> None:
    certain = Sampling(temperature=40.0, seed=4)  # the noise decides alone, and the draft knows the noise
    assert grown(target, unsure, level_cost=0.5, sampling=certain)[1] == 5
    assert grown(target, unsure, level_cost=0.5)[1] == 0


def test_a_batch_goes_on_while_any_row_wants_to(target: Target, hesitant: EagleHead) -> None:
    """At a cost between the rows' masses at depth 1, the first row stops when it is alone."""
    full, _ = grown(target, hesitant, level_cost=0.0, prompts=3)
    masses = [beam_mass(full, row, 1, 4) for row in range(3)]
    between = (masses[0] + max(masses)) / 2
    assert masses[0] < between
    assert grown(target, hesitant, level_cost=between, prompts=1)[1] == 0
    assert grown(target, hesitant, level_cost=between, prompts=3)[1] >= 1
    assert grown(target, hesitant, level_cost=max(masses) * 1.01, prompts=3)[1] == 0


@pytest.mark.parametrize("cost", [-0.1, 1.5, float("nan")])
def test_a_cost_that_no_level_can_have_is_refused(cost: float) -> None:
    with pytest.raises(EagleError, match=r"level_cost is .*from 0 .*to 1"):
        DynamicTree(level_cost=cost)
