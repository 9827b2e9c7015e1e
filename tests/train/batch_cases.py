"""Batches of random documents and small heads of both versions, for tests of unrolling and losses."""

from collections.abc import Sequence

import torch

from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftTokens, DraftVocabulary
from eagle.target.token_layers import TokenLayers
from eagle.train.batches import Batch

HIDDEN, VOCAB = 16, 50
IDS = (1, 4, 5, 9, 17, 18, 20, 23, 30, 31, 33, 34, 36, 40, 41, 45, 46, 48, 49)
"""A reduced vocabulary."""


def small_head(version: str, *, reduced: bool = False) -> DraftHead:
    """Two query heads to a key head, float64."""
    shape = dict(
        hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        vocab_size=VOCAB, draft_vocab_size=len(IDS) if reduced else None, initializer_range=0.3, num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    head = EagleHead(EagleHeadConfig(**shape)) if version == "eagle1" else Eagle3Head(Eagle3HeadConfig(**shape))
    if reduced:
        head.set_vocabulary(vocabulary())
    return head.double()


def vocabulary() -> DraftVocabulary:
    return DraftVocabulary(target_ids_D=torch.tensor(IDS), target_size=VOCAB)


def small_tokens(*, reduced: bool = False) -> DraftTokens:
    """Float64 token layers with a bias and a cap, over all tokens or the reduced vocabulary."""
    generator = torch.Generator().manual_seed(3)
    weight_VH = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    layers = TokenLayers(embedding_VH=weight_VH, lm_head_VH=weight_VH, lm_head_bias_V=bias_V, logit_softcap=5.0)
    return DraftTokens(layers, vocabulary() if reduced else None)


def random_batch(rows: Sequence[Sequence[int]], *, states: int = HIDDEN, seed: int = 0) -> Batch:
    """Rows of documents of the given lengths; two tokens of three are supervised. Float64 features."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(rows), max(sum(row) for row in rows)
    document_BT, positions_BT = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    numbers, count = [], 0
    for b, row in enumerate(rows):
        end = 0
        for place, length in enumerate(row):
            document_BT[b, end : end + length] = place
            positions_BT[b, end : end + length] = torch.arange(length)
            end += length
        numbers.append(tuple(range(count, count + len(row))))
        count += len(row)
    supervised_BT = (torch.rand(shape, generator=generator) < 0.67) & (document_BT >= 0)
    return Batch(
        states_BTX=torch.randn(*shape, states, generator=generator, dtype=torch.float64),
        ids_BT=torch.randint(VOCAB, shape, generator=generator),
        supervised_BT=supervised_BT,
        features_BTH=torch.randn(*shape, HIDDEN, generator=generator, dtype=torch.float64),
        document_BT=document_BT,
        positions_BT=positions_BT,
        token_count=sum(max(0, length - 2) for row in rows for length in row),
        supervised_count=0,
        numbers=tuple(numbers),
    )
