"""What every key of a head's config.json means for what the head computes: the one table by which folders are read.

A key is honoured (READ: read.py and what it calls take it), told by the tensors (TOLD), ordinary (ORDINARY: heads here
compute as under these values alone, any other is refused), or changes nothing (IDLE). OF_FORMAT holds what a name means
otherwise in one format. A key that stands nowhere is named: `eagle import` says it, loading the folder as it is refuses it.
A null says nothing and is passed over. The keys of RoPE settings are in rope.py.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from eagle.errors import EagleError
from eagle.formats.format import EAGLE_CONFIG, Format

LAYER_CONFIG = "transformer_layer_config"
"""Where speculators nests the layer's config: its keys mean there what they mean at the top of other formats."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordinary:
    """Values under which a head computes as heads here do."""

    values: tuple[Any, ...] = ()
    """Empty: there is none, the key must be absent or null."""
    meaning: str
    otherwise: str = ""
    """Where the name is known to mean another thing, and the remedy."""
    read_as: str | None = None
    """What an ordinary value is said to have been taken for; None: nothing is said."""


READ = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "rms_norm_eps", "max_position_embeddings", "draft_vocab_size", "norm_before_residual"),
        *("target_hidden_size", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", EAGLE_CONFIG, LAYER_CONFIG),
    }
)
"""Besides the places that may name an EAGLE-3 head's layers (Format.layer_ids)."""

TOLD = frozenset(
    {
        *("num_hidden_layers", "bias", "fusion_bias", "attention_bias", "qkv_bias", "mlp_bias", "tie_word_embeddings"),
        *("num_aux_hidden_states", "num_aux_layers", "has_own_embed_tokens", "has_own_lm_head", "has_lm_head"),
        "eagle_config.has_lm_head",
    }
)

ORDINARY: Mapping[str, Ordinary] = {
    "hidden_act": Ordinary(values=("silu", "swish"), meaning="the MLP's activation"),
    "hidden_activation": Ordinary(values=("silu", "swish"), meaning="the MLP's activation"),
    "add_para_norm": Ordinary(values=(False,), meaning="norms before fc (a variant of HASS)"),
    "layernorms": Ordinary(values=(False,), meaning="norms before fc (a variant of HASS)"),
    "norm_before_fc": Ordinary(values=(False,), meaning="a norm before fc"),
    "fc_norm": Ordinary(values=(False,), meaning="norms before fc"),
    "use_aux_norm": Ordinary(values=(False,), meaning="norms before fc"),
    "norm_output": Ordinary(
        values=(False,),
        meaning="the recursive feature is normed",
        otherwise="SpecForge's own folders say so of ordinary heads: for one of those give --format specforge",
    ),
    "use_qk_norm": Ordinary(values=(False,), meaning="norms of q and k"),
    "qk_norm": Ordinary(values=(False,), meaning="norms of q and k"),
    "qk_layernorm": Ordinary(values=(False,), meaning="norms of q and k"),
    "parallel_drafting": Ordinary(values=(False,), meaning="several tokens drafted in one step"),
    "mask_token_id": Ordinary(meaning="several tokens drafted in one step"),
    "pard_token": Ordinary(meaning="several tokens drafted in one step"),
    "ptd_token_id": Ordinary(meaning="several tokens drafted in one step"),
    "partial_rotary_factor": Ordinary(values=(1,), meaning="the rotated share of the head dim"),
    "rotary_pct": Ordinary(values=(1,), meaning="the rotated share of the head dim"),
    "rotary_dim": Ordinary(meaning="the rotated part of the head dim"),
    "rope_local_base_freq": Ordinary(meaning="another RoPE base for layers with a window"),
    "rope_interleave": Ordinary(values=(False,), meaning="RoPE turns neighbouring components"),
    "rope_interleaved": Ordinary(values=(False,), meaning="RoPE turns neighbouring components"),
    "is_neox_style": Ordinary(values=(True,), meaning="false: RoPE turns neighbouring components"),
    "position_embedding_type": Ordinary(values=("rope",), meaning="the kind of positions"),
    "no_rope_layers": Ordinary(values=([1],), meaning="layers without RoPE"),
    "attention_chunk_size": Ordinary(meaning="attention within chunks"),
    "attention_sink_bias": Ordinary(values=(False,), meaning="attention sinks"),
    "attention_value_scale": Ordinary(values=(1,), meaning="a factor of the values"),
    "attention_multiplier": Ordinary(meaning="a factor of the attention's scores"),
    "query_pre_attn_scalar": Ordinary(meaning="a factor of the attention's scores"),
    "attn_temperature_tuning": Ordinary(values=(False,), meaning="scores scaled by position"),
    "attn_logit_softcapping": Ordinary(meaning="capped attention scores"),
    "final_logit_softcapping": Ordinary(meaning="capped logits"),
    "clip_qkv": Ordinary(meaning="clipped q, k and v"),
    "embedding_multiplier": Ordinary(values=(1,), meaning="a factor of the embeddings"),
    "scale_emb": Ordinary(values=(1,), meaning="a factor of the embeddings"),
    "scale_embeddings": Ordinary(values=(False,), meaning="a factor of the embeddings"),
    "residual_multiplier": Ordinary(values=(1,), meaning="a factor of the residual"),
    "scale_depth": Ordinary(meaning="a factor of the residual"),
    "logits_scaling": Ordinary(values=(1,), meaning="a factor of the logits"),
    "logit_scale": Ordinary(values=(1,), meaning="a factor of the logits"),
    "quantization_config": Ordinary(meaning="quantised weights"),
    "compression_config": Ordinary(meaning="quantised weights"),
    "eagle_config.use_aux_hidden_state": Ordinary(values=(True,), meaning="several layers of the target are fused"),
    "eagle_config.use_last_layernorm": Ordinary(values=(True,), meaning="a norm before the LM head"),
    "eagle_config.use_input_layernorm_in_first_layer": Ordinary(values=(True,), meaning="the embedding's norm"),
    "eagle_config.use_mtp_layernorm": Ordinary(values=(False,), meaning="norms of multi-token prediction"),
    "eagle_config.parallel_draft_step": Ordinary(values=(1,), meaning="tokens drafted in one step"),
    "eagle_config.norm_before_fc": Ordinary(values=(False,), meaning="a norm before fc"),
    "eagle_config.eh_proj_before_attn": Ordinary(values=(False,), meaning="a projection before the attention"),
    "eagle_config.return_hidden_post_norm": Ordinary(values=(False,), meaning="the recursive feature is normed"),
}

