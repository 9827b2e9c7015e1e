"""`eagle eval --decoding`, `--quality`: what is measured is what the decoders say, and a kill loses no finished answer."""

import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from eagle.cli.main import main
from eagle.config import Recipe, read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, dtype_name, machine_name, write_tuned
from eagle.errors import EagleError
from eagle.eval.quality import decoding, quality
from eagle.eval.quality.decoding import WAYS, compare_decoding
from eagle.eval.quality.decoding_report import notes
from eagle.eval.quality.likelihood import negative_log_likelihood
from eagle.eval.quality.quality import compare_quality, extract, summary
from eagle.eval.quality.quality_report import rules_table
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.recipes import write_recipe

torch.set_num_threads(1)  # it is part of an evaluation's identity, and module fixtures run before conftest sets it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoding")
    recipe = read_recipe(write_recipe(folder))
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(Target.from_config(recipe.target).config, initializer_range=0.2)
    save_head(EagleHead(config), recipe.head_dir)
    rows = [
        {"question_id": 0, "category": "math", "turns": ["what is 1 + 1"], "reference": ["1 + 1 = 2\n#### 2"]},
        {"question_id": 1, "category": "talk", "turns": ["hello to the cat"]},
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    return read_recipe(folder / "recipe.yaml", overrides)


@pytest.fixture(scope="module")
def compared(folder: Path) -> dict[str, object]:
    assert main(["eval", str(folder / "recipe.yaml"), "--decoding"]) == 0
    result: dict[str, object] = json.loads((folder / "run/eval/decoding.json").read_text())
    return result


@pytest.mark.slow
def test_every_way_says_what_the_decoder_says_with_its_keywords(folder: Path, compared: dict[str, object]) -> None:
    target = Target.from_config(recipe_of(folder).target)
    decoder = SpeculativeDecoder(target)
    texts = compared["texts"]
    assert isinstance(texts, list)
    for one in texts:
        ids = torch.tensor([prompt_ids(target.tokenizer, [{"role": "user", "content": one["question"]}])])
        for name, way in WAYS.items():
            answer = one["answers"][name]
            out = decoder.generate(ids, max_new_tokens=12, seed=[answer["seed"]], **way.keywords)
            said = out.sequences[0, ids.shape[1] :][: out.stats[0].new_tokens].tolist()
            assert answer["text"] == target.tokenizer.decode(said, skip_special_tokens=True), name
            assert answer["nll_per_token"] * len(said) == pytest.approx(
                negative_log_likelihood(target, ids[0].tolist(), said), rel=1e-4
            )


def test_memory_is_what_is_held(compared: dict[str, object]) -> None:
    token = 3 * 2 * 2 * 8 * 4 / 2**20
    texts = compared["texts"]
    assert isinstance(texts, list)
    for one in texts:
        greedy, beam, pruned = (one["answers"][name] for name in ("greedy", "beam-4", "beam-4-pruned"))
        assert greedy["kv_mib"] == pytest.approx(token * (greedy["prompt_tokens"] + greedy["tokens"] - 1))
        assert beam["kv_mib"] > 2 * greedy["kv_mib"]
        assert pruned["kv_mib"] <= beam["kv_mib"]
        assert beam["first_token_ms"] == pytest.approx(1e3 * beam["seconds"])
        assert 0 < greedy["first_token_ms"] < 1e3 * greedy["seconds"]


def test_drafting_leaves_the_texts_and_is_timed_beside_them(folder: Path, compared: dict[str, object]) -> None:
    ways = compared["ways"]
    assert isinstance(ways, dict)
    assert {name for name, way in ways.items() if "drafted" in way} == {"greedy", "top-k", "top-p", "min-p"}
    for way in ways.values():
        if "drafted" in way:
            assert way["drafted"]["same_text"] == way["drafted"]["answers"] == 2
            assert way["drafted"]["tau"] >= 1
    page = (folder / "run/eval/decoding.md").read_text()
    assert "- drafted texts equal to the plain ones: greedy 2/2, top-k 2/2, top-p 2/2, min-p 2/2" in page
    assert all(f"| {name} |" in page for name in WAYS)
    assert "**KV**" in page


def test_a_drafted_text_that_is_not_the_plain_one_is_told(compared: dict[str, object]) -> None:
    changed = copy.deepcopy(compared)
    changed["ways"]["top-k"]["drafted"]["same_text"] = 1  # type: ignore[index]
    (line,) = notes(changed)
    assert line.startswith("DIFFERENT: ")
    assert "top-k 1/2" in line
    assert not notes({**changed, "lossless": False})[0].startswith("DIFFERENT")


@pytest.mark.slow
def test_a_killed_comparison_continues(
    folder: Path, compared: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = folder / "run/eval/decoding.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-3]) + lines[-3][:20])
    asked: list[str] = []
    honest = decoding._answer

    def counted(decoders: object, job: str, *rest: object, **named: object) -> object:
        asked.append(job)
        return honest(decoders, job, *rest, **named)

    monkeypatch.setattr(decoding, "_answer", counted)
    again = compare_decoding(recipe_of(folder))
    jobs = len(WAYS) + 4
    assert len(asked) == jobs + 3  # every job's warm-up, and the three answers that were lost
    assert [text["answers"]["greedy"]["text"] for text in again["texts"]] == [
        text["answers"]["greedy"]["text"]
        for text in compared["texts"]  # type: ignore[attr-defined]
    ]


def test_the_likelihood_is_the_sum_over_the_answers_tokens(folder: Path) -> None:
    target = Target.from_config(recipe_of(folder).target)
    prompt, tokens = [5, 6, 7], list(range(10, 90))
    logits_TV = target.model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    expected = -sum(float(logits_TV[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens))
    assert negative_log_likelihood(target, prompt, tokens) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "behind_mark", "last"),
    [
        ("so 3 + 4 = 7\n#### 7", 7, 7),
        ("#### 1,234.50 dollars, not 9", 1234.5, 9),
        ("it is -12 degrees.", None, -12),
        ("#### none, or 5", 5, 5),
        ("first #### 3, then #### 4", 4, 4),
        ("no number", None, None),
    ],
)
def test_numbers_are_extracted_as_the_rules_say(text: str, behind_mark: float | None, last: float | None) -> None:
    assert extract(text, "####") == behind_mark
    assert extract(text, "last number") == last


@pytest.mark.slow
def test_quality_compares_rules_on_the_same_prompts_and_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["--eval.sampling", '["T=0", "T=1"]', "--decode.rule", "top_k", "--decode.rule.k", "40"]
    assert main(["eval", str(folder / "recipe.yaml"), "--quality", *overrides]) == 0
    result = json.loads((folder / "run/eval/quality.json").read_text())
    assert (result["prompts"], result["with_reference"]) == (2, 1)
    assert "lossy: k 40" in result["rules"]["top_k"]
    records = [json.loads(line) for line in (folder / "run/eval/quality.jsonl").read_text().splitlines()[1:]]
    assert len(records) == 2 * 2 * 3
    for record in records:
        same = [
            other["seed"]
            for other in records
            if (other["prompt"], other["setting"]) == (record["prompt"], record["setting"])
        ]
        assert len(set(same)) == 1
        assert (record["right"] is None) == record["prompt"].endswith("/1")
    for body in result["settings"].values():
        top_k = body["top_k"]
        assert top_k["tau"] > body["coupled"]["tau"]  # 40 of 384 tokens are good enough
        assert top_k["nll_difference"]["difference"] == pytest.approx(
            top_k["nll_per_token"] - body["coupled"]["nll_per_token"]
        )
        assert (
            top_k["nll_difference"]["low"] <= top_k["nll_difference"]["difference"] <= top_k["nll_difference"]["high"]
        )
    printed = " ".join(capsys.readouterr().out.split())
    assert "the last number in the text" in printed
    assert re.search(r"T=1: texts equal to coupled's: top_k \d/2, typical \d/2", printed)


@pytest.mark.slow
def test_every_rule_verifies_the_same_trees_though_one_was_tuned(folder: Path, tmp_path: Path) -> None:
    """Tuned trees are the lossless rule's only: its speed would be that of another tree."""
    recipe = recipe_of(
        folder, *(f"--decode.drafter.{key}=null" for key in ("budget", "top_k", "depth")), f"--output_dir={tmp_path}"
    )
    target = Target.from_config(recipe.target)
    shutil.copytree(folder / "run" / "head", tmp_path / "head")
    entry = TunedTrees(
        hardware=machine_name(target.device),
        engine=target.engine,
        dtype=dtype_name(target.dtype),
        choices=(TunedChoice(batch=1, temperature=0.0, tree=TreeSettings(drafter="none")),),
    )
    write_tuned(tmp_path / "head", entry)
    compare_quality(recipe)
    records = [json.loads(line) for line in (recipe.eval_dir / "quality.jsonl").read_text().splitlines()[1:]]
    assert {(record["rule"], record["tree"].partition(":")[0]) for record in records} == {
        (rule, "published") for rule in quality.RULES
    }


@pytest.mark.slow
def test_coupled_texts_are_plain_decodings(folder: Path) -> None:
    recipe = recipe_of(folder)
    target = Target.from_config(recipe.target)
    result = compare_quality(recipe)
    assert result["settings"]["T=0"]["coupled"]["answers"] == 2
    for line in (folder / "run/eval/quality.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        if record["rule"] == "coupled":
            question = {"0": "what is 1 + 1", "1": "hello to the cat"}[record["prompt"][-1]]
            ids = torch.tensor([prompt_ids(target.tokenizer, [{"role": "user", "content": question}])])
            out = SpeculativeDecoder(target).generate(ids, max_new_tokens=12, do_sample=False)
            assert record["text"] == target.tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)


def test_paired_intervals_see_what_separate_ones_would_not() -> None:
    """Prompts differ far more than rules do; every prompt's NLL is a little higher under top_k."""

    def record(prompt: int, rule: str) -> dict[str, object]:
        worse = {"coupled": 0.0, "top_k": 0.3, "typical": 0.3 * (-1) ** prompt}[rule]
        return {
            **{"prompt": str(prompt), "rule": rule, "text": rule, "tokens": 10, "seconds": 1.0, "accepted": [1]},
            "nll": 10.0 * prompt + worse,
            "right": {"####": prompt % 2 == 0 and rule != "top_k", "last number": True},
        }

    found = summary([record(prompt, rule) for prompt in range(20) for rule in quality.RULES], seed=0)
    shift = found["top_k"]["nll_difference"]
    assert shift["difference"] == pytest.approx(0.03)
    assert 0.02 < shift["low"] <= shift["high"] < 0.04
    assert found["typical"]["nll_difference"]["low"] < 0 < found["typical"]["nll_difference"]["high"]
    fewer = found["top_k"]["accuracy_difference_####"]
    assert (fewer["difference"], fewer["pairs"]) == (-0.5, 20)
    assert fewer["high"] < 0
    assert found["top_k"]["accuracy_difference_last number"]["difference"] == 0
    assert math.isclose(found["coupled"]["accuracy_####"], 0.5)


def test_pooled_a_rules_speed_counts_the_lossless_text_for_as_many_tokens() -> None:
    """Lossy texts end elsewhere."""

    def record(prompt: str, rule: str, tokens: int) -> dict[str, object]:
        body = {"prompt": prompt, "rule": rule, "text": rule, "tokens": tokens, "seconds": 10.0, "accepted": [1]}
        return {**body, "nll": 1.0, "right": None}

    records = [record(prompt, rule, 10) for prompt in "ab" for rule in ("coupled", "typical")]
    records += [record("a", "top_k", 20), record("b", "top_k", 10)]
    speed = summary(records, seed=0)["top_k"]["speed_over_lossless"]
    assert speed["pooled"] == pytest.approx((20 + 10) / (10 + 10))
    body = summary(records, seed=0)
    cells = next(row for row in rules_table(body, "").rows if row[0] == "top_k")
    assert not any("[" in cell for cell in cells), "two prompts have no interval"


@pytest.mark.slow
def test_without_what_they_need_they_say_so(folder: Path, tmp_path: Path) -> None:
    elsewhere = f"--output_dir={tmp_path}"
    with pytest.raises(EagleError, match="there is no head at"):
        compare_quality(recipe_of(folder, elsewhere))
    with pytest.raises(EagleError, match="all rules say the same"):
        compare_quality(recipe_of(folder, elsewhere, "--decode.drafter", "none"))
    with pytest.raises(EagleError, match="reads no head"):
        compare_decoding(recipe_of(folder, elsewhere, "--decode.drafter", "ngram"), head="somewhere")
    result = compare_decoding(recipe_of(folder, elsewhere))
    assert result["head"] is None
    assert not any("drafted" in way for way in result["ways"].values())
    assert notes(result)[0].startswith("nothing was drafted")
