"""Beam search: Hugging Face's answers and scores; the textbook form against brute force; pruning, memory, the hybrid."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from eagle.decode.beam_settings import BeamSettings
from eagle.decode.decoder import SpeculativeDecoder, SpeculativeOutput
from eagle.decode.hypotheses import TextbookSearch
from eagle.decode.pruning import Pruning
from eagle.errors import EagleError
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.sample.stats import BeamStats
from eagle.target.target import Target
from tests.tiny import tiny_model, tiny_tokenizer

PAD = 2
"""Hugging Face's beam search fills with an EOS where the pad token is 0."""


@pytest.fixture(scope="module", params=[(384, 0.3), (24, 0.1)], ids=["peaked", "flat-small"])
def decoder(request: pytest.FixtureRequest) -> SpeculativeDecoder:
    vocabulary, spread = request.param
    return SpeculativeDecoder(Target(tiny_model("llama", vocab_size=vocabulary, initializer_range=spread)))


@pytest.fixture(scope="module")
def flat() -> SpeculativeDecoder:
    """A target whose beams compete."""
    return SpeculativeDecoder(Target(tiny_model("llama", vocab_size=24, initializer_range=0.1), tiny_tokenizer()))


def hugging_face(decoder: SpeculativeDecoder, ids: torch.Tensor, **arguments: Any) -> Any:
    mask = arguments.pop("attention_mask", torch.ones_like(ids))
    # transformers' own caches and attention, as a user would call it
    return decoder.target.model.generate(
        ids, attention_mask=mask, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True, **arguments
    )


def assert_same(ours: SpeculativeOutput, theirs: Any) -> None:
    assert ours.sequences_scores is not None
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, atol=1e-4, rtol=1e-4)


def beams(out: SpeculativeOutput, row: int = 0) -> BeamStats:
    assert out.stats is not None
    found = out.stats[row].beams
    assert found is not None
    return found


