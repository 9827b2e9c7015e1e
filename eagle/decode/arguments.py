"""What `generate` was asked for: Hugging Face's GenerationConfig and keywords, resolved to one Row per sequence.

Everything is honoured or refused; nothing is ignored. Order as in Hugging Face: the processors built from the config,
then the caller's own, then the filters of eagle/sample/sampling.py. Lengths (max_length, min_length) count a row's own tokens,
without its padding, so that they mean the same in every batch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from eagle.decode.beam_settings import BeamSettings, beam_settings, take_own_keywords
from eagle.decode.padding import unpadded
from eagle.errors import EagleError
from eagle.sample.noise import row_seeds
from eagle.sample.presets import within
from eagle.sample.processing import Processor, own_copy
from eagle.sample.processors import build_criteria, build_processors
from eagle.sample.row import Row
from eagle.sample.sampling import FilterOrder, RowSampler, Sampling
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target

# Keys of a GenerationConfig that are honoured here ...
_SUPPORTED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "num_return_sequences", "temperature", "top_k", "top_p", "min_p", "num_beams"),
    *(
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "exponential_decay_length_penalty",
    ),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "renormalize_logits", "output_scores"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# ... those that change no token: memory, compilation, settings of beams without beams, encoder-decoder models' start ...
_NEUTRAL = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("prefill_chunk_size", "continuous_batching_config", "low_memory", "return_dict_in_generate"),
    *("early_stopping", "length_penalty", "decoder_start_token_id", "_from_model_config", "transformers_version"),
}
# ... Hugging Face's own assisted decoding, which configs carry and callers may not ask for ...
_ASSISTED = {
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "is_assistant"),
    *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
}
# ... and the values, beside None and False, with which one of the others is off.
_OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beam_groups", "typical_p", "guidance_scale", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), (0,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens"), (0,)),
}
# What a keyword may say on greedy rows without being ignored.
NO_EFFECT_ON_GREEDY = "no effect on greedy"
"""Code of the error about a filter of sampling that is asked of greedy decoding."""
_GREEDY: dict[str, tuple[Any, ...]] = {"temperature": (0, 1), "top_k": (0, 50), "top_p": (1,), "min_p": (0,)}

_OF_PRESETS = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "max_length")

HF_TOP_K = 50
"""Hugging Face samples among this many tokens when neither caller nor model says a top_k."""
DEFAULT_NEW_TOKENS = 256
"""The length limit when neither caller nor model says one."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A resolved call."""

    rows: list[Row]
    pad_token_id: int
    output_scores: bool
    beams: BeamSettings | None = None
    """Search instead of decoding token by token; its num_return_sequences come from one Row per prompt."""


