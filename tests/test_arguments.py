"""Arguments as Hugging Face takes them: what is merged, resolved, refused by name."""

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from eagle.decode.arguments import resolve
from eagle.errors import EagleError
from eagle.sample.noise import row_seeds
from eagle.sample.penalties import CountPenalty
from eagle.target.target import Target
from tests.tiny import tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


def test_greedy_is_the_default_whatever_temperature_the_model_has(target: Target) -> None:
    target.model.generation_config.temperature = 0.7
    assert [row.sampler.sampling.temperature for row in resolve(target, IDS).rows] == [0, 0]


def test_sampling_starts_from_hugging_faces_defaults(target: Target) -> None:
    """Temperature 1 and top_k 50; an explicit 0 or None is all tokens."""
    sampling = resolve(target, IDS, do_sample=True).rows[0].sampler.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 50, 1.0, 0.0)
    for everything in (0, None):
        assert resolve(target, IDS, do_sample=True, top_k=everything).rows[0].sampler.sampling.top_k == 0


def test_keywords_go_over_the_callers_config_and_that_over_the_models(target: Target) -> None:
    models = target.model.generation_config
    models.do_sample, models.temperature, models.top_p, models.top_k = True, 0.6, 0.8, 20
    own = GenerationConfig(top_p=0.9, max_new_tokens=7)
    row = resolve(target, IDS, generation_config=own, temperature=0.3).rows[0]
    sampling = row.sampler.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, row.max_new_tokens) == (0.3, 0.9, 20, 7)
    assert (own.temperature, models.temperature, own.top_k) == (None, 0.6, None)  # neither was changed


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_settings_may_differ_by_row(target: Target, kind: type) -> None:
    call = resolve(
        target,
        IDS,
        do_sample=True,
        temperature=kind([0.0, 0.5]),
        top_k=kind([3, 0]),
        top_p=kind([1.0, 0.5]),
        min_p=kind([0.0, 0.25]),
        num_return_sequences=2,
        seed=kind([1, 2, 3, 4]),
    )
    got = [row.sampler.sampling for row in call.rows]
    assert [(s.temperature, s.top_k, s.top_p, s.min_p) for s in got] == [(0, 3, 1, 0)] * 2 + [(0.5, 0, 0.5, 0.25)] * 2
    assert [s.seed for s in got] == [1, 2, 3, 4]
    assert [row.tokens for row in call.rows] == [[5, 6, 7]] * 2 + [[8, 9, 10]] * 2


def test_numbers_may_be_tensors(target: Target) -> None:
    row = resolve(target, IDS, do_sample=True, temperature=torch.tensor(0.5), max_new_tokens=torch.tensor(3)).rows[0]
    assert (row.sampler.sampling.temperature, row.max_new_tokens) == (0.5, 3)


def test_the_seed_used_is_in_the_stats(target: Target) -> None:
    assert [row.stats.seed for row in resolve(target, IDS, seed=7).rows] == row_seeds(7, 2)
    torch.manual_seed(5)
    drawn = [row.stats.seed for row in resolve(target, IDS).rows]
    torch.manual_seed(5)
    assert [row.stats.seed for row in resolve(target, IDS).rows] == drawn
    with pytest.raises(EagleError, match="3 seeds for 2 rows"):
        resolve(target, IDS, seed=[1, 2, 3])


@pytest.mark.parametrize(
    ("eos", "expected"), [(5, {5}), ([5, 6], {5, 6}), ([], set()), (None, set()), (torch.tensor([7, 8]), {7, 8})]
)
def test_eos_ids_are_one_many_or_none(target: Target, eos: object, expected: set[int]) -> None:
    assert resolve(target, IDS, eos_token_id=eos).rows[0].eos == expected


def test_without_a_word_the_models_eos_and_pad_ids_hold(target: Target) -> None:
    target.model.generation_config.eos_token_id = [11, 12]
    target.model.generation_config.pad_token_id = None
    call = resolve(target, IDS)
    assert (call.rows[0].eos, call.pad_token_id) == ({11, 12}, 11)
    target.model.generation_config.eos_token_id = None
    assert resolve(target, IDS).rows[0].eos == set(), "as in Hugging Face: the config and the tokenizer are not asked"


