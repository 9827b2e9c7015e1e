"""The sampled tree: its recorded q is the head's own after temperature and filters, its children are drawn from it."""

import pytest
import torch

from eagle.draft.sampled_tree import SampledTree
from eagle.draft.tree import DraftTree
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.sample.noise import DRAFTS, gumbel
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target
from tests.exact import LOG_Q, apart, head_in_float64, in_float64
from tests.head_drafters import eagle2_drafter
from tests.test_drafting import log_q_after
from tests.tiny import tiny_model

SAMPLING = Sampling(temperature=0.8, top_k=20, seed=5)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.3)).eval()


def draft(
    target: Target, head: EagleHead, sampling: Sampling, *, budget: int, top_k: int, depth: int
) -> tuple[DraftTree, torch.Tensor, list[int]]:
    """A tree after 12 committed tokens, their features, and the tokens that follow them."""
    ids = torch.randint(3, 300, (13,), generator=torch.Generator().manual_seed(2))
    features_TH = target.features(ids[None])[0][0]
    drafter = eagle2_drafter(head, target.tokens, budget=budget, top_k=top_k, depth=depth, children="sampled")
    row = Row(prompt_length=1, tokens=ids.tolist(), sampler=RowSampler(sampling=sampling), max_new_tokens=9)
    drafter.reset([row], capacity=32)
    drafter.observe(features_TH[None, :12], ids[None, 1:], torch.tensor([12]))
    return drafter.propose(), features_TH[:12], ids[1:].tolist()


@pytest.mark.parametrize(("budget", "top_k", "depth"), [(20, 4, 3), (13, 3, 3), (6, 1, 5), (9, 8, 1), (60, 10, 6)])
def test_children_are_gumbel_top_k_draws_from_the_heads_tempered_q(
    target: Target, head: EagleHead, budget: int, top_k: int, depth: int
) -> None:
    target, head = in_float64(target), head_in_float64(head)
    tree, features_LH, next_L = draft(target, head, SAMPLING, budget=budget, top_k=top_k, depth=depth)
    assert tree.children == "sampled"
    assert tree.nodes <= budget
    assert int(tree.depths_BN.max()) == depth
    assert tree.q_row_BN is not None
    tokens, parents, children = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist(), tree.children_of(0)
    expanded = 0
    for node, siblings in enumerate(children):
        assert (int(tree.q_row_BN[0, node]) >= 0) == bool(siblings)
        if not siblings:
            continue
        expanded += 1
        path: list[int] = []
        above = node
        while above > 0:
            path.insert(0, tokens[above])
            above = parents[above]
        log_q_V = log_q_after(head, target, features_LH, next_L, path)
        kept = (log_q_V / 0.8).topk(20)
        q_V = torch.zeros(384, dtype=torch.float64).index_put((kept.indices,), kept.values.double().softmax(-1))
        assert apart(tree.q_after(0, node), q_V) < 2 * LOG_Q  # of the float32 logits divided by 0.8
        # In draw order: the largest of log q + G, best first, with the noise of this cycle alone.
        noise_V = gumbel(5, 12 + len(path) + 1, 384, stream=DRAFTS, cycle=12)
        drawn = (tree.q_after(0, node).log() + noise_V).topk(len(siblings)).indices.tolist()
        assert [tokens[child] for child in siblings] == drawn
    assert expanded == 1 + (depth - 1) * SampledTree(budget=budget, top_k=top_k, depth=depth).expanded


def test_the_most_confident_drawn_nodes_are_expanded(target: Target, head: EagleHead) -> None:
    tree, *_ = draft(target, head, SAMPLING, budget=20, top_k=4, depth=3)
    children, confidence_N = tree.children_of(0), tree.log_confidence_BN[0]
    for depth in (1, 2):
        level = [node for node in range(tree.nodes) if tree.depths_BN[0, node] == depth]
        grown = [node for node in level if children[node]]
        left = [node for node in level if not children[node]]
        assert min(confidence_N[node] for node in grown) >= max(confidence_N[node] for node in left)


def test_greedy_rows_draft_the_best_tokens_of_plain_q(target: Target, head: EagleHead) -> None:
    tree, features_LH, next_L = draft(target, head, Sampling(), budget=5, top_k=4, depth=1)
    best = log_q_after(head, target, features_LH, next_L, []).topk(4).indices.tolist()
    assert tree.tokens_BN[0, 1:].tolist() == best


@pytest.mark.parametrize(
    ("budget", "top_k", "depth", "widest", "expanded", "siblings"),
    [(60, 10, 6, 9, 3, 3), (6, 1, 5, 1, 1, 1), (60, 1, 6, 1, 1, 1), (3, 10, 6, 1, 1, 1), (9, 8, 1, 8, 2, 4)],
)
def test_widths_follow_from_the_budget(
    budget: int, top_k: int, depth: int, widest: int, expanded: int, siblings: int
) -> None:
    shape = SampledTree(budget=budget, top_k=top_k, depth=depth)
    assert (shape.widest, shape.expanded, shape.siblings) == (widest, expanded, siblings)
    assert 1 + shape.widest + (shape.levels - 1) * shape.expanded * shape.siblings <= budget


def test_a_budget_of_one_is_the_root_alone(target: Target, head: EagleHead) -> None:
    assert draft(target, head, SAMPLING, budget=1, top_k=4, depth=3)[0].nodes == 1


def test_a_reduced_vocabulary_draws_target_ids_from_a_q_that_is_zero_outside(target: Target) -> None:
    torch.manual_seed(3)
    head = EagleHead(EagleHeadConfig.for_target(target.config, draft_vocab_size=30, initializer_range=0.3)).eval()
    counts_V = torch.randint(0, 1000, (384,))
    vocabulary = DraftVocabulary.most_frequent(counts_V, 30)
    head.set_vocabulary(vocabulary)
    tree, *_ = draft(target, head, SAMPLING, budget=20, top_k=4, depth=3)
    inside_V = head.t2d
    for node, siblings in enumerate(tree.children_of(0)):
        if siblings:
            q_V = tree.q_after(0, node)
            assert q_V.shape == (384,)
            assert float(q_V[~inside_V].sum()) == 0.0
            assert all(q_V[tree.tokens_BN[0, child]] > 0 for child in siblings)
