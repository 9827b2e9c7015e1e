"""Nothing is drafted behind a token that ends its row, whatever drafts, and no text changes by it."""

from typing import Any

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from eagle.verify.rules import make_rule
from tests.decoding import decode_config
from tests.oracles import answers, padded
from tests.tiny import tiny_model

VOCAB = 96
EOS = list(range(4, VOCAB, 5))
PROMPTS = [[5, 6, 7, 5, 6, 8, 5, 6], [11, 12, 13], [21, 4, 9, 21, 4, 9, 21]]
KINDS: dict[str, dict[str, Any]] = {
    "eagle2": dict(budget=14, top_k=3, depth=4),
    "eagle2 with a level cost": dict(budget=14, top_k=3, depth=4, level_cost=0.05),
    "static": dict(drafter="static"),
    "chain": dict(drafter="chain", depth=5),
    "model": dict(drafter="model", budget=14, top_k=3, depth=4),
    "model, sampled": dict(drafter="model", budget=14, top_k=3, depth=4, rule="rejection"),
    "model, sampled chain": dict(drafter="model", budget=9, top_k=1, depth=5, rule="block"),
    "ngram": dict(drafter="ngram", continuations=3, depth=5),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(vocab_size=VOCAB, num_hidden_layers=2))


class Watched:
    """A decoder whose drafter's trees are kept."""

    def __init__(self, target: Target, kind: dict[str, Any]):
        head, model = None, None
        if kind.get("drafter") == "model":
            model = Target(tiny_model(vocab_size=VOCAB, num_hidden_layers=1, seed=3))
        elif kind.get("drafter") != "ngram":
            torch.manual_seed(1)
            head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()
        self.decoder = SpeculativeDecoder.from_pretrained(
            target, head, draft_model=model, decode=decode_config(**kind), rule=make_rule(kind.get("rule", "coupled"))
        )
        self.trees: list[DraftTree] = []
        drafter = self.decoder.drafter
        assert drafter is not None
        propose = drafter.propose

        def watched() -> DraftTree:
            self.trees.append(propose())
            return self.trees[-1]

        drafter.propose = watched  # type: ignore[method-assign]

    def behind(self, eos: list[int]) -> tuple[int, int]:
        """(nodes that hang on one of these tokens, tokens of these that hang on a root)."""
        hanging = standing = 0
        for tree in self.trees:
            ends_BN = torch.isin(tree.tokens_BN, torch.tensor(eos))
            ends_BN[:, 0] = False
            inner_BN = tree.parents_BN >= 0
            hanging += int((ends_BN.gather(1, tree.parents_BN.clamp_min(0)) & inner_BN).sum())
            standing += int((ends_BN & inner_BN).sum())
        return hanging, standing


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("padding", [False, True], ids=["on the host", "as on a device"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_tree_grows_behind_the_end_of_its_row(
    kind: str, padding: bool, sampled: bool, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, which is not asked how much is left: nodes behind an end stay as padding that no walk gets to."""
    ids, mask = padded(PROMPTS, "left")
    ask: dict[str, Any] = dict(max_new_tokens=12, do_sample=sampled, seed=4)
    whole = Watched(target, KINDS[kind])
    expected = answers(whole.decoder.generate(ids, mask, eos_token_id=[], **ask), ids.shape[1])
    assert whole.behind(EOS)[0] > 0 or kind == "ngram"  # without an EOS they grow as ever
    cut = [answer[: next((i + 1 for i, one in enumerate(answer) if one in EOS), 12)] for answer in expected]
    if padding:
        monkeypatch.setattr(DraftTree, "_compacted", lambda tree: tree)
    ended = Watched(target, KINDS[kind])
    for more in ({}, {"min_new_tokens": 6}):
        found = answers(ended.decoder.generate(ids, mask, eos_token_id=EOS, **ask, **more), ids.shape[1])
        if not more and "rule" not in KINDS[kind]:  # the coupled rule: its text does not depend on trees
            assert found == cut
    hanging, standing = ended.behind(EOS)
    assert hanging == 0
    assert standing > 0 or kind == "ngram"
    for tree in ended.trees:
        below_BN = (tree.ancestors_BNW[..., 0] & 1).bool()
        assert bool((tree.log_confidence_BN[~below_BN] == float("-inf")).all())
        if not padding and kind != "ngram":
            assert bool(below_BN.all(dim=1).any())  # some row fills the tree


def test_what_hangs_on_an_end_is_cut_off_and_rows_with_less_are_padded() -> None:
    tokens_BN, parents_BN = torch.tensor([[3, 4, 5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1, 2, 3]])
    confidence_BN = -torch.arange(6.0)[None]
    tree = DraftTree.from_parents(tokens_BN, parents_BN, confidence_BN, ends_BN=tokens_BN == 4)
    assert tree.tokens_BN.tolist() == [[3, 4, 5, 7]]
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 2]]
    assert tree.depths_BN.tolist() == [[0, 1, 1, 2]]
    assert tree.log_confidence_BN.tolist() == [[0, -1, -2, -4]]
    two = DraftTree.from_parents(
        tokens_BN.repeat(2, 1),
        parents_BN.repeat(2, 1),
        ends_BN=torch.tensor([[False] * 6, [False, True] + [False] * 4]),
    )
    assert two.parents_BN.tolist() == [[-1, 0, 0, 1, 2, 3], [-1, 0, 0, 2, -1, -1]]
    assert two.up_to_depth(1).tokens_BN.tolist() == [[3, 4, 5], [3, 4, 5]]
