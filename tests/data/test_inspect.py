"""Inspection: the mask preview shows the text as it is, and the figures are counted right."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import datasets
import pytest
from rich.console import Console

from eagle.cli.main import main
from eagle.config import DataConfig, FeaturesConfig, Recipe, TargetConfig, as_dict
from eagle.data.inspect import CONTEXT, SUPERVISED, inspect, mask_preview, measured_rate
from eagle.data.prepare import load_prepared, prepare
from eagle.errors import EagleError
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    rows = [("What is it?", "a cat"), ("what is  it", "a dog"), ("What is it?", "a cat"), ("Who?", "[red]me[/red]")]
    lines = [
        json.dumps({"id": str(i), "source": f"s{i % 2}", "prompt": q, "response": a}) for i, (q, a) in enumerate(rows)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return Recipe(
        output_dir=str(tmp_path / "out"),
        target=TargetConfig(model=str(save_tiny_target(tmp_path / "target")), device="cpu"),
        data=DataConfig(sources=(str(tmp_path / "rows.jsonl"),), validation_fraction=0.0),
        features=FeaturesConfig(dtype="bfloat16", aux_layers=(1, 2)),
    )


def inspected(recipe: Recipe, **options: float) -> tuple[dict[str, object], str]:
    output = io.StringIO()
    figures = inspect(recipe, samples=4, console=Console(file=output, width=120, highlight=False), **options)
    return figures, output.getvalue()


def test_preview_highlights_exactly_the_supervised_tokens_and_obeys_no_markup() -> None:
    tokenizer = tiny_tokenizer()
    parts = [("user [bold]a[/bold] \x1b[31m", False), ("the [/] cat<|im_end|>", True), ("\nü\n", False)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    mask = [flag for (_, flag), piece in zip(parts, ids, strict=True) for _ in piece]
    preview = mask_preview([i for piece in ids for i in piece], mask, tokenizer)
    styled = [(preview.plain[span.start : span.end], span.style) for span in preview.spans]
    assert styled == [
        ("user [bold]a[/bold] ␛[31m", CONTEXT),
        ("the [/] cat<|im_end|>", SUPERVISED),
        ("\nü\n", CONTEXT),
    ]
    output = io.StringIO()
    Console(file=output, force_terminal=True, color_system="standard").print(preview)
    assert "\x1b[31m" not in output.getvalue()


def test_figures_count_duplicates_sources_and_the_store(recipe: Recipe) -> None:
    counts = prepare(recipe)["counts"]
    figures, printed = inspected(recipe, tokens_per_second=10.0)
    assert figures["samples"] == 4
    assert figures["tokens"] == counts["tokens"]
    assert figures["supervised_tokens"] == counts["supervised_tokens"]
    assert figures["exact_duplicates"] == 1
    assert figures["same_prompts"] == 2
    assert figures["prompts_in_both_splits"] == 0
    assert figures["store_bytes"] == counts["tokens"] * (32 * 3 * 2 + 5)
    assert figures["extraction_seconds"] == counts["tokens"] / 10
    by_source = figures["tokens_by_source"]
    assert isinstance(by_source, dict)
    assert by_source.keys() == {"s0", "s1"}
    assert sum(by_source.values()) == counts["tokens"]
    assert "[red]me[/red]<|im_end|>" in printed
    assert "quantiles: 0% " in printed


def test_time_is_not_made_up_without_a_rate(recipe: Recipe) -> None:
    prepare(recipe)
    figures, printed = inspected(recipe)
    assert figures["extraction_seconds"] is None
    assert "not measured: add --measure" in printed


def test_time_is_estimated_from_a_measurement_when_asked(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(recipe)
    assert measured_rate(recipe) > 0
    path = Path(recipe.output_dir) / "recipe.yaml"
    path.write_text(json.dumps(as_dict(recipe)))
    assert main(["data", "inspect", "--measure", str(path), "--data.seed", "0"]) == 0
    printed = capsys.readouterr().out
    assert "not measured" not in printed
    assert "(h:mm:ss)" in printed


def test_prompts_are_never_shared_by_train_and_validation_and_would_be_counted(recipe: Recipe) -> None:
    for seed in range(20):
        split = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, validation_fraction=0.5, seed=seed))
        try:
            counts = prepare(split)["counts"]
        except EagleError:
            continue
        if counts["split_samples"].get("validation"):
            assert inspected(split)[0]["prompts_in_both_splits"] == 0
            break
    data, _ = load_prepared(recipe.data_dir)
    rows = data.to_dict() | {"split": ["train", "validation", "train", "train"]}  # as splits by id could be
    shutil.rmtree(recipe.data_dir / "dataset")
    datasets.Dataset.from_dict(rows, features=data.features).save_to_disk(str(recipe.data_dir / "dataset"))
    assert inspected(split)[0]["prompts_in_both_splits"] == 1


def test_unprepared_or_stale_data_is_refused_with_the_command(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="eagle data prepare"):
        inspect(recipe)
    prepare(recipe)
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages }}")
    stale = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, chat_template=str(template)))
    with pytest.raises(EagleError, match=r"another tokenizer or chat template.*eagle data prepare"):
        inspect(stale)
