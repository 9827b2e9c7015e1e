"""What `generate` was asked for: Hugging Face's GenerationConfig and keywords, resolved to one Row per sequence.

Everything is honoured or refused; nothing is ignored. Order as in Hugging Face: the processors built from the config,
then the caller's own, then the filters of eagle/sampling.py.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria
from transformers.generation import logits_process as hf

from eagle.errors import EagleError
from eagle.noise import row_seeds
from eagle.penalties import CountPenalty
from eagle.rows import Row
from eagle.sampling import FilterOrder, Processor, RowSampler, Sampling
from eagle.stats import DecodeStats
from eagle.target import Target

# Keys of a GenerationConfig that are honoured here ...
_SUPPORTED = {
    *(
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "stop_strings",
        "do_sample",
        "num_return_sequences",
    ),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("output_scores", "pad_token_id", "bos_token_id", "eos_token_id"),
}
# ... those that change no token: memory, compilation, other assisted-generation modes' tuning, book-keeping ...
_NEUTRAL = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *(
        "prefill_chunk_size",
        "continuous_batching_config",
        "low_memory",
        "return_dict_in_generate",
        "renormalize_logits",
    ),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
    *("_from_model_config", "transformers_version", "remove_invalid_values", "early_stopping", "length_penalty"),
}
# ... and the values of the others that say nothing.
_SILENT: tuple[Any, ...] = (None, False, 0, 0.0, 1, 1.0, [], {})
_PER_ROW = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A resolved call."""

    rows: list[Row]
    pad_token_id: int
    output_scores: bool


def resolve(
    target: Target,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Processor] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    seed: int | Sequence[int] | None = None,
    filter_order: FilterOrder = "sequential",
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    **keywords: Any,
) -> Arguments:
    """One Row per sequence asked for.

    seed: an int (rows get `eagle.noise.row_seeds` of it), one per row, or None (drawn from torch's global generator).
    filter_order: see eagle.sampling.Sampling. presence_penalty, frequency_penalty: see eagle.penalties. keywords: those
    of GenerationConfig; temperature, top_k, top_p and min_p also as one value per row (temperature 0: greedy).
    Raises EagleError for what is not supported or does not fit.
    """
    config = copy.deepcopy(generation_config or target.model.generation_config or GenerationConfig())
    per_row = {
        name: keywords.pop(name) for name in _PER_ROW if isinstance(keywords.get(name), (list, tuple, torch.Tensor))
    }
    unknown = config.update(**keywords)
    _refuse_unsupported(config, unknown)
    copies = config.num_return_sequences or 1
    prompts = [prompt for prompt in _unpadded(input_ids, attention_mask, target) for _ in range(copies)]
    sampled = bool(config.do_sample)
    if copies > 1 and not sampled:
        raise EagleError(f"num_return_sequences is {copies}, but greedy decoding has one answer; set do_sample=True")
    eos = config.eos_token_id if config.eos_token_id is not None else list(target.eos_token_ids)
    eos_ids = [eos] if isinstance(eos, int) else [int(token) for token in eos]
    rows = []
    for number, (prompt, row_seed) in enumerate(zip(prompts, row_seeds(seed, len(prompts)))):
        values = {
            name: _of_row(per_row, name, number // copies, len(input_ids), getattr(config, name)) for name in _PER_ROW
        }
        sampling = Sampling(
            temperature=float(_default(values["temperature"], 1.0)) if sampled else 0.0,
            top_k=int(_default(values["top_k"], 0)),
            top_p=float(_default(values["top_p"], 1.0)),
            min_p=float(_default(values["min_p"], 0.0)),
            filter_order=filter_order,
            seed=row_seed,
        )
        limit = _max_new_tokens(config, len(prompt), target)
        processors = _processors(config, len(prompt), limit, eos_ids, presence_penalty, frequency_penalty, target)
        rows.append(
            Row(
                prompt_length=len(prompt),
                tokens=list(prompt),
                sampler=RowSampler(sampling=sampling, processors=[*processors, *(logits_processor or ())]),
                eos=frozenset(eos_ids),
                max_new_tokens=limit,
                criteria=_criteria(config, stopping_criteria, target.tokenizer),
                keeps_scores=bool(config.output_scores),
                stats=DecodeStats(seed=row_seed),
            )
        )
    pad = config.pad_token_id if config.pad_token_id is not None else (eos_ids or [0])[0]
    return Arguments(rows=rows, pad_token_id=int(pad), output_scores=bool(config.output_scores))


def _refuse_unsupported(config: GenerationConfig, unknown: dict[str, Any]) -> None:
    asked = [name for name, value in unknown.items() if value is not None]
    for name, value in config.to_dict().items():
        if name not in _SUPPORTED | _NEUTRAL and not any(value is silent or value == silent for silent in _SILENT):
            asked.append(name)
    if asked:
        raise EagleError(
            f"generate does not support {', '.join(f'{name}' for name in sorted(asked))}: nothing is ignored here, so leave "
            "it out (or unset it in the generation config)"
        )


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _of_row(per_row: dict[str, Any], name: str, row: int, rows: int, shared: Any) -> Any:
    if name not in per_row:
        return shared
    values = per_row[name]
    if len(values) != rows:
        raise EagleError(f"{name} has {len(values)} values for {rows} rows; give a number or one per row")
    return values[row]


def _unpadded(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, target: Target) -> list[list[int]]:
    """The rows without their padding, left or right."""
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise EagleError(f"input_ids have shape {tuple(input_ids.shape)}; expected [B, T] with B and T >= 1")
    if attention_mask is None:
        rows = input_ids.tolist()
    else:
        if attention_mask.shape != input_ids.shape:
            raise EagleError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; expected the same"
            )
        rows = []
        for number, (ids_T, mask_T) in enumerate(zip(input_ids, attention_mask.bool())):
            places = mask_T.nonzero().flatten()
            if len(places) == 0:
                raise EagleError(f"row {number} of attention_mask marks every token as padding; give each row a prompt")
            if int(places[-1] - places[0]) + 1 != len(places):
                raise EagleError(
                    f"row {number} of attention_mask has a hole; only padding on the left or right is supported"
                )
            rows.append(ids_T[mask_T].tolist())
    for number, row in enumerate(rows):
        if not 0 <= min(row) <= max(row) < target.vocab_size:
            raise EagleError(
                f"row {number} holds the token id {max(row)}, outside the target's vocabulary of {target.vocab_size}; "
                "was it encoded with this target's tokenizer?"
            )
    return rows


