"""Where a text ends, inside accepted blocks, and what a streamer sees of it."""

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, TextStreamer

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.target.target import Target
from tests.oracles import NEW, Chain, prompt, stops_everywhere, with_oracle
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


def _text_across_tokens(target: Target, ids: torch.Tensor) -> tuple[str, int]:
    """A stop string that begins in one token of the plain answer and ends in the next; how many tokens it takes."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    answer = stops_everywhere(target, ids)[ids.shape[1] :]
    for place in range(4, len(answer) - 1):
        one, other = tokenizer.decode(answer[place]), tokenizer.decode(answer[place + 1])
        string = one[-1:] + other[:1]
        if len(string) == 2 and string.isascii() and string not in tokenizer.decode(answer[: place + 1]):
            return string, place + 2
    raise AssertionError("no such place; take another prompt")


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_stop_string_across_tokens_inside_an_accepted_block(target: Target, seed: int) -> None:
    ids = prompt(seed=seed)
    string, count = _text_across_tokens(target, ids)
    arguments = {"max_new_tokens": NEW, "eos_token_id": [], "stop_strings": ["nowhere", string]}
    theirs = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), pad_token_id=2, tokenizer=target.tokenizer, **arguments
    )
    assert theirs.shape[1] == 9 + count
    plain, drafted = with_oracle(target, ids, kind=Chain, nodes=8, **arguments)
    for out in (plain, drafted):
        assert torch.equal(out.sequences, theirs)
        assert out.stats is not None
        assert (out.stats[0].finish_reason, out.stats[0].new_tokens) == ("stop", count)
    assert drafted.stats is not None
    assert sum(drafted.stats[0].accepted) + drafted.stats[0].verify_steps + 1 > count  # it lay inside a block


@pytest.mark.slow
@pytest.mark.parametrize("eos_at", range(1, 12))
def test_an_end_anywhere_in_a_block_is_found_and_nothing_leaks_behind_it(target: Target, eos_at: int) -> None:
    """EOS mid-block (transformers 47912); a length limit must not beat an earlier stop (sglang 31599)."""
    ids = prompt(seed=7)
    answer = stops_everywhere(target, ids)[9:]
    eos = answer[eos_at]
    count = answer.index(eos) + 1
    for limit in (count, count + 1, NEW):
        plain, drafted = with_oracle(target, ids, kind=Chain, nodes=6, max_new_tokens=limit, eos_token_id=[eos, 380])
        for out in (plain, drafted):
            assert out.sequences[0, 9:].tolist() == answer[:count]
            assert out.stats is not None
            assert out.stats[0].finish_reason == "eos"


def test_the_earliest_of_several_stops_wins(target: Target) -> None:
    ids = prompt(seed=7)
    plain = stops_everywhere(target, ids)
    answer = plain[9:]
    reached: list[int] = []

    class Counting(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            reached.append(input_ids.shape[1])
            return input_ids[:, -1] == answer[5]

    first = answer.index(answer[5]) + 1
    arguments: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": [answer[8]], "stopping_criteria": [Counting()]}
    for out in with_oracle(target, ids, kind=Chain, nodes=10, **arguments):
        assert out.sequences[0, 9:].tolist() == answer[:first]
        assert out.stats is not None
        assert out.stats[0].finish_reason == "stop"
    assert reached == [*range(10, 10 + first)] * 2  # after every token, and never beyond the stop


def test_criteria_see_scores_as_hugging_face_gives_them(target: Target) -> None:
    seen: list[Any] = []

    class Looking(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(scores)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {"max_new_tokens": 6, "eos_token_id": [], "stopping_criteria": [Looking()]}
    plain, _ = with_oracle(target, prompt(), output_scores=True, **arguments)
    assert [len(scores) for scores in seen] == [1, 2, 3, 4, 5, 6] * 2
    assert [tuple(score.shape) for score in seen[5]] == [(1, 384)] * 6
    assert all(torch.equal(one, other) for one, other in zip(seen[5], plain.scores))
    seen.clear()
    SpeculativeDecoder(target).generate(prompt(), **arguments)
    assert seen == [None] * 6


def test_a_time_limit_ends_the_text(target: Target) -> None:
    out = SpeculativeDecoder(target).generate(prompt(), max_new_tokens=400, eos_token_id=[], max_time=1e-9)
    assert out.stats is not None
    assert (out.stats[0].finish_reason, out.stats[0].new_tokens) == ("stop", 1)


class _Recorder(TextStreamer):
    def __init__(self, target: Target, **arguments: Any):
        super().__init__(target.tokenizer, **arguments)
        self.text = ""
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.ids.extend(value.flatten().tolist())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_stream_is_the_decoded_text_with_nothing_behind_a_stop(target: Target, do_sample: bool) -> None:
    assert target.tokenizer is not None
    ids = prompt(seed=7)
    arguments: dict[str, Any] = {"do_sample": do_sample, "seed": 3, "max_new_tokens": NEW}
    free = SpeculativeDecoder(target).generate(ids, eos_token_id=[], **arguments).sequences[0, 9:].tolist()
    arguments["eos_token_id"] = free[11]
    plain, _ = with_oracle(target, ids, kind=Chain, nodes=7, **arguments)
    recorder = _Recorder(target, skip_prompt=True)
    truth = [[*ids[0].tolist(), *free]]
    decoder = SpeculativeDecoder(target, Chain(truth, nodes=7))
    out = decoder.generate(ids, streamer=recorder, **arguments)
    assert torch.equal(out.sequences, plain.sequences)
    assert recorder.ids == out.sequences[0].tolist()
    assert recorder.text == target.tokenizer.decode(out.sequences[0, 9:])
    assert "".join(decoder.stream(ids, **arguments)) == target.tokenizer.decode(
        out.sequences[0, 9:], skip_special_tokens=True
    )


def test_streams_take_one_row_and_refuse_at_the_call(target: Target) -> None:
    decoder = SpeculativeDecoder(target)
    with pytest.raises(EagleError, match="streamer takes one row, the batch has 2"):
        decoder.generate(torch.tensor([[5, 6], [7, 8]]), streamer=_Recorder(target))
    with pytest.raises(EagleError, match="streamed for one row, the batch has 2"):
        decoder.stream(torch.tensor([[5, 6], [7, 8]]))
    with pytest.raises(EagleError, match="does not support typical_p"):
        decoder.stream(prompt(), typical_p=0.5)
    with pytest.raises(EagleError, match="needs the tokenizer"):
        SpeculativeDecoder(Target(target.model)).stream(prompt())
