"""What the target's own generation config does to its answers: regeneration follows it, as a server would.

Processors and filters are those that `generate` honours (eagle/sample/processors.py, eagle/sample/sampling.py); whatever else
a config asks for is refused by name. Temperature and length are the recipe's.
"""

from typing import Any

from transformers import GenerationConfig

from eagle.decode.arguments import refuse_unsupported
from eagle.errors import EagleError
from eagle.sample.processors import build_processors
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.target import Target

_PROCESSORS = (
    *(
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "sequence_bias",
        "exponential_decay_length_penalty",
    ),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("min_length", "min_new_tokens", "remove_invalid_values"),
)
_FILTERS = ("top_k", "top_p", "min_p")
_OFF: dict[str, tuple[Any, ...]] = {
    **{"repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "min_length": (0,), "min_new_tokens": (0,)},
    **{"top_k": (0,), "top_p": (1,), "min_p": (0,)},
}
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "stop_strings": (),
    "max_time": (),
}
"""What `generate` honours and continuous batching cannot, with the values that ask for nothing."""


def followed(target: Target) -> dict[str, Any]:
    """The settings of the target's generation config that decide its answers, by name.

    Raises EagleError for one that regeneration cannot follow.
    """
    config = _config(target)
    try:
        refuse_unsupported(config)
    except EagleError as error:
        raise _refusal(target, str(error)) from error
    for name, nothing in _NOT_HERE.items():
        value = getattr(config, name, None)
        if value is not None and value not in nothing:
            raise _refusal(target, f"{name} is {value!r}, which answers row by row cannot follow; unset it there")
    values = {name: getattr(config, name, None) for name in (*_PROCESSORS, *_FILTERS)}
    return {name: value for name, value in values.items() if not _is_off(name, value)}


def row_sampler(target: Target, *, prompt: int, limit: int, temperature: float) -> RowSampler | None:
    """A row's processors and filters. prompt: its tokens; limit: its most new ones. None: the target asks for none."""
    asked = followed(target)
    if not asked:
        return None
    try:
        processors = build_processors(
            GenerationConfig(**{name: value for name, value in asked.items() if name in _PROCESSORS}),
            (),
            prompt=prompt,
            limit=limit,
            eos=list(target.eos_token_ids),
            presence_penalty=0.0,
            frequency_penalty=0.0,
            device=str(target.tokens.lm_head_VH.device),
        )
    except (ValueError, TypeError) as error:
        raise _refusal(target, str(error)) from error
    filters = {name: value for name, value in asked.items() if name in _FILTERS} if temperature > 0 else {}
    return RowSampler(sampling=Sampling(temperature=temperature, **filters), processors=processors)


def _config(target: Target) -> GenerationConfig:
    return getattr(target.model, "generation_config", None) or GenerationConfig()


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False or value in ([], {}) or value in _OFF.get(name, ())


def _refusal(target: Target, why: str) -> EagleError:
    return EagleError(f"regeneration follows the generation config of {target.name}, and cannot: {why}")
