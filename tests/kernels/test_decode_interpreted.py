"""A tiny model decodes with its kernels in Triton's interpreter as with the reference, token for token."""

from typing import Any

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.kernels.commit.op import commit
from eagle.kernels.dispatch import Backend, record, using
from eagle.target.target import Target
from tests.decoding import decode_config
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
    settings = decode_config(drafter="model", budget=6, top_k=2, depth=2)
    decoder = SpeculativeDecoder.from_pretrained(target, draft_model=draft, decode=settings)

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
    decode = decode_config(budget=8, top_k=2, depth=2)
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


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_the_stats_say_what_ran_the_kernels(kernels: Backend, drafter: Any) -> None:
    target = Target(tiny_model(num_hidden_layers=2))
    decode = decode_config(drafter=drafter, kernels=kernels)
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
        SpeculativeDecoder.from_pretrained(target, decode=decode_config(kernels="triton"))
    SpeculativeDecoder.from_pretrained(target, decode=decode_config(kernels="auto"))


def test_text_between_streamed_pieces_is_not_under_the_decoders_kernels() -> None:
    target = Target(tiny_model(num_hidden_layers=1), tiny_tokenizer())
    decoder = SpeculativeDecoder.from_pretrained(target, decode=decode_config(kernels="triton"))
    for _ in decoder.stream(torch.tensor([[5, 6, 7]]), max_new_tokens=3, eos_token_id=[]):
        with record() as calls:
            commit(
                [torch.zeros(1, 1, 4, 2)],
                path_BK=torch.tensor([[0]]),
                **{name: torch.ones(1, dtype=torch.int64) for name in ("counts_B", "lengths_B")},
            )
        assert list(calls) == [("commit", "reference")]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_scores_without_a_token_to_choose_are_the_same_error_on_the_device(
    rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the prompt's end and in a tree, of the target and of the draft; none where the row ends before."""
    model = tiny_model(vocab_size=96, num_hidden_layers=1)
    ids, ask = torch.tensor([[5, 6, 7]]), dict(max_new_tokens=4, eos_token_id=[])
    text = SpeculativeDecoder(Target(model), kernels="reference").generate(ids, **ask).sequences[0, 3:].tolist()
    assert len(set(text[:3])) == 3
    target, draft = Target(model), Target(model)

    def breaks(one: Target, token: int) -> None:
        """Its logits are nan where their best token is this one."""

        def logits(features: torch.Tensor) -> torch.Tensor:
            values = Target.logits(one, features)
            return values.masked_fill((values.argmax(-1) == token)[..., None], float("nan"))

        monkeypatch.setattr(one, "logits", logits)

    def decode(kernels: Backend, **more: Any) -> list[int]:
        decode = decode_config(drafter="model", rule=rule, budget=4, top_k=1, depth=3, kernels=kernels)
        decoder = SpeculativeDecoder.from_pretrained(target, draft_model=draft, decode=decode)
        return decoder.generate(ids, **{**ask, **more}).sequences[0, 3:].tolist()

    for step in (1, 3):
        breaks(target, text[step - 1])
        said = []
        for kernels in ("reference", "triton"):
            with pytest.raises(EagleError, match=f"^step {step}: the logit of token 0 is nan after the target") as told:
                decode(kernels)  # type: ignore[arg-type]
            said.append(str(told.value))
            if step > 1:
                assert decode(kernels, max_new_tokens=step - 1) == text[: step - 1]  # type: ignore[arg-type]
        assert said[0] == said[1]
    breaks(target, -1)
    monkeypatch.setattr(draft, "tokens", draft.tokens.restricted(torch.arange(96)))
    draft.tokens.lm_head_VH.data.fill_(float("nan"))
    for kernels in ("reference", "triton"):
        with pytest.raises(EagleError, match=f"^step 2: the drafter's logits after token {text[0]} hold nan"):
            decode(kernels)  # type: ignore[arg-type]
