"""The fastest tree follows from what is accepted and what the parts cost."""

import numpy as np
import pytest

from eagle.draft.tuning import TreeSettings
from eagle.eval.ledger.cost import DraftCost, TargetCost, Timing
from eagle.eval.tuner.replay import NEVER, Replay
from eagle.eval.tuner.tree_search import NO_DRAFTING, Prices, budget_curve, different, forecast, search, sizes

TOP_KS, DEPTH, POSITIONS = (1, 2), 3, 12


def timing(ms: float) -> Timing:
    return Timing(median=ms, low=ms, high=ms, samples=1)


def prices(*, node: float, level: float, batch: int = 1, rest: float = 1.0) -> Prices:
    """A target that takes 20 ms and `node` more per further node, a head that takes `level` per level."""
    return Prices(
        batch=batch,
        target=TargetCost(batch=batch, points={n: timing(20 + node * (n - 1)) for n in (1, 2, 4, 8, 16, 60)}),
        draft=DraftCost(batch=batch, points={(k, d): timing(level * d) for k in TOP_KS for d in (1, 3)}),
        rest_ms=rest,
        plain_rest_ms=0.0,
    )


@pytest.fixture
def replay() -> Replay:
    """A head whose best guess is always right, and the one after it at the first six positions; a wide tree holds that one
    from four nodes on."""
    needed = np.full((POSITIONS, 2, DEPTH, DEPTH), NEVER, dtype=np.int16)
    for levels in range(1, DEPTH + 1):
        needed[:, :, levels - 1, 0] = 2
        if levels > 1:
            needed[:6, 0, levels - 1, 1] = 3
            needed[:6, 1, levels - 1, 1] = 4
    return Replay(
        top_ks=TOP_KS,
        depth=DEPTH,
        rows=(POSITIONS,),
        needed_PRDD=needed,
        gains_PRD=np.tile(np.array([0.9, 0.2], dtype=np.float32), (POSITIONS, 2, 1)),
    )


def test_a_forecast_prices_every_verify_step(replay: Replay) -> None:
    tree = TreeSettings(budget=3, top_k=1, depth=2)
    found = forecast(tree, replay, prices(node=2, level=3))
    assert (found.tau, found.nodes, found.levels) == (2.4, 3.0, 2.0), "steps at 0, 3, 6, 8 and 10"
    assert found.cycle_ms == pytest.approx(20 + 2 * 2 + 3 * 2 + 1)
    assert found.speedup == pytest.approx(2.4 * 20 / 31)
    # The third level never helps; level_cost leaves it out: two levels are drafted, three nodes verified.
    dynamic = forecast(TreeSettings(budget=4, top_k=1, depth=3, level_cost=0.5), replay, prices(node=2, level=3))
    assert (dynamic.levels, dynamic.nodes, dynamic.cycle_ms) == (2.0, 3.0, found.cycle_ms)


@pytest.mark.parametrize(
    ("node", "level", "expected"),
    [
        (1.0, 1.0, TreeSettings(budget=3, top_k=1, depth=2)),
        (1.0, 10.0, TreeSettings(budget=2, top_k=1, depth=1)),  # a second level costs more than it brings
        (50.0, 1.0, NO_DRAFTING),
        (0.0, 80.0, NO_DRAFTING),
    ],
)
def test_the_fastest_tree_changes_with_the_prices(
    replay: Replay, node: float, level: float, expected: TreeSettings
) -> None:
    found = search(replay, prices(node=node, level=level))
    assert found[0].tree == expected
    assert [one.speedup for one in found] == sorted((one.speedup for one in found), reverse=True)


def test_every_size_is_tried_once_and_dynamic_depth_for_single_rows_only(replay: Replay) -> None:
    trees = list(sizes(replay))
    assert len(set(trees)) == len(trees)
    assert max(tree.budget for tree in trees if tree.top_k == 2) == 1 + 2 + 4 + 4
    assert all(tree.budget > tree.depth for tree in trees)
    alone, together = (search(replay, prices(node=1, level=1, batch=batch)) for batch in (1, 4))
    assert any(one.tree.level_cost for one in alone)
    assert not any(one.tree.level_cost for one in together)


def test_the_trees_to_confirm_differ(replay: Replay) -> None:
    found = search(replay, prices(node=1, level=1))
    chosen = different(found, 3)
    assert chosen[0].tree == found[0].tree
    assert NO_DRAFTING not in [one.tree for one in chosen]
    for i, one in enumerate(chosen):
        for other in chosen[:i]:
            assert one.tree.top_k != other.tree.top_k or max(one.nodes, other.nodes) >= 1.25 * min(
                one.nodes, other.nodes
            )
    curve = budget_curve(found)
    assert [point["budget"] for point in curve] == sorted({tree.budget for tree in sizes(replay)})
    assert max(point["speedup"] for point in curve) == pytest.approx(found[0].speedup)
