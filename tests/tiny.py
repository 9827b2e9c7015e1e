"""Tiny random models of many families and a tiny tokenizer: the whole pipeline on them takes seconds."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 384
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": dict(model_type="llama", tie_word_embeddings=True),
    "qwen2": {},
    "qwen3": {},
    "mistral": dict(sliding_window=None),
    "mistral-window": dict(model_type="mistral", sliding_window=12),
    "gemma2": dict(sliding_window=12, query_pre_attn_scalar=8, attn_implementation="eager"),
    "gemma3_text": dict(sliding_window=12, query_pre_attn_scalar=8),
    "phi3": {},
    "gpt2": dict(n_embd=32, n_layer=3, n_head=4, n_positions=512),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1),
    "cohere": {},
    "granite": dict(logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0, attention_multiplier=0.2),
    "olmo2": {},
}


def tiny_model(family: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random causal LM of `family` in float32: 3 layers, H = 32, V = 384."""
    extra = dict(FAMILIES.get(family, {}))
    model_type = extra.pop("model_type", family)
    shape = {**_SHAPE, **extra, **overrides}
    implementation = shape.pop("attn_implementation", "sdpa")
    if model_type == "gpt2":
        keep = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range"}
        shape = {key: value for key, value in shape.items() if key in keep or key in extra or key in overrides}
    config = CONFIG_MAPPING[model_type](**shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    return model.eval()


@cache
def _trained_bpe() -> str:
    corpus = ["the cat sat on the mat and said hello to the dog", "what is the capital of France? Paris.", "1 + 1 = 2"]
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus * 20, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 384 tokens (any text encodes), with <|im_start|> = 1 and <|im_end|> = 2 as EOS."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_bpe()),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=chat_template,
    )


def save_tiny_target(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    """Writes a tiny model with its tokenizer to `directory`, as a user's checkpoint would lie there."""
    tiny_model(family, **overrides).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def write_conversations(path: Path, count: int, *, words: int = 12, turns: int = 1) -> Path:
    """Writes `count` conversations (messages shape) of varying length as JSONL."""
    vocabulary = [
        "the",
        "cat",
        "sat",
        "on",
        "mat",
        "and",
        "said",
        "hello",
        "to",
        "dog",
        "what",
        "is",
        "capital",
        "of",
        "France",
        "Paris",
    ]
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            messages = []
            for turn in range(turns):
                take = [
                    vocabulary[(i * 7 + turn * 3 + k * (1 + i % 5)) % len(vocabulary)] for k in range(words + i % 9)
                ]
                messages.append({"role": "user", "content": " ".join(take[: 3 + i % 4])})
                messages.append({"role": "assistant", "content": " ".join(take)})
            file.write(json.dumps({"id": f"row-{i}", "messages": messages}) + "\n")
    return path
