"""From the target's own answers to training data: what is trained on is exactly what it was asked with and said."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from eagle.config import DataConfig, Recipe, RegenerateConfig, TargetConfig
from eagle.data.continuous import Answering
from eagle.data.prepare import load_prepared, prepare
from eagle.data.regenerate import regenerate
from eagle.target.loading import load_tokenizer
from eagle.target.prompt import prompt_ids
from tests.data.test_render import DEEPSEEK_R1, QWEN3, tokenizer_of
from tests.tiny import CHATML, tiny_model

ROWS, WHOLE = 24, 5
"""Prompts, and how many of them get their whole answer."""
ANSWERS = {
    "chatml": (CHATML, "{thought}"),
    "opened by the prompt": (DEEPSEEK_R1, "{thought}\n</think>\n\nyes"),
    "opened by the target": (QWEN3, "<think>\n{thought}\n</think>\n\nyes"),
    "ended inside the thought": (QWEN3, "<think>\n{thought} hm"),
}


def _question(number: int) -> str:
    return f"what is {number}?"


def _recipe(folder: Path, template: str) -> Recipe:
    tokenizer = tokenizer_of(template, "<s>", "</s>", "<|User|>", "<|Assistant|>", eos="</s>")
    if "</s>" not in template:
        tokenizer.eos_token = "<|im_end|>"
    model = tiny_model(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "target")
    lines = [json.dumps({"id": f"row-{number}", "prompt": _question(number)}) + "\n" for number in range(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    asked = RegenerateConfig(prompts=(str(folder / "prompts.jsonl"),), temperatures=(0.0,), batch_size=3)
    return Recipe(
        output_dir=str(folder / "run"),
        target=TargetConfig(model=str(folder / "target"), device="cpu"),
        data=DataConfig(
            sources=(str(folder / "run" / "regenerated.jsonl"),),
            validation_fraction=0.0,
            allow_skipped=0.0,
            regenerate=asked,
        ),
    )


def _scripted(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, answer: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Recipe, dict[str, list[int]]]:
    """The target thinks a word longer in each row; the length limit cuts the later ones, each at another place.

    Returns the recipe with that limit, and the ids that each row's answer then has.
    """
    said: dict[str, list[int]] = {}
    for number in range(ROWS):
        text = answer.format(thought=" ".join(["hello"] * (number + 1)))
        said[f"row-{number}"] = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    limit = len(said[f"row-{WHOLE - 1}"])

    def choose_tokens(logits_BV: Any, rows: Sequence[Answering]) -> list[int]:
        return [said[row.prompt.key][len(row.tokens)] for row in rows]

    monkeypatch.setattr("eagle.data.continuous.choose_tokens", choose_tokens)
    settings = dataclasses.replace(recipe.data.regenerate, max_new_tokens=limit)
    cut = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, regenerate=settings))
    return cut, {key: ids[:limit] for key, ids in said.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ANSWERS)
def test_exactly_what_the_target_said_is_trained_on(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, answer = ANSWERS[kind]
    recipe = _recipe(tmp_path, template)
    tokenizer = load_tokenizer(recipe.target)
    recipe, said = _scripted(recipe, tokenizer, answer, monkeypatch)
    regenerate(recipe)
    counts = prepare(recipe)["counts"]
    assert (counts["samples"], counts["skipped"], counts["notes"]) == (ROWS, {}, {})
    data, _ = load_prepared(recipe.data_dir)
    for row in data:
        number = int(row["id"].removeprefix("row-"))
        asked = prompt_ids(tokenizer, [{"role": "user", "content": _question(number)}])
        answered = said[row["id"]]
        assert (answered[-1] == tokenizer.eos_token_id) == (number < WHOLE)
        beyond = len(row["input_ids"]) - len(asked) - len(answered)
        assert row["input_ids"][: len(asked) + len(answered)] == asked + answered, tokenizer.decode(row["input_ids"])
        assert row["loss_mask"] == [False] * len(asked) + [True] * len(answered) + [False] * beyond
        assert beyond == 0 or number < WHOLE, "only the template's newline behind a whole answer may follow"
