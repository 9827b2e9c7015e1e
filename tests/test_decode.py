"""Decoding: token for token what the target says alone, whatever the tree; limits, streaming, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from eagle.verify.coupled import Coupled
from tests.decoding import decode_config
from tests.oracles import BatchOracle, Chain
from tests.tiny import tiny_model, tiny_tokenizer


def oracle(target: Target, ids: torch.Tensor, new: int, seed: int) -> SpeculativeDecoder:
    plain = SpeculativeDecoder(target).generate(ids, max_new_tokens=new, eos_token_id=[]).sequences[0].tolist()
    return SpeculativeDecoder(target, BatchOracle([plain], seed=seed, vocab=target.vocab_size, nodes=90))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(1)
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


def prompt(length: int = 17, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 300, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@given(seed=st.integers(0, 100_000), length=st.integers(1, 40), new=st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_text_does_not_depend_on_the_trees(target: Target, seed: int, length: int, new: int) -> None:
    ids = prompt(length, seed)
    decoder = oracle(target, ids, new, seed)
    out = decoder.generate(ids, max_new_tokens=new, eos_token_id=[])
    assert torch.equal(out.sequences, decoder.plain().generate(ids, max_new_tokens=new, eos_token_id=[]).sequences)
    assert out.sequences.shape[1] == length + new


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "top_k", "depth"), [(60, 10, 6), (8, 3, 4), (6, 1, 5), (5, 4, 1), (70, 12, 8)])
def test_a_draft_head_does_not_change_the_text(
    target: Target, head: EagleHead, budget: int, top_k: int, depth: int
) -> None:
    decode = decode_config(budget=budget, top_k=top_k, depth=depth)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
    out = decoder.generate(prompt(), max_new_tokens=40, eos_token_id=[])
    assert torch.equal(out.sequences, decoder.plain().generate(prompt(), max_new_tokens=40, eos_token_id=[]).sequences)


def test_the_target_drafting_the_truth_accepts_all_of_it(target: Target) -> None:
    ids = prompt()
    truth = SpeculativeDecoder(target).generate(ids, max_new_tokens=21, eos_token_id=[]).sequences[0].tolist()

    out = SpeculativeDecoder(target, Chain([truth], nodes=5)).generate(ids, max_new_tokens=21, eos_token_id=[])
    assert out.stats is not None
    stats = out.stats[0]
    assert stats.accepted == [4, 4, 4, 4]  # 1 token from the prefill, then 4 x 5
    assert (stats.tau, stats.tau_raw) == (5.0, 5.0)
    assert stats.acceptance_per_depth == [1.0] * 4
    assert stats.finish_reason == "length"


def test_eos_inside_an_accepted_block_ends_the_text_there(target: Target) -> None:
    ids = prompt()
    plain = SpeculativeDecoder(target).generate(ids, max_new_tokens=40, eos_token_id=[]).sequences[0, 17:].tolist()
    eos = plain[23]
    expected = plain[: plain.index(eos) + 1]
    decoder = oracle(target, ids, 40, seed=1)
    out = decoder.generate(ids, max_new_tokens=40, eos_token_id=[eos, 383])
    assert out.sequences[0, 17:].tolist() == expected
    assert out.stats is not None
    assert (out.stats[0].finish_reason, out.stats[0].new_tokens) == ("eos", len(expected))
    assert out.stats[0].tau * out.stats[0].verify_steps == len(expected) - 1, (
        "what EOS cut off counts in the raw one alone"
    )
    assert out.stats[0].tau_raw >= out.stats[0].tau


@pytest.mark.parametrize("new", [1, 2, 3, 10])
def test_exactly_max_new_tokens_come_out(target: Target, new: int) -> None:
    out = oracle(target, prompt(), 10, seed=2).generate(prompt(), max_new_tokens=new, eos_token_id=[])
    assert out.sequences.shape[1] == 17 + new


def test_decoding_up_to_the_last_position_of_a_position_table() -> None:
    target = Target(tiny_model("gpt2", n_positions=40))
    decoder = oracle(target, prompt(), 23, seed=4)
    out = decoder.generate(prompt(), max_new_tokens=23, eos_token_id=[])
    assert torch.equal(out.sequences, decoder.plain().generate(prompt(), max_new_tokens=23, eos_token_id=[]).sequences)
    with pytest.raises(EagleError, match="41 positions"):
        decoder.generate(prompt(), max_new_tokens=24)


def test_a_prompt_longer_than_a_prefill_chunk(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = SpeculativeDecoder(target).generate(prompt(37), max_new_tokens=20, eos_token_id=[]).sequences
    monkeypatch.setattr("eagle.target.target.PREFILL_CHUNK", 10)
    assert torch.equal(
        SpeculativeDecoder(target).generate(prompt(37), max_new_tokens=20, eos_token_id=[]).sequences,
        expected,
    )


def test_streamed_text_is_the_decoded_text(target: Target) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    decoder = oracle(target, prompt(), 30, seed=5)
    out = decoder.generate(prompt(), max_new_tokens=30, eos_token_id=[])
    pieces = list(decoder.stream(prompt(), max_new_tokens=30, eos_token_id=[]))
    assert "".join(pieces) == tokenizer.decode(out.sequences[0, 17:], skip_special_tokens=True)


def test_a_streamer_sees_the_prompt_then_committed_tokens_only(target: Target) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.got: list[torch.Tensor] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value)

        def end(self) -> None:
            self.ended = True

    recorder = Recorder()
    out = oracle(target, prompt(), 30, seed=5).generate(prompt(), max_new_tokens=30, eos_token_id=[], streamer=recorder)
    assert recorder.ended
    assert torch.equal(recorder.got[0], prompt())
    assert torch.cat(recorder.got[1:]).tolist() == out.sequences[0, 17:].tolist()


def test_hugging_face_defaults_are_let_through_and_the_model_is_left_as_it_was(target: Target) -> None:
    before = target.model.config._attn_implementation
    out = SpeculativeDecoder(target).generate(prompt(), max_new_tokens=5, do_sample=False, num_beams=1, eos_token_id=[])
    assert target.model.config._attn_implementation == before == "sdpa"
    expected = target.model.generate(prompt(), max_new_tokens=5, eos_token_id=[])
    assert torch.equal(out.sequences, expected)


class _Says:
    """A view of a target that says a fixed token after each node."""

    def __init__(self, says: dict[int, int]):
        self.says = says

    def choose(self, node: int, accepted: list[int]) -> int:
        return self.says[node]

    def stops(self, accepted: list[int]) -> bool:
        return False


def test_the_walk_takes_only_the_emitted_child() -> None:
    #        root(0) -> 1 (token 7), 2 (token 8); 1 -> 3 (token 9)
    tree = DraftTree.from_parents(torch.tensor([[5, 7, 8, 9]]), torch.tensor([[-1, 0, 0, 1]]))
    walk = Coupled().walk(tree, 0, _Says({0: 7, 1: 9, 3: 4}))  # type: ignore[arg-type]
    assert (walk.path, walk.tokens, walk.at_leaf) == ([0, 1, 3], [7, 9, 4], True)
    walk = Coupled().walk(tree, 0, _Says({0: 9}))  # type: ignore[arg-type]
    # 9 is node 3's token, but not a child of the root
    assert (walk.path, walk.tokens, walk.at_leaf) == ([0], [9], False)