def _max_new_tokens(config: GenerationConfig, prompt: int, target: Target) -> int:
    if config.max_new_tokens is not None:
        limit = int(config.max_new_tokens)
        if limit < 1:
            raise EagleError(f"max_new_tokens is {limit}; expected at least 1")
    elif config.max_length is not None:
        limit = int(config.max_length) - prompt
        if limit < 1:
            raise EagleError(
                f"max_length is {config.max_length}, the prompt alone has {prompt} tokens; raise max_length"
            )
    else:
        limit = 256
        if target.max_positions is not None:
            limit = max(1, min(limit, target.max_positions - prompt))
    if target.max_positions is not None and prompt + limit > target.max_positions:
        raise EagleError(
            f"a prompt of {prompt} tokens and {limit} new ones need {prompt + limit} positions, {target.name} has "
            f"{target.max_positions}; shorten the prompt or lower max_new_tokens"
        )
    return limit


def _processors(
    config: GenerationConfig,
    prompt: int,
    limit: int,
    eos: list[int],
    presence_penalty: float,
    frequency_penalty: float,
    target: Target,
) -> list[Processor]:
    """Hugging Face's own processors, in its order."""
    device = str(target.device)
    made: list[Processor] = []
    if config.sequence_bias:
        made.append(hf.SequenceBiasLogitsProcessor(sequence_bias=config.sequence_bias))
    if config.repetition_penalty not in (None, 1.0):
        made.append(hf.RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
    if presence_penalty or frequency_penalty:
        made.append(CountPenalty(prompt=prompt, presence=presence_penalty, frequency=frequency_penalty))
    if config.no_repeat_ngram_size:
        made.append(hf.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        made.append(hf.NoBadWordsLogitsProcessor(config.bad_words_ids, eos or None))
    if config.min_length and eos:
        made.append(hf.MinLengthLogitsProcessor(config.min_length, eos, device=device))
    if config.min_new_tokens and eos:
        made.append(hf.MinNewTokensLengthLogitsProcessor(prompt, config.min_new_tokens, eos, device=device))
    if config.forced_bos_token_id is not None:
        made.append(hf.ForcedBOSTokenLogitsProcessor(config.forced_bos_token_id))
    if config.forced_eos_token_id is not None:
        made.append(hf.ForcedEOSTokenLogitsProcessor(prompt + limit, config.forced_eos_token_id, device=device))
    if config.suppress_tokens:
        made.append(hf.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if config.begin_suppress_tokens:
        made.append(hf.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt, device=device))
    return made


def _criteria(
    config: GenerationConfig, own: Sequence[Any] | None, tokenizer: PreTrainedTokenizerBase | None
) -> StoppingCriteriaList:
    criteria = StoppingCriteriaList(own or ())
    if config.stop_strings:
        if tokenizer is None:
            raise EagleError("stop_strings need the tokenizer; load the target with one")
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
    return criteria