def resolve(
    target: Target,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Processor] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int | Sequence[int] | None = None,
    filter_order: FilterOrder = "sequential",
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    preset: str | None = None,
    **keywords: Any,
) -> Arguments:
    """One Row per sequence asked for.

    generation_config: what it leaves open comes from the model's own; keywords go over both. attention_mask: without
    one, pad tokens are padding, unless they are also an EOS. tokenizer: for stop_strings (default: the target's).
    logits_processor, stopping_criteria: they may keep a state, so every row has its own: the first row the given objects, the
    others copies of them. seed: an int (rows get `eagle.sample.noise.row_seeds` of it), one per sequence returned, or None (drawn
    from torch's global generator where anything is sampled, 0 where all rows are greedy).
    filter_order: see eagle.sample.sampling.Sampling. presence_penalty, frequency_penalty: see eagle.sample.penalties.
    preset: a template of eagle.sample.presets; keywords go over its temperature, top_p, top_k and max_new_tokens, within its
    bounds. keywords: those of GenerationConfig; temperature, top_k, top_p and min_p also as one value per row (temperature 0:
    greedy); with num_beams above 1 also search, sample_first, prune_relative, prune_absolute and prune_local
    (eagle.decode.beam_settings.BeamSettings). As in Hugging Face an explicit None switches off (eos_token_id, top_k), and
    sampling without a top_k keeps 50 tokens. Without a length limit: 256 new tokens.
    Raises EagleError for what is not supported or does not fit.
    """
    keywords = {name: _plain(value) for name, value in keywords.items()}
    fitted = preset is not None and keywords.get("max_new_tokens") is None
    if preset is not None:
        _refuse_beside_preset(generation_config, keywords)
        keywords |= within(preset, keywords)
    search_keywords = take_own_keywords(keywords)
    per_row = {name: keywords.pop(name) for name in _GREEDY if isinstance(keywords.get(name), (list, tuple))}
    with _hugging_face_checks():
        config, unknown = _merged(generation_config, target.model.generation_config, keywords)
    sampled = bool(config.do_sample)
    refuse_unsupported(config, unknown, keywords)
    if not sampled:
        _refuse_ignored({**keywords, **per_row})
    eos = config.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else [int(token) for token in eos]
    beams = beam_settings(config, search_keywords)
    copies = 1 if beams is not None else config.num_return_sequences or 1
    each = unpadded(input_ids, attention_mask, pad=config.pad_token_id, eos=eos_ids, vocab_size=target.vocab_size)
    prompts = [prompt for prompt in each for _ in range(copies)]
    temperatures = per_row.get("temperature", [config.temperature])
    if seed is None and not (sampled and any(temperature != 0 for temperature in temperatures)):
        seed = [0] * len(prompts)  # nothing will be drawn, so torch's generator stays where it is
    seeds = row_seeds(_plain(seed), len(prompts))
    own = [(list(logits_processor or ()), list(stopping_criteria or ()))]
    own += [([own_copy(one) for one in own[0][0]], [own_copy(one) for one in own[0][1]]) for _ in prompts[1:]]
    rows = []
    for number, (prompt, row_seed, (own_processors, own_criteria)) in enumerate(zip(prompts, seeds, own)):
        values = {
            name: _of_row(per_row, name, number // copies, len(input_ids), getattr(config, name)) for name in _GREEDY
        }
        sampling = Sampling(
            temperature=float(_default(values["temperature"], 1.0)) if sampled else 0.0,
            top_k=int(_default(values["top_k"], 0)),
            top_p=float(_default(values["top_p"], 1.0)),
            min_p=float(_default(values["min_p"], 0.0)),
            filter_order=filter_order,
            seed=row_seed,
        )
        limit = _max_new_tokens(config, len(prompt), target, fitted=fitted)
        with _hugging_face_checks():
            processors = build_processors(
                config,
                own_processors,
                prompt=len(prompt),
                limit=limit,
                eos=eos_ids,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                device=str(target.tokens.lm_head_VH.device),  # scores lie there
            )
            criteria = build_criteria(config, own_criteria, tokenizer or target.tokenizer)
        rows.append(
            Row(
                prompt_length=len(prompt),
                tokens=list(prompt),
                sampler=RowSampler(sampling=sampling, processors=processors, prompt_length=len(prompt)),
                eos=frozenset(eos_ids),
                max_new_tokens=limit,
                criteria=criteria,
                keeps_scores=bool(config.output_scores),
                normalises_scores=bool(config.renormalize_logits),
                stats=DecodeStats(seed=row_seed),
            )
        )
    pad = config.pad_token_id if config.pad_token_id is not None else (eos_ids or [0])[0]
    return Arguments(rows=rows, pad_token_id=int(pad), output_scores=bool(config.output_scores), beams=beams)


@contextmanager
def _hugging_face_checks() -> Iterator[None]:
    """What Hugging Face refuses is the caller's mistake, and its message says which."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise EagleError(str(error)) from error


def _merged(
    own: GenerationConfig | None, models: GenerationConfig | None, keywords: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The caller's config, the model's where it says nothing, the keywords over both; and the keywords left over."""
    config = copy.deepcopy(own) if own is not None else GenerationConfig()
    if models is not None:
        config.update(**models.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(top_k=HF_TOP_K, defaults_only=True)
    return config, config.update(**keywords)


def refuse_unsupported(
    config: GenerationConfig,
    unknown: Mapping[str, Any] = MappingProxyType({}),
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raises EagleError naming what a config, or a caller's keywords, ask for that `generate` does not do."""
    asked = {name for name, value in unknown.items() if value is not None}
    asked |= {name for name in _ASSISTED if keywords.get(name) is not None}
    known = (
        GenerationConfig().to_dict()
    )  # a published generation_config.json may hold keys of its own: they say nothing
    for name, value in config.to_dict().items():
        if name not in known:
            continue
        off = value is None or value is False or value in ([], {}) or value in _OFF.get(name, ())
        if name not in _SUPPORTED | _NEUTRAL | _ASSISTED and not off:
            asked.add(name)
    if asked:
        raise EagleError(
            f"generate does not support {', '.join(sorted(asked))}: nothing is ignored here, so leave it out (or unset "
            "it in the generation config)"
        )
    if keywords.get("return_dict_in_generate") is False:
        raise EagleError("generate always returns a SpeculativeOutput; take .sequences for the tensor")


def _refuse_ignored(keywords: dict[str, Any]) -> None:
    for name, without_effect in _GREEDY.items():
        value = keywords.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if not all(one is None or one in without_effect for one in values):
            raise EagleError(
                f"{name}={value} has no effect on greedy decoding",
                remedy="set do_sample=True, or leave it out",
                code=NO_EFFECT_ON_GREEDY,
            )


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _of_row(per_row: dict[str, Any], name: str, row: int, rows: int, shared: Any) -> Any:
    if name not in per_row:
        return shared
    values = per_row[name]
    if len(values) != rows:
        raise EagleError(f"{name} has {len(values)} values for {rows} rows; give a number or one per row")
    return values[row]


def _refuse_beside_preset(config: GenerationConfig | None, keywords: dict[str, Any]) -> None:
    """A template and a config that both say what the template says: which one is meant?"""
    said = [] if config is None else [name for name in _OF_PRESETS if getattr(config, name, None) is not None]
    if said:
        raise EagleError(
            f"a preset was given, and a generation_config that sets {', '.join(said)}; leave one out (keywords go over a preset)"
        )
    if keywords.get("max_length") is not None:
        raise EagleError(
            f"max_length={keywords['max_length']} beside a preset, which bounds max_new_tokens; say max_new_tokens"
        )


def _max_new_tokens(config: GenerationConfig, prompt: int, target: Target, *, fitted: bool) -> int:
    """fitted: the length is a template's, not the caller's: it shrinks to the positions that are left."""
    if fitted and target.max_positions is not None:
        limit = max(1, min(int(config.max_new_tokens), target.max_positions - prompt))
    elif config.max_new_tokens is not None:
        limit = int(config.max_new_tokens)
    elif config.max_length is not None:
        limit = int(config.max_length) - prompt
        if limit < 1:
            raise EagleError(
                f"max_length is {config.max_length}, the prompt alone has {prompt} tokens; raise max_length"
            )
    else:
        limit = DEFAULT_NEW_TOKENS
        if target.max_positions is not None:
            limit = max(1, min(limit, target.max_positions - prompt))
    if target.max_positions is not None and prompt + limit > target.max_positions:
        raise EagleError(
            f"a prompt of {prompt} tokens and {limit} new ones need {prompt + limit} positions, {target.name} has "
            f"{target.max_positions}; shorten the prompt or lower max_new_tokens"
        )
    return limit