def test_length_limits(target: Target) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert [row.max_new_tokens for row in resolve(target, IDS, mask, max_length=9).rows] == [7, 6]  # own tokens count
    assert [row.max_new_tokens for row in resolve(target, IDS, max_length=9, max_new_tokens=2).rows] == [2, 2]
    assert [row.max_new_tokens for row in resolve(target, IDS).rows] == [256, 256]
    near_the_end = torch.full((1, 500), 5)
    assert resolve(target, near_the_end).rows[0].max_new_tokens == 12
    with pytest.raises(EagleError, match="max_length is 3, the prompt alone has 3 tokens"):
        resolve(target, IDS, max_length=3)
    with pytest.raises(EagleError, match=r"500 tokens and 13 new ones need 513 positions, .* has 512"):
        resolve(target, near_the_end, max_new_tokens=13)
    with pytest.raises(EagleError, match=r"max_new_tokens.*greater than 0"):
        resolve(target, IDS, max_new_tokens=0)


def test_padding_is_taken_off_left_or_right(target: Target) -> None:
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    for one in (mask, mask.bool(), mask.float()):
        assert [row.tokens for row in resolve(target, ids, one).rows] == [[5, 6], [7, 8, 9]]


def test_without_a_mask_pad_tokens_are_padding_unless_they_can_end_a_text(target: Target) -> None:
    ids = torch.tensor([[4, 4, 5, 6]])
    assert resolve(target, ids, pad_token_id=4).rows[0].tokens == [5, 6]
    assert resolve(target, ids, pad_token_id=4, eos_token_id=[2, 4]).rows[0].tokens == [4, 4, 5, 6]
    assert resolve(target, ids, torch.ones_like(ids), pad_token_id=4).rows[0].tokens == [4, 4, 5, 6]
    chat = torch.tensor([[4, 5, 4, 6, 4, 4]])
    assert resolve(target, chat, pad_token_id=4).rows[0].tokens == [5, 4, 6]


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2]], None, 'input_ids is a list; expected int64 \\[B, T\\]: call the tokenizer with return_tensors="pt"'),
        (torch.ones(1, 2), None, "input_ids is a tensor of torch.float32"),
        (torch.tensor([1, 2]), None, "shape \\(2,\\); expected \\[B, T\\]"),
        (torch.zeros(1, 0, dtype=torch.int64), None, "shape \\(1, 0\\)"),
        (IDS, torch.ones(2, 2), "attention_mask has shape \\(2, 2\\), input_ids \\(2, 3\\)"),
        (IDS, torch.tensor([[1, 1, 1], [0, 0, 0]]), "row 1 of attention_mask marks every token as padding"),
        (IDS, torch.tensor([[1, 0, 1], [1, 1, 1]]), "row 0 of attention_mask has a hole"),
        (torch.tensor([[1, 384]]), None, "row 0 holds the token id 384, outside the target's vocabulary of 384"),
        (torch.tensor([[1, -100]]), None, "row 0 holds the token id -100"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(target: Target, ids: object, mask: object, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        resolve(target, ids, mask)  # type: ignore[arg-type]


UNSUPPORTED = {
    "typical_p": 0.9,
    "top_h": 0.4,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "constraints": [object()],
    "watermarking_config": {"greenlist_ratio": 0.3},
    "token_healing": True,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 1,
    "prompt_lookup_num_tokens": 1,
    "num_assistant_tokens": 5,
    "assistant_confidence_threshold": 0.3,
    "assistant_ensemble_weight": 0.5,
    "assistant_early_exit": 1,
    "use_mtp": True,
    "speculation_type": "x",
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "assistant_model": object(),
    "prefix_allowed_tokens_fn": print,
    "negative_prompt_ids": IDS,
    "inputs_embeds": torch.zeros(1, 1, 32),
    "past_key_values": object(),
    "position_ids": IDS,
    "token_type_ids": IDS,
    "pixel_values": IDS,
    "max_new_token": 5,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(target: Target, name: str) -> None:
    with pytest.raises(EagleError, match=f"does not support {name}:"):
        resolve(target, IDS, **{name: UNSUPPORTED[name]})


@pytest.mark.parametrize("name", ["typical_p", "epsilon_cutoff", "top_h", "guidance_scale", "watermarking_config"])
def test_what_is_not_supported_is_refused_in_a_config_too(target: Target, name: str) -> None:
    """Published models set such values in their generation_config.json."""
    with pytest.raises(EagleError, match=f"does not support {name}: .* unset it in the generation config"):
        resolve(target, IDS, generation_config=GenerationConfig(**{name: UNSUPPORTED[name]}))
    setattr(target.model.generation_config, name, GenerationConfig(**{name: UNSUPPORTED[name]}).to_dict()[name])
    with pytest.raises(EagleError, match=f"does not support {name}"):
        resolve(target, IDS)


def test_every_key_of_a_generation_config_is_either_honoured_or_refused(target: Target) -> None:
    """A key that a later transformers adds must not slip through unseen."""
    honoured = {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
        *("num_return_sequences", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("remove_invalid_values", "renormalize_logits", "output_scores", "pad_token_id", "bos_token_id"),
        *("eos_token_id", "num_beams", "early_stopping", "length_penalty"),
    }
    without_effect = {
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
        *("prefill_chunk_size", "continuous_batching_config", "low_memory", "return_dict_in_generate"),
        *("decoder_start_token_id", "transformers_version"),
        *("num_assistant_tokens_schedule", "is_assistant", "assistant_lookbehind", "target_lookbehind"),
        *("max_matching_ngram_size",),
    }
    keys = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert keys - honoured - without_effect == keys & set(UNSUPPORTED)


def test_hugging_faces_own_default_values_are_let_through(target: Target) -> None:
    resolve(target, IDS, **{**GenerationConfig._get_default_generation_params(), "max_length": 30} | _drop_assisted())


def _drop_assisted() -> dict[str, None]:
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    return dict.fromkeys([*names, "assistant_lookbehind", "target_lookbehind", "return_dict_in_generate"])


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.7), ("top_k", 5), ("top_p", 0.9), ("min_p", 0.1), ("top_p", [1.0, 0.9])]
)
def test_a_sampling_keyword_without_sampling_is_not_ignored(target: Target, name: str, value: object) -> None:
    with pytest.raises(EagleError, match=f"{name}=.* has no effect on greedy decoding; set do_sample=True"):
        resolve(target, IDS, **{name: value})
    resolve(target, IDS, do_sample=True, **{name: value})
    resolve(target, IDS, temperature=0.0, top_k=None, top_p=1.0, min_p=None)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"do_sample": True, "temperature": -1.0}, "temperature is -1.0, expected 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5, expected from 0"),
        ({"do_sample": True, "temperature": [0.5, 0.5, 0.5]}, "temperature has 3 values for 2 rows"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"repetition_penalty": -1.0}, "penalty"),
        ({"bad_words_ids": [[-1]]}, "bad_words_ids"),
        ({"no_repeat_ngram_size": -1}, "ngram_size"),
        ({"stop_strings": ["x", ""]}, "stop_strings hold an empty string"),
        ({"return_dict_in_generate": False}, "always returns a SpeculativeOutput"),
    ],
)
def test_values_that_make_no_sense_are_refused(target: Target, keywords: dict[str, object], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        resolve(target, IDS, **keywords)  # type: ignore[arg-type]


def test_stop_strings_need_a_tokenizer(target: Target) -> None:
    bare = Target(target.model)
    with pytest.raises(EagleError, match="stop_strings need the tokenizer"):
        resolve(bare, IDS, stop_strings=["x"])
    assert len(resolve(bare, IDS, stop_strings="x", tokenizer=tiny_tokenizer()).rows[0].criteria) == 1


def test_the_callers_processors_follow_the_configs_and_replace_those_of_their_class(target: Target) -> None:
    own = RepetitionPenaltyLogitsProcessor(penalty=9.0)

    class Mine(CountPenalty):
        pass

    mine = Mine(prompt=0, presence=1, frequency=1)
    made = resolve(
        target,
        IDS,
        repetition_penalty=1.1,
        min_new_tokens=2,
        presence_penalty=0.5,
        logits_processor=LogitsProcessorList([mine, own]),
    )
    first, second, third, last = made.rows[0].sampler.processors
    assert first is own
    assert isinstance(second, CountPenalty)
    assert isinstance(third, MinLengthLogitsProcessor)
    assert last is mine


def test_min_new_tokens_wins_over_min_length(target: Target) -> None:
    (processor,) = resolve(target, IDS, min_length=50, min_new_tokens=2).rows[0].sampler.processors
    assert isinstance(processor, MinLengthLogitsProcessor)
    assert processor.min_length == 5
    assert resolve(target, IDS, min_length=3).rows[0].sampler.processors == []


def test_keys_of_a_published_config_that_nobody_knows_say_nothing(target: Target) -> None:
    """As in Hugging Face; such a keyword is refused all the same."""
    config = GenerationConfig.from_dict({"chat_format": "chatml", "max_new_tokens": 3})
    assert resolve(target, IDS, generation_config=config).rows[0].max_new_tokens == 3
    with pytest.raises(EagleError, match="chat_format"):
        resolve(target, IDS, chat_format="chatml")