def random_arguments(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    """A random search: settings, EOS ids that come up, and now and then each kind of processor and criterion."""
    k, limit = rng.randint(2, 5), rng.randint(1, 14)
    arguments: dict[str, Any] = dict(
        num_beams=k,
        num_return_sequences=rng.randint(1, k),
        max_new_tokens=limit,
        length_penalty=rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
        early_stopping=rng.choice([True, False, "never"]),
        eos_token_id=rng.sample(range(3, vocabulary), rng.choice([0, 1, 2, 3, vocabulary // 8])),
    )
    modulus = rng.randint(2, 5)
    extras: dict[str, Callable[[], Any]] = dict(
        min_new_tokens=lambda: rng.randint(1, limit),
        no_repeat_ngram_size=lambda: rng.randint(1, 3),
        repetition_penalty=lambda: rng.choice([0.8, 1.3]),
        bad_words_ids=lambda: [[rng.randrange(3, vocabulary)] for _ in range(3)],
        suppress_tokens=lambda: rng.sample(range(6, vocabulary), 5),
        renormalize_logits=lambda: True,
        stopping_criteria=lambda: [lambda ids, scores, **_: ids[:, -1] % modulus == 0],
    )
    arguments |= {name: make() for name, make in extras.items() if rng.random() < 0.2}
    if limit > 1 and rng.random() < 0.1:  # with one token, Hugging Face returns copies of the only hypothesis at -1e9
        arguments["forced_eos_token_id"] = 5
    return arguments


def assert_random_searches_are_hugging_faces(decoder: SpeculativeDecoder, seeds: range) -> None:
    vocabulary = decoder.target.vocab_size
    for seed in seeds:
        rng = random.Random(seed)
        arguments = random_arguments(rng, vocabulary)
        ids = torch.tensor([[rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 9))]])
        assert_same(decoder.generate(ids, pad_token_id=PAD, **arguments), hugging_face(decoder, ids, **arguments))


@pytest.mark.slow
def test_answers_and_scores_are_hugging_faces(decoder: SpeculativeDecoder) -> None:
    assert_random_searches_are_hugging_faces(decoder, range(80))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_early_stopping_ends_some_searches_before_the_limit(
    flat: SpeculativeDecoder, early_stopping: bool | str
) -> None:
    """The equality above is about stopping too: here it is seen to happen, and to differ between the settings."""
    ids, eos = torch.tensor([[5, 9, 11]]), list(range(3, 9))
    steps: dict[bool | str, int] = {}
    for setting in (True, False, "never"):
        out = flat.generate(ids, num_beams=4, max_new_tokens=60, eos_token_id=eos, early_stopping=setting)
        steps[setting] = beams(out).steps
    assert steps[True] < 60
    assert steps[True] <= steps[False] <= steps["never"]
    assert len(set(steps.values())) > 1


@pytest.mark.slow
def test_live_hypotheses_are_found_behind_many_that_end(decoder: SpeculativeDecoder) -> None:
    eos = list(range(3, decoder.target.vocab_size - 3))  # most of the vocabulary ends a text
    arguments: dict[str, Any] = dict(num_beams=3, num_return_sequences=3, max_new_tokens=9, eos_token_id=eos)
    arguments |= dict(length_penalty=2.0, early_stopping="never")
    for (row,) in (ragged(decoder.target.vocab_size, [4], seed) for seed in range(4)):
        ours = decoder.generate(torch.tensor([row]), pad_token_id=PAD, **arguments)
        assert_same(ours, hugging_face(decoder, torch.tensor([row]), **arguments))
        assert beams(ours).forward_rows > 0


def ragged(vocabulary: int, lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    blank = [longest - len(row) for row in rows]
    ids = [[PAD] * b + row if side == "left" else row + [PAD] * b for row, b in zip(rows, blank)]
    mask = [[0] * b + [1] * len(row) if side == "left" else [1] * len(row) + [0] * b for row, b in zip(rows, blank)]
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_left_padded_batch_is_searched_as_by_hugging_face(
    decoder: SpeculativeDecoder, early_stopping: bool | str
) -> None:
    vocabulary = decoder.target.vocab_size
    for seed in range(3):
        ids, mask = padded(ragged(vocabulary, [7, 3, 1, 5], seed), "left")
        arguments: dict[str, Any] = dict(num_beams=3, num_return_sequences=2, max_new_tokens=12)
        arguments |= dict(early_stopping=early_stopping, eos_token_id=random.Random(seed).sample(range(3, 24), 4))
        ours = decoder.generate(ids, mask, pad_token_id=PAD, **arguments)
        assert_same(ours, hugging_face(decoder, ids, attention_mask=mask, **arguments))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_is_searched_the_same_alone_and_in_a_batch(decoder: SpeculativeDecoder, side: str) -> None:
    rows = ragged(decoder.target.vocab_size, [4, 9, 1], seed=5)
    ids, mask = padded(rows, side)
    arguments: dict[str, Any] = dict(num_beams=3, max_new_tokens=9, eos_token_id=[7, 8, 9], no_repeat_ngram_size=2)
    arguments |= dict(min_new_tokens=2, repetition_penalty=1.2, presence_penalty=0.3, pad_token_id=PAD)
    batch = decoder.generate(ids, mask, **arguments)
    assert batch.sequences_scores is not None
    assert torch.equal(batch.sequences[:, : ids.shape[1]], ids)
    for number, row in enumerate(rows):
        alone = decoder.generate(torch.tensor([row]), **arguments)
        answer = alone.sequences[0, len(row) :].tolist()
        in_batch = batch.sequences[number, ids.shape[1] :].tolist()
        assert in_batch == answer + [PAD] * (len(in_batch) - len(answer))
        assert alone.sequences_scores is not None
        torch.testing.assert_close(batch.sequences_scores[number], alone.sequences_scores[0])
        assert beams(batch, number).forward_rows == beams(alone).forward_rows


def test_count_penalties_see_each_hypothesis_own_tokens(flat: SpeculativeDecoder) -> None:
    """Against Hugging Face with a processor that penalises row by row."""

    class Penalty:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts = torch.stack([row.bincount(minlength=scores.shape[1]) for row in input_ids[:, 3:]])
            return scores - 0.7 * (counts > 0) - 0.2 * counts

    ids = torch.tensor([[5, 9, 11]])
    arguments: dict[str, Any] = dict(num_beams=4, max_new_tokens=10, eos_token_id=[], num_return_sequences=4)
    theirs = hugging_face(flat, ids, logits_processor=[Penalty()], **arguments)
    assert_same(flat.generate(ids, presence_penalty=0.7, frequency_penalty=0.2, **arguments), theirs)
    assert theirs.sequences.tolist() != flat.generate(ids, **arguments).sequences.tolist()


def test_stop_strings_end_a_hypothesis(flat: SpeculativeDecoder) -> None:
    assert flat.target.tokenizer is not None
    ids = torch.tensor([[5, 9, 11]])
    first = flat.generate(ids, num_beams=3, max_new_tokens=8, eos_token_id=[])
    text = flat.target.tokenizer.decode(first.sequences[0, 5:6])
    arguments: dict[str, Any] = dict(num_beams=3, max_new_tokens=8, eos_token_id=[], stop_strings=[text])
    theirs = hugging_face(flat, ids, tokenizer=flat.target.tokenizer, **arguments)
    ours = flat.generate(ids, pad_token_id=PAD, **arguments)
    assert_same(ours, theirs)
    assert ours.stats is not None
    assert ours.stats[0].finish_reason == "stop"


def test_a_generation_config_can_ask_for_the_search(flat: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 9, 11]])
    config = GenerationConfig(num_beams=3, length_penalty=0.0, max_new_tokens=6, eos_token_id=7, pad_token_id=PAD)
    assert_same(flat.generate(ids, generation_config=config), hugging_face(flat, ids, generation_config=config))


def log_probabilities(target: Target, tokens: list[int]) -> list[float]:
    with torch.inference_mode():
        return target.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).tolist()


