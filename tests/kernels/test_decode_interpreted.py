"""A tiny model decodes with its kernels in Triton's interpreter as with the reference, token for token."""

from typing import Any

import pytest
import torch

from eagle.config import DecodeConfig
from eagle.decode import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.kernels.commit.op import commit
from eagle.kernels.dispatch import Backend, record, using
from eagle.target import Target
from tests.kernels.interpreted import INTERPRETED
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = INTERPRETED


@pytest.mark.slow
def test_the_text_is_the_reference_s() -> None:
    """Two rows of different length, sliding windows and soft-capped scores; the model drafts for itself, so that paths are
    accepted and committed."""
    target, draft = Target(tiny_model("gemma2")), Target(tiny_model("gemma2"))
    ids = torch.randint(3, 300, (2, 15), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    decode_config = DecodeConfig(drafter="model", budget=6, top_k=2, depth=2)
    decoder = SpeculativeDecoder.from_pretrained(target, draft_model=draft, decode=decode_config)

    def decode(backend: Backend) -> torch.Tensor:
        with using(backend):
            out = decoder.generate(ids, attention_mask=mask, max_new_tokens=5, eos_token_id=[])
        assert out.stats is not None
        assert out.stats[0].tau > 1
        return out.sequences

    expected = decode("reference")
    with record() as calls:
        got = decode("triton")
    assert torch.equal(got, expected)
    assert calls["tree_attention", "triton"] > 0
    assert calls["commit", "triton"] > 0
    assert not any(path == "reference" for _, path in calls)


@pytest.mark.slow
def test_a_head_s_own_tree_steps_go_through_the_kernel() -> None:
    target = Target(tiny_model())
    torch.manual_seed(1)
    head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()
    decode = DecodeConfig(budget=8, top_k=2, depth=2)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(1))
    trees = []
    for backend in ("reference", "triton"):
        with using(backend), record() as calls:  # type: ignore[arg-type]
            out = decoder.generate(ids, max_new_tokens=4, eos_token_id=[])
        assert out.stats is not None
        trees.append((out.sequences.tolist(), out.stats[0].accepted))
        verified = target.num_layers * out.stats[0].verify_steps
        assert calls["tree_attention", backend] > verified  # type: ignore[index]
    assert trees[0] == trees[1]


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_the_stats_say_what_ran_the_kernels(kernels: Backend, drafter: Any) -> None:
    target = Target(tiny_model(num_hidden_layers=2))
    decode = DecodeConfig(drafter=drafter, kernels=kernels, depth=2)
    decoder = SpeculativeDecoder.from_pretrained(target, decode=decode)
    ids = torch.tensor([[5, 6, 7, 5, 6], [8, 9, 8, 9, 8]])
    out = decoder.generate(ids, max_new_tokens=3, eos_token_id=[])
    assert out.stats is not None
    for stats in out.stats:
        assert stats.kernels["tree_attention"] == {kernels: target.num_layers * stats.verify_steps}
        assert all(list(paths) == [kernels] for paths in stats.kernels.values())
        assert stats.as_dict()["kernels"] == stats.kernels
    plain = decoder.plain().generate(ids, num_beams=2, max_new_tokens=3, eos_token_id=[])
    assert plain.stats is not None
    assert all(list(paths) == [kernels] for stats in plain.stats for paths in stats.kernels.values())
    assert plain.stats[0].kernels


def test_triton_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EagleError, match=r"decode.kernels is triton, which cannot run: .*CPU.*auto or reference"):
        SpeculativeDecoder.from_pretrained(target, decode=DecodeConfig(kernels="triton"))
    SpeculativeDecoder.from_pretrained(target, decode=DecodeConfig(kernels="auto"))


def test_text_between_streamed_pieces_is_not_under_the_decoders_kernels() -> None:
    target = Target(tiny_model(num_hidden_layers=1), tiny_tokenizer())
    decoder = SpeculativeDecoder.from_pretrained(target, decode=DecodeConfig(kernels="triton"))
    for _ in decoder.stream(torch.tensor([[5, 6, 7]]), max_new_tokens=3, eos_token_id=[]):
        with record() as calls:
            commit(
                [torch.zeros(1, 1, 4, 2)],
                path_BK=torch.tensor([[0]]),
                **{name: torch.ones(1, dtype=torch.int64) for name in ("counts_B", "lengths_B")},
            )
        assert list(calls) == [("commit", "reference")]
