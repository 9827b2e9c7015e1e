"""Which ids end an answer, and who says so."""

from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle.progress import console


def eos_sources(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, tuple[int, ...]]:
    """The ids by who names them: the generation config, the model's config, the tokenizer. Servers take all of them."""
    owners: dict[str, list[Any]] = {
        "generation config": [getattr(model, "generation_config", None)],
        "config": [model.config, model.config.get_text_config(decoder=True)],
        "tokenizer": [tokenizer],
    }
    found: dict[str, tuple[int, ...]] = {}
    for source, those in owners.items():
        said = [ids for owner in those if (ids := getattr(owner, "eos_token_id", None)) is not None]
        each = [token for ids in said for token in (ids if isinstance(ids, (list, tuple)) else [ids])]
        if each:
            found[source] = tuple(dict.fromkeys(map(int, each)))
    return found


def say_where_answers_end(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """One line, where the sources differ."""

    def readable(token: int) -> str:
        text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
        return f"{token}" if text is None else f"{token} {text}"

    sources = eos_sources(model, tokenizer)
    if len({frozenset(ids) for ids in sources.values()}) > 1:
        named = "; ".join(f"{', '.join(map(readable, ids))} ({source})" for source, ids in sources.items())
        console.print(f"target {name}: an answer ends at any of {named}", markup=False)