Text = tuple[float, list[int], float | None]
"""Score, new tokens, the last one's log-probability in the step that made it (None: an earlier step)."""


def reference_textbook(
    target: Target, prompt: list[int], k: int, limit: int, eos: set[int], keep: Callable[[list[Text]], list[Text]]
) -> list[Text]:
    """The textbook's words in Python: every extension of every hypothesis, the whole model each time."""
    heap: list[Text] = [(0.0, [], None)]
    for _ in range(limit):
        pool: list[Text] = []
        for score, tokens, _last in heap:
            if tokens and tokens[-1] in eos:
                pool.append((score, tokens, None))
            else:
                found = log_probabilities(target, prompt + tokens)
                pool += [(score + one, [*tokens, token], one) for token, one in enumerate(found)]
        fresh = sorted((text for text in pool if text[2] is not None), key=lambda text: -text[0])[:k]
        pool = keep([text for text in pool if text[2] is None] + fresh)
        heap = sorted(pool, key=lambda text: -text[0])[:k]
        if all(tokens[-1] in eos for _, tokens, _last in heap):
            break
    return heap


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("pruned", [{}, dict(prune_relative=0.5), dict(prune_absolute=1.0), dict(prune_local=0.6)])
def test_the_textbook_form_is_the_brute_force_one(flat: SpeculativeDecoder, k: int, pruned: dict[str, float]) -> None:
    def keep(pool: list[Text]) -> list[Text]:
        best = max(score for score, _, _ in pool)
        best_last = max((last for _, _, last in pool if last is not None), default=0.0)
        if "prune_relative" in pruned:
            return [text for text in pool if text[0] > best + math.log(pruned["prune_relative"])]
        if "prune_absolute" in pruned:
            return [text for text in pool if text[0] > best - pruned["prune_absolute"]]
        floor = best_last + math.log(pruned.get("prune_local", 1e-30))
        return [text for text in pool if text[2] is None or text[2] > floor]

    seen_ended = False
    for seed in range(4):
        (prompt,), eos = ragged(24, [4], seed), set(range(3, 3 + 2 * seed))
        heap = reference_textbook(flat.target, prompt, k, 5, eos, keep)
        out = flat.generate(
            torch.tensor([prompt]),
            num_beams=k,
            num_return_sequences=k,
            max_new_tokens=5,
            eos_token_id=sorted(eos),
            pad_token_id=PAD,
            search="textbook",
            length_penalty=0.0,
            **pruned,
        )
        assert out.sequences_scores is not None
        answers = [row[: len(found[1])] for row, found in zip(out.sequences[:, 4:].tolist(), heap)]
        assert answers == [tokens for _, tokens, _ in heap]
        torch.testing.assert_close(out.sequences_scores[: len(heap)], torch.tensor([s for s, _, _ in heap]))
        assert out.sequences_scores[len(heap) :].tolist() == [-1e9] * (k - len(heap))
        seen_ended |= any(len(tokens) < 5 for _, tokens, _ in heap)
    assert seen_ended  # finished hypotheses did stay in a heap


