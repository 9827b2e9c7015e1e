"""Parameter templates: their values reach the sampler, explicit ones go over them, and only within bounds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from eagle.cli.main import main
from eagle.decode.arguments import resolve
from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.sample.presets import NAMES, PRESETS, bounds_text, within
from eagle.sample.row import Row
from eagle.target.target import Target
from tests.oracles import prompt
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def row(target: Target) -> Callable[..., Row]:
    def of(**arguments: Any) -> Row:
        return resolve(target, prompt(), seed=1, **arguments).rows[0]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_a_template_says_how_a_row_samples(row: Callable[..., Row], name: str) -> None:
    one, found = PRESETS[name], row(preset=name)
    assert found.max_new_tokens == min(one.max_new_tokens.value, 512 - 9)
    assert found.sampler.sampling.temperature == one.temperature.value
    if one.temperature.value:
        assert (found.sampler.sampling.top_k, found.sampler.sampling.top_p) == (one.top_k.value, one.top_p.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_sound(name: str) -> None:
    for key, bound in PRESETS[name].bounds():
        assert bound.low <= bound.value <= bound.high, key
        assert bound.why_low, key
        assert bound.why_high, key
        assert f"{bound.why_low}; above, {bound.why_high}" in bounds_text(key, bound)
    assert {key for key, _ in PRESETS[name].bounds()} == {"temperature", "top_p", "top_k", "max_new_tokens"}


def test_the_command_prints_every_bound_with_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    for name, one in PRESETS.items():
        assert f"{name}: {one.purpose}" in out
        assert all(bounds_text(key, bound) in out for key, bound in one.bounds())


def test_explicit_values_go_over_the_template_and_other_keywords_beside_it(row: Callable[..., Row]) -> None:
    found = row(preset="code", temperature=0.5, top_k=7, max_new_tokens=9, min_p=0.1, repetition_penalty=1.2)
    sampling = found.sampler.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.95, 0.1)
    assert found.max_new_tokens == 9
    assert found.sampler.processors
    warm = row(preset="precise", temperature=0.2).sampler.sampling
    assert (warm.temperature, warm.top_k, warm.top_p) == (0.2, 20, 0.9)
    assert row(preset="code", do_sample=False).sampler.sampling.greedy


def test_temperatures_per_row_are_held_to_the_bounds_one_by_one(target: Target) -> None:
    ids = torch.cat([prompt(), prompt(seed=1)])
    rows = resolve(target, ids, preset="code", temperature=[0.0, 0.4], seed=1).rows
    assert [one.sampler.sampling.temperature for one in rows] == [0.0, 0.4]
    with pytest.raises(EagleError, match=r"temperature is 0\.9"):
        resolve(target, ids, preset="code", temperature=[0.0, 0.9], seed=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "max_new_tokens"])
def test_beyond_a_bound_the_message_names_it_its_reason_and_a_remedy(name: str, key: str) -> None:
    bound = getattr(PRESETS[name], key)
    for value, why in ((bound.low - 0.5, bound.why_low), (bound.high + 1, bound.why_high)):
        with pytest.raises(EagleError) as found:
            within(name, {key: value})
        for words in (f"{key} is", name, f"{bound.low:g} to {bound.high:g}", why, "choose a value in that range"):
            assert words in str(found.value)
    assert within(name, {key: bound.high, "temperature": bound.high if key == "temperature" else None})


def test_what_contradicts_a_template_is_refused(row: Callable[..., Row]) -> None:
    for arguments, words in (
        ({"preset": "creativ"}, "did you mean creative"),
        ({"preset": "balanced", "top_k": None}, r"top_k is 0 \(off\)"),
        ({"preset": "balanced", "do_sample": False}, "take the preset precise"),
        ({"preset": "precise", "do_sample": True}, "decodes greedily unless told a temperature"),
        ({"preset": "precise", "top_p": 0.8}, "no effect on greedy"),
        ({"preset": "code", "do_sample": False, "temperature": 0.5}, "contradict"),
        ({"preset": "code", "temperature": float("nan")}, "temperature is nan"),
        ({"preset": "code", "max_length": 40}, "say max_new_tokens"),
        (
            {"preset": "code", "generation_config": GenerationConfig(temperature=0.3)},
            "generation_config that sets temperature",
        ),
    ):
        with pytest.raises(EagleError, match=words):
            row(**arguments)


def test_generate_and_stream_take_a_template(target: Target) -> None:
    decoder = SpeculativeDecoder(target)
    asked = {"do_sample": True, "temperature": 0.2, "top_p": 0.95, "top_k": 40}
    by_name = decoder.generate(prompt(), preset="code", max_new_tokens=12, seed=5, eos_token_id=[])
    by_hand = decoder.generate(prompt(), max_new_tokens=12, seed=5, eos_token_id=[], **asked)
    assert torch.equal(by_name.sequences, by_hand.sequences)
    with pytest.raises(EagleError, match=r"above 0\.8 slips that break a program"):
        decoder.stream(prompt(), preset="code", temperature=1.0)
