"""A head on another device than the target's last layers and LM head: everything meets on the head's.

The head's device is "meta" here: tensors have a place there, but no contents, and PyTorch refuses to mix it with the CPU.
"""

import pytest
import torch

from eagle.draft.by_head import HeadDrafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.tree import DraftTree
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target
from eagle.verify.block import Block
from eagle.verify.rejection import Rejection
from tests.tiny import VOCAB, tiny_model

THERE = torch.device("meta")


def make_head(target: Target, version: str, *, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> DraftHead:
    size = 60 if reduced else None
    head: DraftHead
    if version == "eagle3":
        config = Eagle3HeadConfig.for_target(target.config, aux_layers=[0, 1, 2], draft_vocab_size=size)
        head = Eagle3Head(config)
    else:
        head = EagleHead(EagleHeadConfig.for_target(target.config, draft_vocab_size=size))
    vocabulary = DraftVocabulary(target_ids_D=torch.arange(60) * 3, target_size=VOCAB) if reduced else None
    monkeypatch.setattr(DraftHead, "vocabulary", vocabulary)  # its tensors have no contents there
    return head.eval().to(THERE)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_states_and_embeddings_come_to_the_heads_device(
    version: str, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(tiny_model())
    head = make_head(target, version, reduced=reduced, monkeypatch=monkeypatch)
    drafter = HeadDrafter(head, target.tokens, DynamicTree(budget=12, top_k=3, depth=3))
    row = Row(prompt_length=1, tokens=[1] * 6, sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)
    drafter.reset([row], capacity=32)
    width = 96 if version == "eagle3" else 32
    drafter.observe(torch.zeros(1, 5, width), torch.zeros(1, 5, dtype=torch.int64), torch.tensor([5]))
    assert drafter.predicted_BH.device == THERE
    assert drafter.cache.layers[0].keys.device == THERE


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=lambda rule: rule.name)
def test_what_was_drafted_from_comes_to_the_targets_probabilities(
    rule: Rejection | Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host's walk the tree is on the CPU, the probabilities where the target's logits are."""
    tree = DraftTree.from_parents(
        torch.tensor([[1, 2]]),
        torch.tensor([[-1, 0]]),
        children="sampled",
        log_q_BEV=torch.zeros(1, 1, VOCAB),
        q_row_BN=torch.tensor([[0, -1]]),
    )
    moved: list[torch.device] = []

    class Drawn:
        """Lies elsewhere: all that it can do is to come."""

        def to(self, device: torch.device) -> torch.Tensor:
            moved.append(device)
            return torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)

    class View:
        def probabilities(self, node: int, emitted: list[int]) -> torch.Tensor:
            return torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)

        def accepts(self, chance: float, emitted: list[int], attempt: int) -> bool:
            return False

        def draw(self, weights_V: torch.Tensor, emitted: list[int]) -> int:
            return 3

        def stops(self, emitted: list[int]) -> bool:
            return False

        def ends(self, emitted: list[int]) -> bool:
            return False

    monkeypatch.setattr(DraftTree, "q_after", lambda self, row, node: Drawn())
    assert rule.walk(tree, 0, View()).tokens == [3]  # type: ignore[arg-type]
    assert moved == [torch.device("cpu")]


def test_ids_of_draft_tokens_are_where_the_draft_logits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE-3 head makes them on its own device, an EAGLE-1 head on that of the target's LM head."""
    target = Target(tiny_model())
    head = make_head(target, "eagle3", reduced=True, monkeypatch=monkeypatch)
    vocabulary = HeadDrafter(head, target.tokens, DynamicTree()).vocabulary
    logits_BND = head.logits(torch.zeros(1, 2, 32, device=THERE), vocabulary)
    best = logits_BND.topk(3, dim=-1).indices
    assert vocabulary.to_target(best).device == THERE
    assert vocabulary.holds(best).device == THERE
    assert vocabulary.restrict(torch.zeros(1, 2, VOCAB, device=THERE)).shape == (1, 2, 60)
    head = make_head(target, "eagle1", reduced=True, monkeypatch=monkeypatch)
    vocabulary = HeadDrafter(head, target.tokens, DynamicTree()).vocabulary
    assert head.logits(torch.zeros(1, 2, 32), vocabulary).device.type == "cpu"
    assert vocabulary.to_target(torch.tensor([1, 2])).tolist() == [3, 6]
