"""A chat template that reads the date, or chance, is no function of the messages: the date is pinned, chance refused."""

import argparse
import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from eagle.cli.decoding import add_decoder_arguments, recipe_of_options
from eagle.config import DataConfig, Recipe, TargetConfig, read_recipe
from eagle.data.features import extract
from eagle.data.prepare import load_prepared, prepare
from eagle.decode_config import Plain
from eagle.errors import EagleError
from eagle.target.loading import load_tokenizer, tokenizer_identity
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.tiny import CHATML, save_tiny_target, tiny_tokenizer, write_conversations

# As Llama 3.2's: the date stands in the system turn, unless the caller has one of his own.
DATED = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n'
    '    {%- else %}\n        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
    "Today Date: {{ date_string }}\n" + CHATML
)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    folder = save_tiny_target(tmp_path / "target")
    tiny_tokenizer(DATED).save_pretrained(folder)
    source = write_conversations(tmp_path / "train.jsonl", 12)
    return Recipe(
        output_dir=str(tmp_path / "out"),
        target=TargetConfig(model=str(folder), device="cpu"),
        data=DataConfig(sources=(str(source),), validation_fraction=0.2),
    )


def on(recipe: Recipe, date: str) -> Recipe:
    return dataclasses.replace(recipe, target=dataclasses.replace(recipe.target, date=date))


def at(monkeypatch: pytest.MonkeyPatch, now: Callable[[], datetime.datetime]) -> None:
    """What transformers takes the time to be."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return now()

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def test_a_template_with_the_date_gives_the_same_ids_on_every_day(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = iter(range(10**4))  # every look at the clock is a day later than the last
    at(monkeypatch, lambda: datetime.datetime(2030, 1, 1) + datetime.timedelta(days=next(days)))
    manifest = prepare(recipe)
    assert manifest["tokenizer"]["date"] == "2024-07-26"
    data, _ = load_prepared(recipe.data_dir)
    tokenizer = load_tokenizer(recipe.target)
    assert len(data) == 12, "midnight inside a conversation rejects none"
    assert all("Today Date: 26 Jul 2024" in tokenizer.decode(ids) for ids in data["input_ids"])
    asked = [{"role": "user", "content": "hello"}]
    loaded = Target.from_config(recipe.target).tokenizer
    assert loaded is not None
    first, second = prompt_ids(tokenizer, asked), prompt_ids(loaded, asked)
    assert first == second


def test_another_date_is_other_data_and_another_prompt(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    before = prepare(recipe)
    extract(recipe)
    later = on(recipe, "2026-11-30")
    after = prepare(later)
    assert before["fingerprint"] != after["fingerprint"]
    assert "another date" in capsys.readouterr().err
    with pytest.raises(EagleError, match=r"tokenizer\.date is '2024-07-26', expected '2026-11-30'"):
        extract(later)
    text = load_tokenizer(later.target).decode(load_prepared(later.data_dir)[0][0]["input_ids"])
    assert "Today Date: 30 Nov 2026" in text


def test_generate_and_chat_take_the_recipes_date(recipe: Recipe, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: {tmp_path}/out\ntarget:\n  model: {recipe.target.model}\n  date: 2026-11-30\n")
    assert read_recipe(path).target.date == "2026-11-30"
    parser = argparse.ArgumentParser()
    add_decoder_arguments(parser)
    for arguments in (["--recipe", str(path)], ["--recipe", str(path), "--target", recipe.target.model]):
        made = recipe_of_options(parser.parse_args([*arguments, "--plain"]), [])
        assert (made.target.date, made.decode.drafter) == ("2026-11-30", Plain())


@pytest.mark.slow
@pytest.mark.parametrize("beginning", ["", "\n", "\n\n  ", "  {% if true %}\n x{% endif %}\n"])
def test_the_pinned_template_renders_what_the_original_does_at_that_midnight(
    recipe: Recipe, beginning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, lambda: datetime.datetime(2023, 3, 5))
    formats = ["%d %b %Y", "%A, %B %d, %Y", "%Y-%m-%d", "%-d/%-m %H:%M:%S", "100%% %j", "%%d %e %D", "it's \\"]
    calls = "|".join("{{ strftime_now(" + repr(text) + ") }}" for text in formats)
    tiny_tokenizer(beginning + calls).save_pretrained(recipe.target.model)
    original = AutoTokenizer.from_pretrained(recipe.target.model)
    pinned = load_tokenizer(on(recipe, "2023-03-05").target)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        for tokenizer in (pinned, original)
    ]
    assert texts[0] == texts[1]


def test_a_template_without_a_date_is_left_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    assert set(tokenizer_identity(tokenizer)) == {"tokenizer_sha256", "chat_template_sha256"}


@pytest.mark.parametrize("call", ["{{ ['a', 'b'] | random }}", "{{ lipsum(1) }}"])
def test_a_template_with_chance_in_it_is_refused(recipe: Recipe, tmp_path: Path, call: str) -> None:
    template = tmp_path / "chance.jinja"
    template.write_text(CHATML + call)
    with pytest.raises(EagleError, match="another text at every call"):
        load_tokenizer(recipe.target, str(template))


def test_a_word_like_a_random_filter_is_not_one(recipe: Recipe, tmp_path: Path) -> None:
    template = tmp_path / "words.jinja"
    template.write_text("lipsum | random {# {{ lipsum() }} #}" + CHATML + "{{ messages[0].random }}")
    load_tokenizer(recipe.target, str(template))


@pytest.mark.parametrize("date", ["today", "2024-13-01", ""])
def test_a_date_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(EagleError, match=r"target\.date is .*expected YYYY-MM-DD"):
        TargetConfig(model="x", date=date)
