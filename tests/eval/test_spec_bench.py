"""Answer files in Spec-Bench's format, read back by the arithmetic of its evaluation/speed.py."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle.eval.answers import Answer, Request
from eagle.eval.figures import figures
from eagle.eval.suites.prompt import Prompt
from eagle.eval.suites.spec_bench import write_answer_files
from tests.tiny import tiny_tokenizer

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


def speed(path: Path, base: Path, tokenizer: Any, task: str) -> tuple[float, float, float]:
    """Mean accepted tokens, tokens per second, speed-up: as evaluation/speed.py computes them, written from its rules.

    A question's speed is the sum of its turns' new tokens over the sum of their times; a task's is the mean over questions;
    the baseline's tokens are counted from the text, less one (BOS); accepted tokens are the mean over all steps.
    """

    def rows(file: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        wanted = MT_BENCH if task == "mt_bench" else (task,)
        return [row for row in found if task == "overall" or row["category"] in wanted]

    choices = [row["choices"][0] for row in rows(path)]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    base_speeds = [
        sum(len(tokenizer(turn).input_ids) - 1 for turn in choice["turns"]) / sum(choice["wall_time"])
        for choice in (row["choices"][0] for row in rows(base))
    ]
    return float(np.mean(lengths)), float(np.mean(speeds)), float(np.mean(speeds) / np.mean(base_speeds))


def answer(text: str, seconds: float, accepted: list[int]) -> Answer:
    tokens = tiny_tokenizer()(text).input_ids
    return Answer(
        tokens=tokens,
        seconds=seconds,
        first_token_seconds=0.1,
        accepted=accepted,
        attempts_per_depth=[len(accepted)] if any(accepted) else [],
        accepted_per_depth=[sum(count > 0 for count in accepted)] if any(accepted) else [],
        commit_tokens=[1] * (len(tokens) - 1),
        commit_seconds=[0.1] * (len(tokens) - 1),
    )


def prompt(number: int, category: str, turns: int) -> Prompt:
    return Prompt(
        id=f"s/{number}",
        category="task",
        turns=("hello",) * turns,
        reference=(),
        source="s",
        question_id=str(number),
        file_category=category,
    )


PROMPTS = [prompt(81, "writing", 2), prompt(101, "math", 1), prompt(200, "qa", 1)]


def requests() -> list[Request]:
    found = []
    for i, one in enumerate(PROMPTS):
        for turn in range(len(one.turns)):
            said = "hello to the cat and the dog " * (i + turn + 1)
            answers = {
                "hf": answer(said, 4.0 + i, []),
                "plain": answer(said, 3.0 + i, [0] * 5),
                "eagle2": answer(said, 1.5 + i + turn, [2, 0, 3, i]),
            }
            found.append(
                Request(
                    **{"prompt": one.id, "turn": turn, "category": "task", "setting": "T=1 top_p=0.9", "seed": 0},
                    **{"prompt_tokens": 3, "order": list(answers), "answers": answers},
                )
            )
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Turns may have been answered in any order, by several processes.
    written = write_answer_files(tmp_path, requests()[::-1], PROMPTS, tiny_tokenizer(), model="tiny")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in written) == [
        f"T=1_top_p=0.9/{name}.jsonl" for name in ("eagle2", "hf", "plain")
    ]
    return tmp_path / "T=1_top_p=0.9"


def test_spec_benchs_arithmetic_gives_our_raw_tau_and_the_tokens_per_second_that_it_defines(folder: Path) -> None:
    lengths, per_second, ratio = speed(folder / "eagle2.jsonl", folder / "hf.jsonl", tiny_tokenizer(), "overall")
    ours = figures(requests(), "eagle2", baselines=[])
    assert lengths == pytest.approx(ours.tau_raw)
    by_question = [[r for r in requests() if r.prompt == one.id] for one in PROMPTS]
    means = [figures(chosen, "eagle2", baselines=[]).tokens_per_second for chosen in by_question]
    assert per_second == pytest.approx(np.mean(means)), "the mean over questions of our tokens per second"
    assert per_second != pytest.approx(ours.tokens_per_second, rel=1e-3), "ours is pooled: another figure"
    assert ratio > 1


def test_an_earlier_evaluations_other_methods_are_removed_and_its_other_settings_stay(folder: Path) -> None:
    for path in (folder / "tuned.jsonl", folder.parent / "T=0" / "tuned.jsonl", folder / "notes.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("old\n")
    write_answer_files(folder.parent, requests(), PROMPTS, tiny_tokenizer(), model="tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["eagle2.jsonl", "hf.jsonl", "notes.txt", "plain.jsonl"]
    assert (folder.parent / "T=0" / "tuned.jsonl").is_file()


def test_its_tasks_find_their_questions_and_one_question_gives_our_figure(folder: Path) -> None:
    lengths, per_second, _ = speed(folder / "eagle2.jsonl", folder / "plain.jsonl", tiny_tokenizer(), "qa")
    ours = figures([r for r in requests() if r.prompt == "s/200"], "eagle2", baselines=[])
    assert (lengths, per_second) == (pytest.approx(ours.tau_raw), pytest.approx(ours.tokens_per_second))
    plain, _, _ = speed(folder / "plain.jsonl", folder / "plain.jsonl", tiny_tokenizer(), "mt_bench")
    assert plain == 1.0


def test_lines_hold_what_spec_bench_writes_with_turns_in_order(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "eagle2.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [81, 101, 200]
    assert set(lines[0]) == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    (choice,) = lines[0]["choices"]
    assert (lines[0]["category"], choice["index"], choice["wall_time"]) == ("writing", 0, [1.5, 2.5])
    assert choice["decoding_steps"] == [4, 4]
    assert choice["accept_lengths"] == [3, 1, 4, 1, 3, 1, 4, 1]
    assert choice["new_tokens"] == [len(request.answers["eagle2"].tokens) for request in requests()[:2]]
    assert choice["turns"][0] == "hello to the cat and the dog"


def test_hugging_faces_loop_has_a_step_per_token(folder: Path) -> None:
    choice = json.loads((folder / "hf.jsonl").read_text().splitlines()[1])["choices"][0]
    assert choice["accept_lengths"] == [1] * choice["new_tokens"][0]
    assert choice["decoding_steps"] == choice["new_tokens"]
