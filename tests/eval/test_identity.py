"""Earlier results and answers stand only where everything that the target's text depends on is the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle.config import Recipe, read_recipe
from eagle.eval import identity
from eagle.eval.checks.check import check_exact
from eagle.eval.checks.distribution import check_distribution
from eagle.eval.harness import evaluate
from eagle.eval.identity import evaluation_identity
from eagle.eval.quality.decoding import compare_decoding
from eagle.eval.quality.quality import compare_quality
from eagle.eval.suites.prompt_set import recipe_prompts
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target
from tests.eval.test_harness import random_head
from tests.recipes import write_recipe

torch.set_num_threads(1)
MEASUREMENTS: dict[str, Callable[[Recipe], object]] = {
    "answers": evaluate,
    "exactness": check_exact,
    "distribution": check_distribution,
    "quality": compare_quality,
    "decoding": compare_decoding,
}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    section = {"methods": ["plain", "eagle2"], "sampling": ["T=0.8"], "max_new_tokens": 6, "check_rows": 4, "limit": 1}
    recipe = read_recipe(write_recipe(tmp_path, eval=section))
    save_head(random_head(Target.from_config(recipe.target)), recipe.head_dir)
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_another_template_or_eos_of_the_same_weights_is_another_measurement(
    recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target of the hub lies nowhere that a stamp could be taken of: the loaded tokenizer itself is asked."""
    monkeypatch.setattr(identity, "stamp", lambda path: "the hub's")
    target = Path(recipe.target.model)

    def set_aside() -> int:
        (recipe.eval_dir / "results.json").unlink(missing_ok=True)
        MEASUREMENTS[name](recipe)
        assert (recipe.eval_dir / f"{name}.jsonl").is_file()
        return len(list(recipe.eval_dir.glob(f"{name}.before-*.jsonl")))

    assert [set_aside(), set_aside()] == [0, 0]
    template = target / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("assistant\\n", "assistant:\\n").replace("assistant\n", "assistant:\n")
    )
    assert set_aside() == 1
    generation = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 300]}))
    assert set_aside() == 2


def test_a_template_file_edited_in_place_is_another_evaluation(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    asked = read_recipe(tmp_path / "recipe.yaml", [f"--data.chat_template={file}"])
    prompts = recipe_prompts(asked.eval)
    before = evaluation_identity(asked, asked.head_dir, prompts)
    assert evaluation_identity(asked, asked.head_dir, prompts) == before
    file.write_text("{{ messages[0]['content'] }}")
    after = evaluation_identity(asked, asked.head_dir, prompts)
    assert {key for key in after if after[key] != before[key]} == {"chat_template_sha256"}
