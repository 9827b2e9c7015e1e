"""A model that several decoders, Targets and threads share: every text is as if alone, and the model is whole afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model, tiny_tokenizer

IDS = torch.randint(3, 300, (4, 9), generator=torch.Generator().manual_seed(0))
CALL: dict[str, Any] = dict(max_new_tokens=24, eos_token_id=[])
TREE = decode_config(drafter="model", budget=12, top_k=3, depth=3)


def drafted(target: Target, model: PreTrainedModel) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(target, draft_model=model, decode=TREE)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["target", "model", "decoder"])
def test_threads_get_the_texts_they_would_get_alone_and_leave_the_model_whole(shared: str) -> None:
    model = tiny_model()
    target, before = Target(model), model.config._attn_implementation
    expected = [SpeculativeDecoder(target).generate(ids[None], **CALL).sequences for ids in IDS]
    plain = SpeculativeDecoder(target)

    def decode(ids: torch.Tensor) -> torch.Tensor:
        if shared == "decoder":
            decoder = plain
        else:
            decoder = drafted(Target(model) if shared == "model" else target, model)
        target.features(ids[None], aux_layers=(1,))
        return decoder.generate(ids[None], **CALL).sequences

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert all(map(torch.equal, pool.map(decode, IDS), expected))
    assert model.config._attn_implementation == before
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert torch.equal(model.generate(IDS[:1], do_sample=False, max_new_tokens=24, eos_token_id=None), expected[0])


@pytest.mark.slow
def test_threads_with_one_drafting_decoder_are_right_or_refused() -> None:
    model = tiny_model()
    target = Target(model)
    expected = [SpeculativeDecoder(target).generate(ids[None], **CALL).sequences for ids in IDS]
    decoder = drafted(target, model)

    def decode(number: int) -> bool:
        try:
            return torch.equal(decoder.generate(IDS[number, None], **CALL).sequences, expected[number])
        except EagleError as error:
            return "make a decoder for each" in str(error)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(decode, [0, 1, 2, 3] * 3))
    assert torch.equal(decoder.generate(IDS[:1], **CALL).sequences, expected[0])


def test_a_forward_that_fails_and_a_text_that_is_left_leave_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    target, before = Target(model, tiny_tokenizer()), model.config._attn_implementation
    text = SpeculativeDecoder(target).stream(IDS[:1], **CALL)
    next(text)

    def fails(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of luck")

    cache = target.new_cache(rows=4, capacity=16)
    with monkeypatch.context() as broken:
        broken.setattr(model.model.layers[1].mlp, "forward", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            target.prefill(IDS, torch.full((4,), 9), cache)
    assert model.config._attn_implementation == before
    assert model.generate(IDS[:1], do_sample=False, max_new_tokens=4).shape[1] > 9
    del text
    with ThreadPoolExecutor(1) as other:  # the lock is free
        assert other.submit(target.features, IDS).result(timeout=30).features_BNH.shape[:2] == IDS.shape


def test_a_thread_that_calls_the_model_itself_meanwhile_is_refused_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    target, inside, go = Target(model), threading.Event(), threading.Event()
    forward = model.model.layers[1].mlp.forward

    def slow(hidden: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go.wait(30)
        return forward(hidden)

    def waits() -> torch.Tensor:
        with target.lock:
            return model(IDS).logits

    expected = model(IDS).logits
    with monkeypatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(model.model.layers[1].mlp, "forward", slow)
        running = pool.submit(SpeculativeDecoder(target).generate, IDS[:1], **CALL)
        assert inside.wait(30)
        waiting = pool.submit(waits)
        try:
            with pytest.raises(EagleError, match=r"run as a tree by another thread.*with target.lock"):
                model(IDS)
            assert not waiting.done()
        finally:
            go.set()
        running.result(timeout=30)
        torch.testing.assert_close(waiting.result(timeout=30), expected)


def test_a_decoder_keeps_its_engine_whatever_others_over_the_same_target_ask_for() -> None:
    target = Target(tiny_model())
    compiled = SpeculativeDecoder.from_pretrained(target, decode=decode_config(engine="compiled", drafter="none"))
    eager = SpeculativeDecoder.from_pretrained(target, decode=decode_config(engine="eager", drafter="none"))
    again = SpeculativeDecoder.from_pretrained(target, decode=decode_config(engine="compiled", drafter="none"))
    assert [one.target.engine for one in (compiled, eager, again)] == ["compiled", "eager", "compiled"]
    assert eager.target is target, "what has the engine already"
    assert again.target is compiled.target, "one packed copy of the weights for all"
    assert compiled.target._engine is not target.decoder
    assert target._engine is target.decoder
    assert torch.equal(compiled.generate(IDS, **CALL).sequences, eager.generate(IDS, **CALL).sequences)
