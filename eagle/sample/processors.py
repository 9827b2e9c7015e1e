"""Logits processors and stopping criteria that a GenerationConfig asks for: Hugging Face's own, in its order."""

from collections.abc import Sequence
from typing import Any

from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import logits_process as hf

from eagle.errors import EagleError
from eagle.sample.penalties import CountPenalty
from eagle.sample.processing import Processor


def build_processors(
    config: GenerationConfig,
    own: Sequence[Processor],
    *,
    prompt: int,
    limit: int,
    eos: list[int],
    presence_penalty: float,
    frequency_penalty: float,
    device: str,
) -> list[Processor]:
    """One row's processors. prompt: its unpadded length. limit: its most new tokens.

    own: the caller's, behind the config's; one of the same class as one of the config's takes that one's place.
    """
    made: list[Processor] = []
    if config.sequence_bias is not None:
        made.append(hf.SequenceBiasLogitsProcessor(sequence_bias=config.sequence_bias))
    if config.repetition_penalty not in (None, 1.0):
        made.append(hf.RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if presence_penalty or frequency_penalty:
        made.append(CountPenalty(prompt=prompt, presence=presence_penalty, frequency=frequency_penalty))
    if config.no_repeat_ngram_size:
        made.append(hf.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids is not None:
        made.append(hf.NoBadWordsLogitsProcessor(config.bad_words_ids, eos or None))
    # min_new_tokens wins over min_length.
    least = (config.min_length or 0) if config.min_new_tokens is None else prompt + config.min_new_tokens
    if least > prompt and eos:
        made.append(hf.MinLengthLogitsProcessor(least, eos, device=device))
    if config.forced_bos_token_id is not None:
        made.append(hf.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        made.append(hf.ForcedEOSTokenLogitsProcessor(prompt + limit, config.forced_eos_token_id, device=device))
    if config.remove_invalid_values:
        made.append(hf.InfNanRemoveLogitsProcessor())
    if config.exponential_decay_length_penalty is not None:
        made.append(hf.ExponentialDecayLengthPenalty(config.exponential_decay_length_penalty, eos, prompt))
    if config.suppress_tokens is not None:
        made.append(hf.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if config.begin_suppress_tokens is not None:
        begin = prompt + 1 if prompt == 1 and config.forced_bos_token_id is not None else prompt
        made.append(hf.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin, device=device))
    return _with_own(made, own)


def _with_own(made: list[Processor], own: Sequence[Processor]) -> list[Processor]:
    by_class = {type(processor): processor for processor in reversed(own)}
    merged = [by_class.get(type(processor), processor) for processor in made]
    return [*merged, *(processor for processor in own if not any(processor is placed for placed in merged))]


def build_criteria(
    config: GenerationConfig, own: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None
) -> StoppingCriteriaList:
    """The caller's criteria, which may keep a state, the time limit and the stop strings."""
    criteria = StoppingCriteriaList(own)
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(max_time=config.max_time))
    if config.stop_strings:
        if tokenizer is None:
            raise EagleError("stop_strings need the tokenizer; pass tokenizer=..., or load the target with one")
        if not isinstance(config.stop_strings, str) and "" in config.stop_strings:
            raise EagleError("stop_strings hold an empty string, which ends every text; leave it out")
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
    return criteria