def test_local_pruning_judges_the_tokens_of_this_step_only() -> None:
    """A finished hypothesis of an earlier step stays, however likely the tokens are that others go on with."""
    sampler = RowSampler(sampling=Sampling())
    row = Row(prompt_length=1, tokens=[0], sampler=sampler, max_new_tokens=9, eos=frozenset([1]))
    settings = BeamSettings(num_beams=3, num_return_sequences=3, search="textbook", pruning=Pruning(local=0.6))
    search = TextbookSearch(row, settings)
    search.advance(torch.tensor([[0.08, 0.30, 0.32, 0.30]]).log())
    assert [one.tokens for one in search.done] == [[1]]
    search.advance(torch.tensor([[0.01, 0.01, 0.01, 0.97]]).log().expand(2, -1))
    assert [one.tokens for one in search.done] == [[1]]
    assert [one.tokens for one in search.live] == [[2, 3], [3, 3]]


@pytest.mark.slow
def test_enough_beams_find_the_best_of_all_texts() -> None:
    target = Target(tiny_model("llama", vocab_size=6, initializer_range=0.1))
    prompt, eos = [3, 4, 5], 5
    scores: dict[tuple[int, ...], float] = {}
    for length, tokens in ((n, t) for n in (1, 2, 3) for t in itertools.product(range(6), repeat=n)):
        ended = [i for i, token in enumerate(tokens) if token == eos]
        if ended == [length - 1] or (not ended and length == 3):
            found = [log_probabilities(target, prompt + list(tokens[:i]))[tokens[i]] for i in range(length)]
            scores[tokens] = sum(found)
    best = max(scores, key=lambda text: scores[text])
    out = SpeculativeDecoder(target).generate(
        torch.tensor([prompt]), num_beams=36, max_new_tokens=3, eos_token_id=eos, search="textbook", length_penalty=0
    )
    assert out.sequences_scores is not None
    assert tuple(out.sequences[0, 3:].tolist()) == best
    assert float(out.sequences_scores[0]) == pytest.approx(scores[best], abs=1e-5)


def test_the_textbook_form_ends_when_its_heap_is_finished(flat: SpeculativeDecoder) -> None:
    ids, eos = torch.tensor([[5, 9, 11]]), [3, 4, 5]
    out = flat.generate(ids, num_beams=3, max_new_tokens=100, eos_token_id=eos, search="textbook")
    assert out.stats is not None
    assert out.stats[0].finish_reason == "eos"
    assert beams(out).steps < 100
    assert beams(out).forward_rows < 3 * (beams(out).steps - 1)  # a finished hypothesis costs no forward


