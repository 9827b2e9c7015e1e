"""Regeneration: each answer depends on its settings and id alone, and an interrupted file is continued, never mixed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle.cli.run import run as run_all
from eagle.config import DataConfig, Recipe, RegenerateConfig, TargetConfig
from eagle.data.continuous import Answering, ContinuousDecoder, Queued, choose_tokens, row_generator
from eagle.data.conversations import Conversation, read_conversations
from eagle.data.regenerate import regenerate
from eagle.errors import EagleError
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.tiny import save_tiny_target, tiny_model, tiny_tokenizer, write_conversations


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


def make_prompts(count: int, temperature: float = 0.0) -> list[Queued]:
    rng = np.random.default_rng(0)
    return [
        Queued(
            key=f"row-{i}",
            input_ids_T=rng.integers(3, 384, size=int(rng.integers(2, 40))).astype(np.int32),
            temperature=temperature,
        )
        for i in range(count)
    ]


def answers(target: Target, prompts: list[Queued], *, batch_size: int, **options: Any) -> dict[str, Answering]:
    settings = {"max_new_tokens": 24, "seed": 7} | options
    decoder = ContinuousDecoder(target, prompts, batch_size=batch_size, **settings)
    found: dict[str, Answering] = {}
    while decoder.busy:
        for row in decoder.step():
            assert row.prompt.key not in found
            found[row.prompt.key] = row
    assert decoder.generated == sum(len(row.tokens) for row in found.values())
    return found


def test_greedy_answers_are_those_of_hugging_face_generate(target: Target) -> None:
    prompts = make_prompts(12)
    found = answers(target, prompts, batch_size=5)
    for prompt in prompts:
        ids_1T = torch.from_numpy(prompt.input_ids_T).long()[None]
        attention_mask = torch.ones_like(ids_1T)
        out = target.model.generate(ids_1T, attention_mask=attention_mask, max_new_tokens=24, do_sample=False)
        expected = out[0, ids_1T.shape[1] :].tolist()
        assert found[prompt.key].tokens == expected
        assert found[prompt.key].finished == (expected[-1] in target.eos_token_ids)


OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.3},
    "suppressed": {"suppress_tokens": list(range(3, 120)), "begin_suppress_tokens": list(range(120, 240))},
    "bad words": {"bad_words_ids": [[token] for token in range(3, 80)] + [[100, 101]]},
    "bias": {"sequence_bias": [[[token], 4.0] for token in range(100, 110)]},
    "forced end": {"forced_eos_token_id": 2, "min_new_tokens": 20},
    "no repeats": {"no_repeat_ngram_size": 2, "exponential_decay_length_penalty": (10, 1.2)},
    "together": {"repetition_penalty": 1.2, "suppress_tokens": [3, 5, 8], "forced_eos_token_id": 2, "top_p": 0.9},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_greedy_answers_follow_the_targets_generation_config_as_hugging_face_does(name: str) -> None:
    model = tiny_model()
    model.generation_config.update(**OWN_SETTINGS[name])
    target, prompts = Target(model), make_prompts(24)
    found = answers(target, prompts, batch_size=5)
    plain = answers(Target(tiny_model()), prompts, batch_size=5)
    equal = 0
    for prompt in prompts:
        ids_1T = torch.from_numpy(prompt.input_ids_T).long()[None]
        out = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=24, do_sample=False)
        equal += found[prompt.key].tokens == out[0, ids_1T.shape[1] :].tolist()
    assert equal == 24
    assert any(found[key].tokens != row.tokens for key, row in plain.items()), "the setting changes the answers"


def test_sampled_answers_keep_to_the_targets_filters_and_processors() -> None:
    model = tiny_model()
    model.generation_config.update(top_k=1, suppress_tokens=[7])
    target, prompts = Target(model), make_prompts(8, temperature=1.0)
    greedy = answers(target, [dataclasses.replace(prompt, temperature=0.0) for prompt in prompts], batch_size=3)
    found = answers(target, prompts, batch_size=3)
    assert {key: row.tokens for key, row in found.items()} == {key: row.tokens for key, row in greedy.items()}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"num_beams": 4}, "num_beams is 4"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"max_time": 2.0}, "max_time"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"typical_p": 0.5}, "typical_p"),
    ],
)
def test_what_regeneration_cannot_follow_is_refused_by_name(asked: dict[str, Any], named: str) -> None:
    model = tiny_model()
    model.generation_config.update(**asked)
    with pytest.raises(EagleError, match=f"follows the generation config.*{named}"):
        answers(Target(model), make_prompts(1), batch_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("options", [{}, {"prefill_tokens": 50}])
def test_an_answer_does_not_depend_on_its_batch_mates(target: Target, temperature: float, options: Any) -> None:
    prompts = make_prompts(40, temperature)
    alone = answers(target, prompts, batch_size=1)
    together = answers(target, prompts, batch_size=8, **options)
    assert len({len(row.tokens) for row in alone.values()}) > 1 or temperature == 0, "rows should end at various steps"
    assert {key: row.tokens for key, row in alone.items()} == {key: row.tokens for key, row in together.items()}


def test_seed_and_row_decide_the_sample(target: Target) -> None:
    same = [dataclasses.replace(prompt, input_ids_T=np.array([5, 6], np.int32)) for prompt in make_prompts(6, 1.0)]
    first, again = answers(target, same, batch_size=4), answers(target, same, batch_size=4)
    other = answers(target, same, batch_size=4, seed=8)
    texts = [tuple(row.tokens) for row in first.values()]
    assert len(set(texts)) == 6, "rows draw different noise"
    assert {key: row.tokens for key, row in again.items()} == {key: row.tokens for key, row in first.items()}
    assert all(other[key].tokens != row.tokens for key, row in first.items())


def test_sampling_follows_the_tempered_distribution() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    draws, temperature = 20_000, 0.7
    prompt = Queued(key="x", input_ids_T=np.zeros(1, np.int32), temperature=temperature)
    row = Answering(prompt=prompt, noise=row_generator(0, "x"))
    counts_V = torch.zeros(5)
    for _ in range(draws // 100):
        for token in choose_tokens(logits_V.expand(100, 5), [row] * 100):
            counts_V[token] += 1
    expected_V = torch.softmax(logits_V / temperature, dim=0) * draws
    chi_square = ((counts_V - expected_V)[:4] ** 2 / expected_V[:4]).sum()
    assert counts_V[4] == 0
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_logits_that_are_not_finite_are_refused() -> None:
    row = Answering(prompt=make_prompts(1)[0], noise=row_generator(0, "x"))
    with pytest.raises(EagleError, match="not finite"):
        choose_tokens(torch.tensor([[0.0, float("nan")]]), [row])


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    settings = RegenerateConfig(
        prompts=(str(write_conversations(tmp_path / "chat.jsonl", 30)),),
        max_new_tokens=16,
        batch_size=4,
        max_prompt_tokens=64,
    )
    target = TargetConfig(model=str(save_tiny_target(tmp_path / "target")), device="cpu")
    return Recipe(output_dir=str(tmp_path / "out"), target=target, data=DataConfig(regenerate=settings))


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    settings = dataclasses.replace(recipe.data.regenerate, **changes)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, regenerate=settings))


def output_of(recipe: Recipe) -> Path:
    return Path(recipe.output_dir) / "regenerated.jsonl"


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_prompt_gets_one_answer_that_prepare_can_read(recipe: Recipe) -> None:
    summary = regenerate(recipe)
    rows = rows_of(output_of(recipe))
    asked = list(read_conversations(recipe.data.regenerate.prompts))
    assert len(rows) == len(asked) == summary["written"] == 30
    for i, conversation in enumerate(asked):
        assert isinstance(conversation, Conversation)
        row = rows[conversation.id]
        assert row["conversations"][0] == conversation.messages[0]
        assert [turn["role"] for turn in row["conversations"]] == ["user", "assistant"]
        assert row["temperature"] == (0.0, 0.7)[i % 2]
        assert row["source"] == "chat"
    again = [item for item in read_conversations(str(output_of(recipe))) if isinstance(item, Conversation)]
    assert {item.id: item.finished for item in again if not item.is_prompt} == {
        key: row["finished"] for key, row in rows.items() if row["conversations"][-1]["content"].strip()
    }


@pytest.mark.slow
def test_an_interrupted_file_is_continued_to_the_same_answers(recipe: Recipe) -> None:
    regenerate(recipe)
    path = output_of(recipe)
    whole = rows_of(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:9]) + lines[9][:-20])  # killed while writing the tenth line
    summary = regenerate(recipe)
    assert summary["written"] == 21
    assert rows_of(path) == whole
    assert path.read_bytes().startswith(b"".join(lines[:9]))
    assert regenerate(recipe)["written"] == 0


def test_answers_that_ended_are_kept_when_the_run_is_interrupted(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, steps = ContinuousDecoder.step, iter(range(30))

    def interrupted(self: ContinuousDecoder) -> list[Answering]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousDecoder, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            regenerate(recipe)
    kept = rows_of(output_of(recipe))
    assert 0 < len(kept) < 30
    regenerate(recipe)
    assert rows_of(output_of(recipe)).items() >= kept.items()


@pytest.mark.slow
def test_the_settings_are_recorded_and_others_refused(recipe: Recipe, tmp_path: Path) -> None:
    regenerate(changed(recipe, limit=4))
    recorded = json.loads((Path(recipe.output_dir) / "regenerated.jsonl.settings.json").read_text())
    assert recorded["target"] == Target.from_config(recipe.target).identity()
    assert recorded["runs"]["engine"] == "compiled", "the fastest that can be had"
    assert recorded["temperatures"] == [0.0, 0.7]
    with pytest.raises(EagleError, match="seed is 0, expected 1; name another"):
        regenerate(changed(recipe, seed=1))
    other = TargetConfig(model=str(save_tiny_target(tmp_path / "other", seed=1)), device="cpu")
    with pytest.raises(EagleError, match=r"target\.weights_sha256"):
        regenerate(dataclasses.replace(recipe, target=other))
    assert regenerate(changed(recipe, batch_size=2))["written"] == 26, (
        "more rows and another batch size are no hindrance"
    )


def test_what_is_gone_on_with_runs_as_it_was_begun(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    class Watched(ContinuousDecoder):
        def __init__(self, target: Target, *arguments: Any, **options: Any):
            ran.append(target.engine)
            super().__init__(target, *arguments, **options)

    monkeypatch.setattr("eagle.data.regenerate.ContinuousDecoder", Watched)
    regenerate(changed(recipe, limit=2))
    settings = Path(recipe.output_dir) / "regenerated.jsonl.settings.json"
    values = json.loads(settings.read_text())
    settings.write_text(json.dumps(values | {"runs": {"engine": "eager"}}))
    regenerate(changed(recipe, limit=4))
    assert ran == ["compiled", "eager"]
    settings.write_text(json.dumps(values))
    monkeypatch.setattr("eagle.data.regenerate.why_not_packed", lambda model: "no oneDNN")
    with pytest.raises(
        EagleError, match=r"begun with engine compiled.*\(no oneDNN\); go on where it was begun, or name another"
    ):
        regenerate(recipe)
    assert len(rows_of(output_of(recipe))) == 4


def test_another_file_in_the_way_is_not_appended_to(recipe: Recipe) -> None:
    output_of(recipe).parent.mkdir(parents=True)
    output_of(recipe).write_text('{"id": "mine"}\n')
    with pytest.raises(EagleError, match="settings are unknown"):
        regenerate(recipe)
    assert output_of(recipe).read_text() == '{"id": "mine"}\n'


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    original = __import__("os").fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        original(descriptor)

    regenerate(changed(recipe, limit=1))  # settings are written
    monkeypatch.setattr("eagle.data.regenerate.WRITE_EVERY", 4)
    monkeypatch.setattr("eagle.data.regenerate.os.fsync", fsync)
    with pytest.raises(EagleError, match=r"No space left.*answers are saved.*same command again"):
        regenerate(recipe)
    assert len(rows_of(output_of(recipe))) == 13
    monkeypatch.undo()
    regenerate(recipe)
    assert len(rows_of(output_of(recipe))) == 30


def test_prompts_that_cannot_be_answered_are_counted(recipe: Recipe, tmp_path: Path, capsys: Any) -> None:
    odd = tmp_path / "odd.jsonl"
    lines = [
        {"id": "long", "prompt": "cat " * 300},
        {"id": "robot", "messages": [{"role": "robot", "content": "hi"}]},
        {"id": "good", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]},
        {"id": "good", "prompt": "the same id, another source"},
    ]
    odd.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(lines[3]) + "\n")
    recipe = changed(recipe, prompts=(str(odd), str(other)))
    regenerate(recipe)
    rows = rows_of(output_of(recipe))
    assert set(rows) == {"good", "other/good"}
    assert [turn["role"] for turn in rows["good"]["conversations"]] == ["system", "user", "assistant"]
    printed = capsys.readouterr().err
    assert "1 more than 64 prompt tokens" in printed
    assert "1 unknown role 'robot'" in printed


def test_a_prompt_gets_several_answers_and_more_of_them_later(recipe: Recipe) -> None:
    """The first answers stay what they were; each has its own noise, and the temperatures take turns."""
    recipe = changed(recipe, limit=6)
    regenerate(recipe)
    once = rows_of(output_of(recipe))
    summary = regenerate(changed(recipe, samples_per_prompt=2))
    assert (summary["rows"], summary["written"]) == (12, 6)
    rows = rows_of(output_of(recipe))
    assert rows.items() >= once.items()
    for key, first in once.items():
        second = rows[f"{key}~1"]
        assert second["conversations"][0] == first["conversations"][0]
        assert {first["temperature"], second["temperature"]} == {0.0, 0.7}
    with pytest.raises(EagleError, match="same greedy answer twice"):
        regenerate(changed(recipe, samples_per_prompt=3))


def test_several_samples_at_one_temperature_differ(recipe: Recipe) -> None:
    recipe = changed(recipe, limit=4, samples_per_prompt=3, temperatures=(1.0,))
    regenerate(recipe)
    rows = rows_of(output_of(recipe))
    assert len(rows) == 12
    assert len({row["conversations"][-1]["content"] for row in rows.values()}) > 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"samples_per_prompt": 0}, "samples_per_prompt"),
        ({"prompts": ()}, "prompts is empty"),
        ({"temperatures": (0.0, -1.0)}, "temperatures"),
        ({"max_new_tokens": 500}, "512 positions"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_prompt_tokens": 2}, "no prompt of .* can be answered: 30 more than 2 prompt tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(recipe: Recipe, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(EagleError, match=named):
        regenerate(changed(recipe, **changes))


@pytest.mark.real
@pytest.mark.slow
def test_the_real_model_answers_as_hugging_face_generate(smollm2: Target) -> None:
    assert smollm2.tokenizer is not None
    questions = ["What is the capital of France?", "Count to ten.", "Why is the sky blue?", "Hi"]
    prompts = []
    for question in questions:
        ids = prompt_ids(smollm2.tokenizer, [{"role": "user", "content": question}])
        prompts.append(Queued(key=question, input_ids_T=np.array(ids, np.int32), temperature=0.0))
    found = answers(smollm2, prompts, batch_size=3, max_new_tokens=16)
    for prompt in prompts:
        ids_1T = torch.from_numpy(prompt.input_ids_T).long()[None]
        attention_mask = torch.ones_like(ids_1T)
        out = smollm2.model.generate(ids_1T, attention_mask=attention_mask, max_new_tokens=16, do_sample=False)
        assert found[prompt.key].tokens == out[0, ids_1T.shape[1] :].tolist()


def test_eagle_run_regenerates_first_where_the_answers_are_a_source(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for module, name in (
        ("data.regenerate", "regenerate"),
        ("data.prepare", "prepare"),
        ("data.features", "extract"),
        ("train.loop", "train"),
        ("eval.harness", "evaluate"),
    ):
        monkeypatch.setattr(f"eagle.{module}.{name}", lambda _, name=name: done.append(name) or {})
    others = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, sources=("other.jsonl",)))
    run_all(others)
    assert done == ["prepare", "extract", "train", "evaluate"]
    done.clear()
    run_all(dataclasses.replace(others, data=dataclasses.replace(others.data, sources=(str(output_of(recipe)),))))
    assert done == ["regenerate", "prepare", "extract", "train", "evaluate"]


@pytest.mark.slow
def test_the_answer_file_records_the_generation_config_it_followed(recipe: Recipe) -> None:
    regenerate(recipe)
    settings = Path(recipe.output_dir) / "regenerated.jsonl.settings.json"
    assert json.loads(settings.read_text())["generation_config"] == []
    path = Path(recipe.target.model) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.3}))
    with pytest.raises(EagleError, match=r"generation_config is \[\], expected \[\['repetition_penalty', 1.3\]\]"):
        regenerate(recipe)
    settings.unlink()
    settings.with_name("regenerated.jsonl").unlink()
    regenerate(recipe)
    assert json.loads(settings.read_text())["generation_config"] == [["repetition_penalty", 1.3]]


def test_prompts_with_a_token_beyond_the_vocabulary_are_passed_over(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(384 - len(tokenizer) + 1)])
    tokenizer.save_pretrained(recipe.target.model)
    beyond = json.dumps({"prompt": tokenizer.convert_ids_to_tokens(384)})
    with open(recipe.data.regenerate.prompts[0], "a", encoding="utf-8") as file:
        file.write(beyond + "\n")
    regenerate(recipe)
    assert "1 with a token beyond the target's vocabulary" in " ".join(capsys.readouterr().err.split())
