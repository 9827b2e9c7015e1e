"""EAGLE-2 drafting against a reference that runs the head on each path's whole text, without cache or mask."""

import pytest
import torch

from eagle.drafting import EagleDrafter
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.rows import Row
from eagle.sampling import RowSampler, Sampling
from eagle.target import Target
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
    torch.manual_seed(2)
    ids = torch.randint(3, 300, (15,))
    features_TH = target.features(ids[None])[0][0]
    drafter = EagleDrafter(head, target.tokens, budget=budget, top_k=top_k, depth=depth)
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
            assert confidence == pytest.approx(expected[path], rel=1e-5, abs=1e-4)