@pytest.mark.slow
@pytest.mark.parametrize("search", ["huggingface", "textbook"])
@pytest.mark.parametrize("rule", ["prune_relative", "prune_absolute", "prune_local"])
def test_pruning_saves_target_rows_and_counts_them(flat: SpeculativeDecoder, search: str, rule: str) -> None:
    ids = torch.tensor([[5, 9, 11]])
    arguments: dict[str, Any] = dict(num_beams=5, max_new_tokens=12, eos_token_id=[], search=search)
    full = flat.generate(ids, **arguments)
    assert (beams(full).forward_rows, beams(full).expansions_avoided, beams(full).candidates_pruned) == (55, 0, 0)
    loose, middle, tight = dict(
        prune_absolute=(1e6, 0.7, 1e-6), prune_relative=(1e-30, 0.5, 0.999999), prune_local=(1e-30, 0.5, 0.999999)
    )[rule]
    same = flat.generate(ids, **arguments, **{rule: loose})
    assert torch.equal(same.sequences, full.sequences)
    assert beams(same) == beams(full)
    some = beams(flat.generate(ids, **arguments, **{rule: middle}))
    assert 11 < some.forward_rows < 55
    assert some.forward_rows + some.expansions_avoided == 55
    assert some.share_saved == some.expansions_avoided / 55
    assert some.candidates_pruned >= some.expansions_avoided
    one = flat.generate(ids, **arguments, **{rule: tight})
    assert beams(one).forward_rows == 11
    greedy = flat.generate(ids, max_new_tokens=12, eos_token_id=[])
    assert torch.equal(one.sequences, greedy.sequences)


def test_absolute_and_relative_thresholds_are_one_on_log_scores(flat: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 9, 11]])
    arguments: dict[str, Any] = dict(num_beams=5, max_new_tokens=12, eos_token_id=[7])
    relative = flat.generate(ids, prune_relative=0.4, **arguments)
    absolute = flat.generate(ids, prune_absolute=-math.log(0.4), **arguments)
    assert torch.equal(relative.sequences, absolute.sequences)
    assert beams(relative) == beams(absolute)


def test_memory_is_num_beams_times_plain(flat: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 9, 11]])
    found = beams(flat.generate(ids, num_beams=4, max_new_tokens=13, eos_token_id=[]))
    # 3 layers of keys and values, 2 heads of 8 float32 components, 3 + 13 slots
    assert found.plain_kv_bytes == 3 * 2 * 2 * 8 * 4 * 16
    assert found.kv_bytes == 4 * found.plain_kv_bytes
    pruned = beams(flat.generate(ids, num_beams=4, max_new_tokens=13, eos_token_id=[], prune_relative=0.999999))
    assert pruned.kv_bytes == pruned.plain_kv_bytes


def test_statistics_are_json_values(flat: SpeculativeDecoder) -> None:
    out = flat.generate(torch.tensor([[5, 9, 11]]), num_beams=4, max_new_tokens=6, eos_token_id=[])
    assert out.stats is not None
    stats = out.stats[0]
    assert (stats.new_tokens, stats.finish_reason, stats.verify_steps) == (6, "length", 5)
    assert stats.as_dict()["beams"] | {"kv_bytes": 0, "plain_kv_bytes": 0} == dict(
        num_beams=4,
        steps=6,
        forward_rows=20,
        expansions_avoided=0,
        candidates_pruned=0,
        kv_tokens=32,
        kv_bytes=0,
        plain_kv_bytes=0,
        share_saved=0.0,
    )
    assert 0 < stats.prefill_ms < stats.total_ms
    assert 0 < stats.verify_ms < stats.total_ms


