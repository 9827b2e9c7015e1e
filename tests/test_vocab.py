"""The reduced draft vocabulary: how it is chosen, kept in a head's file and refused, and what it makes of drafting."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.formats.checkpoint import check_fits, load_head, save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.target.target import Target
from eagle.target.token_layers import TokenLayers
from tests.decoding import decode_config
from tests.exact import LOG_Q, in_float64
from tests.head_drafters import eagle2_drafter, static_drafter
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def vocabulary() -> DraftVocabulary:
    counts_V = torch.randint(0, 1000, (VOCAB,), generator=torch.Generator().manual_seed(0))
    return DraftVocabulary.most_frequent(counts_V, 60)


def reduced_head(target: Target, vocabulary: DraftVocabulary) -> EagleHead:
    torch.manual_seed(1)
    config = EagleHeadConfig.for_target(target.config, initializer_range=0.2, draft_vocab_size=vocabulary.size)
    head = EagleHead(config).eval()
    head.set_vocabulary(vocabulary)
    return head


def test_the_most_frequent_tokens_are_chosen_and_their_share_is_noted() -> None:
    vocabulary = DraftVocabulary.most_frequent(torch.tensor([5, 0, 7, 5, 0, 9, 1]), 3)
    assert vocabulary.target_ids_D.tolist() == [0, 2, 5]  # of the two with count 5, the lower id
    assert vocabulary.coverage == pytest.approx(21 / 27)
    assert vocabulary.d2t.tolist() == [0, 1, 3]
    assert vocabulary.t2d.tolist() == [True, False, True, False, False, True, False]
    assert DraftVocabulary.most_frequent(torch.tensor([0, 0, 7, 0]), 3).target_ids_D.tolist() == [0, 1, 2]
    counts_V = torch.tensor([5, 0, 7, 5, 0, 9, 1])
    ending = DraftVocabulary.most_frequent(counts_V, 3, always=(1, 6))
    assert (ending.target_ids_D.tolist(), ending.coverage) == ([1, 5, 6], 10 / 27)
    assert ending.without({1, 2, 4, 6}) == [2, 4]
    assert counts_V.tolist() == [5, 0, 7, 5, 0, 9, 1]
    with pytest.raises(EagleError, match=r"draft_vocab_size is 1, expected at least 2: the target's EOS ids \[1, 6\]"):
        DraftVocabulary.most_frequent(counts_V, 1, always=(6, 1))
    for size in (0, 8):
        with pytest.raises(EagleError, match=r"head\.draft_vocab_size .* expected 1 to 7"):
            DraftVocabulary.most_frequent(torch.ones(7, dtype=torch.int64), size)


@given(chosen=st.sets(st.integers(0, 99), min_size=1))
def test_the_tensors_of_a_file_give_the_vocabulary_back(chosen: set[int]) -> None:
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor(sorted(chosen)), target_size=100)
    again = DraftVocabulary.from_tensors(vocabulary.d2t, vocabulary.t2d, where="file")
    assert again.target_ids_D.tolist() == sorted(chosen)
    assert again.target_size == 100


def _spoilt(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = DraftVocabulary(target_ids_D=torch.tensor([2, 3, 7]), target_size=10)
    d2t, t2d = vocabulary.d2t, vocabulary.t2d
    if name == "ids instead of offsets":
        d2t = torch.tensor([5, 3, 2])
    elif name == "a repeated token":
        d2t = torch.tensor([2, 2, 4]) - torch.tensor([0, 1, 0])
    elif name == "out of range":
        d2t = torch.tensor([2, 2, 8])
    elif name == "never filled":
        d2t, t2d = torch.zeros_like(d2t), torch.zeros_like(t2d)
    elif name == "of different subsets":
        t2d = t2d.roll(1)
    elif name == "of another dtype":
        d2t = d2t.to(torch.int32)
    return d2t, t2d


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ids instead of offsets", "offsets"),
        ("a repeated token", "draft ids 0 and 1 both stand for 2"),
        ("out of range", r"2 \.\. 10"),
        ("never filled", "all zeros"),
        ("of different subsets", "disagree"),
        ("of another dtype", "int32"),
    ],
)
def test_tensors_that_describe_no_subset_are_refused(name: str, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        DraftVocabulary.from_tensors(*_spoilt(name), where="head x")


def test_draft_logits_are_the_targets_own_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    lm_head, bias = torch.randn(30, 8, generator=generator), torch.randn(30, generator=generator)
    tokens = TokenLayers(
        embedding_VH=lm_head, lm_head_VH=lm_head, lm_head_bias_V=bias, logit_scale=0.5, logit_softcap=3.0
    )
    draft = DraftTokens(tokens, DraftVocabulary(target_ids_D=torch.tensor([1, 4, 29]), target_size=30))
    features = torch.randn(2, 5, 8, generator=generator)
    torch.testing.assert_close(draft.logits(features), tokens.logits(features)[..., [1, 4, 29]])
    assert draft.layers.lm_head_VH.shape == (3, 8)
    assert draft.layers.lm_head_VH.is_contiguous()
    assert draft.to_target(torch.tensor([[2, 0]])).tolist() == [[29, 1]]
    assert draft.holds(torch.tensor([0, 1, 29])).tolist() == [False, True, True]
    with pytest.raises(EagleError, match="part of 31 tokens, the target has 30"):
        DraftTokens(tokens, DraftVocabulary(target_ids_D=torch.tensor([1]), target_size=31))


def test_a_head_keeps_its_vocabulary_in_its_file(target: Target, vocabulary: DraftVocabulary, tmp_path: Path) -> None:
    head = reduced_head(target, vocabulary)
    save_head(head, tmp_path / "head")
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64
    assert stored["t2d"].dtype == torch.bool
    assert (stored["d2t"] + torch.arange(60)).tolist() == vocabulary.target_ids_D.tolist()
    again = load_head(tmp_path / "head", dtype=torch.bfloat16)
    assert again.vocabulary is not None
    assert again.vocabulary.target_ids_D.tolist() == vocabulary.target_ids_D.tolist()
    assert again.vocabulary.coverage == pytest.approx(vocabulary.coverage)
    check_fits(again, target)

    save_file({key: value for key, value in stored.items() if key != "d2t"}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(EagleError, match="missing keys: d2t"):
        load_head(tmp_path / "head")
    save_file({**stored, "d2t": stored["d2t"] * 0}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(EagleError, match="all zeros"):
        load_head(tmp_path / "head")


def test_a_head_of_all_tokens_has_neither_tensor_and_a_stray_one_is_named(target: Target, tmp_path: Path) -> None:
    save_head(EagleHead(EagleHeadConfig.for_target(target.config)), tmp_path / "head")
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert not {"d2t", "t2d"} & stored.keys()
    save_file({**stored, "d2t": torch.zeros(5, dtype=torch.int64)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(EagleError, match="stray keys: d2t"):
        load_head(tmp_path / "head")


def test_a_head_whose_vocabulary_is_of_another_size_does_not_fit(target: Target) -> None:
    config = EagleHeadConfig.for_target(target.config, draft_vocab_size=4, vocab_size=VOCAB + 64)
    head = EagleHead(config)
    head.set_vocabulary(DraftVocabulary(target_ids_D=torch.tensor([1, 2, 3, 400]), target_size=VOCAB + 64))
    with pytest.raises(EagleError, match="part of 448 tokens"):
        check_fits(head, target)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "seed": 5}], ids=["T0", "T0.7"])
@pytest.mark.parametrize("drafter", [eagle2_drafter, static_drafter])
def test_drafting_from_a_few_tokens_changes_no_text(
    drafter: Any, sampling: dict[str, Any], target: Target, vocabulary: DraftVocabulary
) -> None:
    head = reduced_head(target, vocabulary)
    ids = torch.randint(3, 300, (3, 14), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    arguments = dict(max_new_tokens=25, eos_token_id=[], **sampling)
    out = SpeculativeDecoder(target, drafter(head, target.tokens)).generate(ids, mask, **arguments)
    plain = SpeculativeDecoder(target).generate(ids, mask, **arguments)
    assert torch.equal(out.sequences, plain.sequences)


def first_tree(target: Target, drafter: HeadDrafter, ids: torch.Tensor) -> DraftTree:
    """What it proposes for the prompt, sampled."""
    seen: list[DraftTree] = []
    propose = drafter.propose

    def record() -> DraftTree:
        seen.append(propose())
        return seen[-1]

    drafter.propose = record  # type: ignore[method-assign]
    arguments = dict(max_new_tokens=2, eos_token_id=[], do_sample=True, temperature=0.9, seed=1)
    SpeculativeDecoder(target, drafter).generate(ids, **arguments)
    return seen[0]


def test_drafted_tokens_are_target_ids_of_the_draft_vocabulary(target: Target, vocabulary: DraftVocabulary) -> None:
    """The tree of a reduced head is that of the full head with every other token's logit at minus infinity."""
    target = in_float64(target)
    head = reduced_head(target, vocabulary).double()
    full = EagleHead(EagleHeadConfig.for_target(target.config)).eval().double()
    full.load_state_dict({key: value for key, value in head.state_dict().items() if key not in ("d2t", "t2d")})
    layers = target.tokens
    bias = torch.full((VOCAB,), float("-inf"), dtype=torch.float64)
    bias[vocabulary.target_ids_D] = 0
    masked = TokenLayers(embedding_VH=layers.embedding_VH, lm_head_VH=layers.lm_head_VH, lm_head_bias_V=bias)
    ids = torch.randint(3, 300, (1, 11), generator=torch.Generator().manual_seed(4))
    shape = dict(budget=500, top_k=5, depth=4)  # nothing is pruned: levels could be weighed differently
    trees = [
        first_tree(target, drafter, ids)
        for drafter in (eagle2_drafter(head, layers, **shape), eagle2_drafter(full, masked, **shape))
    ]
    assert torch.equal(trees[0].tokens_BN, trees[1].tokens_BN)
    assert torch.equal(trees[0].parents_BN, trees[1].parents_BN)
    covered = trees[0].depths_BN * math.log(vocabulary.coverage)
    torch.testing.assert_close(trees[0].log_confidence_BN, trees[1].log_confidence_BN + covered, rtol=0, atol=LOG_Q)
    allowed = set(vocabulary.target_ids_D.tolist())
    assert set(trees[0].tokens_BN[0, 1:].tolist()) <= allowed
    assert trees[0].tokens_BN[0, 1:].max() >= vocabulary.size, "draft ids would all lie below"


def test_more_children_than_draft_tokens_is_an_error(target: Target) -> None:
    few = DraftVocabulary(target_ids_D=torch.arange(5), target_size=VOCAB)
    with pytest.raises(EagleError, match=r"10 children, the draft vocabulary has 5 tokens"):
        SpeculativeDecoder.from_pretrained(target, reduced_head(target, few), decode=decode_config())