IDLE = frozenset(
    {
        # transformers: where it came from, how it is loaded and run
        *("architectures", "auto_map", "transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_experts_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "torchscript", "use_bfloat16"),
        *("tf_legacy_loss", "pruned_heads", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
        *("add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "prefix", "pretraining_tp"),
        "tokenizer_class",
        *("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "transformers.js_config"),
        # tokens, and settings of `generate` (transformers 4 wrote them into every config)
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "max_length"),
        *("min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "bad_words_ids"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
        "return_dict_in_generate",
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"),
        *("suppress_tokens", "begin_suppress_tokens"),
        # training
        *("initializer_range", "attention_dropout", "hidden_dropout", "embed_requires_grad", "ttt_length", "ttt_steps"),
        # speculators: what it is, and how it proposes
        *("speculators_model_type", "speculators_version", "speculators_config", "has_no_defaults_at_init"),
        # what concerns further layers, which a head here has not got
        *("eagle_config.next_layer_regular", "eagle_config.parallel_draft_heads_num_layers"),
    }
)

OF_FORMAT: Mapping[str, Mapping[str, Ordinary]] = {
    "specforge": {
        "norm_output": Ordinary(
            values=(True,),
            meaning="SpecForge computes the logits without the norm before the LM head",
            otherwise="vLLM's folders say so of ordinary heads: for one of those give --format vllm",
            read_as="the norm before the LM head, which EAGLE-3 heads have; a folder for vLLM means another head by it",
        ),
    },
    "eagle": {
        "layer_types": Ordinary(values=(["full_attention"],), meaning="here sliding_window alone tells the window")
    },
}


def check_keys(
    values: Mapping[str, Any], format: Format, *, own: frozenset[str] = frozenset()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The keys, with their values, of which nothing is known here, and what to say of others. own: the format's config class's.

    Raises EagleError for a value under which the head would compute something else.
    """
    layer_ids = {place.key for place in format.layer_ids}
    special, unknown, notes = OF_FORMAT.get(format.name, {}), [], []
    for key, value in _told(values):
        ordinary = special.get(key) or ORDINARY.get(key)
        if ordinary is not None:
            if not any(_same(value, one) for one in ordinary.values):
                _refuse(key, value, ordinary)
            if ordinary.read_as is not None:
                notes.append(f"{key} {value!r}, as {format.title} means it: {ordinary.read_as}")
        elif key not in READ | TOLD | IDLE | layer_ids | own:
            unknown.append(f"{key} = {value!r}")
    return tuple(unknown), tuple(notes)


def _told(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key that says something, those within eagle_config with its name."""
    for key, value in values.items():
        if value is None:
            continue
        if key == EAGLE_CONFIG and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items() if one is not None)
        elif key == LAYER_CONFIG and isinstance(value, Mapping):
            yield from _told(value)
        else:
            yield key, value


def _same(value: Any, one: Any) -> bool:
    """True is not 1 here."""
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)


def _refuse(key: str, value: Any, ordinary: Ordinary) -> None:
    alone = f"with {' or '.join(map(repr, ordinary.values))} alone" if ordinary.values else "without it"
    raise EagleError(
        f"{key} is {value!r} ({ordinary.meaning}): heads here compute as {alone}, so this one cannot be imported"
        + (f"; {ordinary.otherwise}" if ordinary.otherwise else "")
    )