def test_the_hybrid_samples_as_plain_decoding_and_searches_from_there(flat: SpeculativeDecoder) -> None:
    ids, mask = padded(ragged(24, [6, 2, 4], seed=1), "left")
    sampling: dict[str, Any] = dict(do_sample=True, temperature=[1.5, 0.7, 1.0], top_k=0, seed=[3, 4, 5])
    out = flat.generate(
        ids, mask, num_beams=3, sample_first=4, max_new_tokens=11, eos_token_id=[7], pad_token_id=PAD, **sampling
    )
    sampled = flat.generate(ids, mask, max_new_tokens=4, eos_token_id=[7], pad_token_id=PAD, **sampling)
    assert out.stats is not None
    assert sampled.stats is not None
    assert out.sequences_scores is not None
    assert [row.seed for row in out.stats] == [3, 4, 5]
    for number, (row, own) in enumerate(zip(ids, mask)):
        count = sampled.stats[number].new_tokens
        prefix = torch.cat([row[own == 1], sampled.sequences[number, ids.shape[1] :][:count]])[None]
        answer = out.sequences[number, ids.shape[1] :].tolist()
        assert sampled.stats[number].finish_reason == "length"  # the search has something to do
        theirs = hugging_face(flat, prefix, num_beams=3, max_new_tokens=7, eos_token_id=[7])
        expected = prefix[0, -4:].tolist() + theirs.sequences[0, prefix.shape[1] :].tolist()
        assert answer == expected + [PAD] * (len(answer) - len(expected))
        torch.testing.assert_close(out.sequences_scores[number], theirs.sequences_scores[0], atol=1e-4, rtol=1e-4)
        assert out.stats[number].new_tokens == len(expected)


def test_a_text_that_ends_while_it_is_sampled_is_the_answer(flat: SpeculativeDecoder) -> None:
    ids, arguments = torch.tensor([[5, 9, 11]]), dict(do_sample=True, seed=1, eos_token_id=list(range(3, 24)))
    sampled = flat.generate(ids, max_new_tokens=20, **arguments)
    out = flat.generate(ids, num_beams=3, num_return_sequences=2, sample_first=20, max_new_tokens=30, **arguments)
    assert out.stats is not None
    assert out.sequences_scores is not None
    assert out.stats[0].finish_reason == "eos"
    assert torch.equal(out.sequences[0], sampled.sequences[0])
    assert out.sequences_scores.tolist() == [0.0, -1e9]


class _Streamer:
    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(do_sample=True), "do_sample"),
        (dict(sample_first=3), "sample_first=3"),
        (dict(streamer=_Streamer()), "streamer"),
        (dict(output_scores=True), "output_scores"),
        (dict(num_beam_groups=2), "num_beam_groups"),
        (dict(diversity_penalty=0.5), "diversity_penalty"),
        (dict(constraints=[1]), "constraints"),
        (dict(num_return_sequences=5), "num_return_sequences"),
        (dict(num_beams=-1), "num_beams is -1"),
        (dict(early_stopping="sometimes"), "early_stopping"),
        (dict(search="other"), "search is 'other', expected huggingface or textbook"),
        (dict(search="textbook", early_stopping=True), "early_stopping"),
        (dict(prune_relative=1.0), "prune_relative is 1.0"),
        (dict(prune_local=0.0), "prune_local is 0.0"),
        (dict(prune_absolute=0.0), "prune_absolute is 0.0"),
        (dict(num_beams=1, prune_absolute=0.5, search="textbook"), "prune_absolute.*num_beams above 1"),
    ],
)
def test_what_a_search_does_not_do_is_refused_by_name(
    flat: SpeculativeDecoder, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(EagleError, match=named):
        flat.generate(torch.tensor([[5, 9, 11]]), **(dict(num_beams=4, max_new_tokens=4) | arguments))


def test_a_search_is_not_streamed_and_has_no_verification_rule(flat: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 9, 11]])
    with pytest.raises(EagleError, match="num_beams cannot be streamed"):
        flat.stream(ids, num_beams=4)
    with pytest.raises(EagleError, match="rule rejection"):
        SpeculativeDecoder(flat.target, rule="rejection").generate(ids, num_beams=4, max_new_tokens=4)


def test_a_drafter_is_left_alone(flat: SpeculativeDecoder) -> None:
    ids = torch.tensor([[5, 9, 11]])
    drafting = SpeculativeDecoder(flat.target, drafter=object())  # type: ignore[arg-type]
    out = drafting.generate(ids, num_beams=4, max_new_tokens=6, eos_token_id=[])
    assert torch.equal(out.sequences, flat.generate(ids, num_beams=4, max_new_tokens=6, eos_token_id=[]).sequences)
