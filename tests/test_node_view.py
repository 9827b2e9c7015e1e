"""The LM head runs once for all rows' likely nodes; what it missed costs one more run; the numbers are the same either way."""

import pytest
import torch

from eagle.draft.by_ngram import padded
from eagle.draft.tree import DraftTree
from eagle.target.target import Target
from eagle.verify import node_view
from eagle.verify.node_view import NodeLogits
from tests.tiny import tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


def tree(log_confidence: list[list[float]]) -> DraftTree:
    confidence_BN = torch.tensor(log_confidence)
    rows, nodes = confidence_BN.shape
    chain_N = torch.arange(-1, nodes - 1).expand(rows, -1)
    return DraftTree.from_parents(torch.zeros(rows, nodes, dtype=torch.int64), chain_N, confidence_BN)


def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of positions of every run of the LM head from here on."""
    runs: list[int] = []
    honest = target.logits

    def logits(features: torch.Tensor) -> torch.Tensor:
        runs.append(features.numel() // features.shape[-1])
        return honest(features)

    monkeypatch.setattr(target, "logits", logits)
    return runs


def test_roots_and_likely_nodes_of_all_rows_take_one_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    features_BNH = torch.randn(2, 3, target.hidden_size, generator=torch.Generator().manual_seed(0))
    expected_BNV = target.logits(features_BNH)
    runs = counted(target, monkeypatch)
    logits = NodeLogits(target, tree([[0.0, -0.1, -9.0], [0.0, -8.0, -9.0]]), features_BNH)
    assert runs == [3], "two roots and one node of confidence 0.9"
    for row, node in [(0, 0), (0, 1), (1, 0)]:
        torch.testing.assert_close(logits.at(row, node), expected_BNV[row, node])
    assert runs == [3]
    torch.testing.assert_close(logits.at(1, 2), expected_BNV[1, 2])
    torch.testing.assert_close(logits.at(1, 2), expected_BNV[1, 2])
    assert runs == [3, 1], "a node that was not expected is computed once"


def test_what_is_held_is_bounded_and_every_root_is_there(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_view, "MOST_AHEAD", 4)
    runs = counted(target, monkeypatch)
    confidence = [[0.0, -0.1, -0.4], [0.0, -0.2, -0.3]]
    logits = NodeLogits(target, tree(confidence), torch.randn(2, 3, target.hidden_size))
    assert runs == [4]
    assert set(logits._logits) == {(0, 0), (1, 0), (0, 1), (1, 1)}
    NodeLogits(target, tree([[0.0, -0.1]] * 6), torch.randn(6, 2, target.hidden_size))
    assert runs == [4, 6], "one per row always"
    equal = NodeLogits(target, tree([[0.0] * 5] * 2), torch.randn(2, 5, target.hidden_size))
    assert runs == [4, 6, 4], "of equally likely ones no more than that"
    assert {(0, 0), (1, 0)} <= set(equal._logits)


def test_n_grams_are_the_less_likely_the_longer_and_padding_never(target: Target) -> None:
    """A long continuation does not make the LM head run at all of its nodes, nor at a row's padding."""
    tree = padded([([5, 6, 7, 8, 7], [-1, 0, 1, 2, 0]), ([9], [-1])])
    assert tree.log_confidence_BN.exp()[0].tolist() == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 2])
    assert tree.log_confidence_BN.exp()[1].tolist() == [1, 0, 0, 0, 0]
    logits = NodeLogits(target, tree, torch.randn(2, 5, target.hidden_size))
    assert set(logits._logits) == {(0, 0), (0, 1), (0, 4), (1, 0)}
