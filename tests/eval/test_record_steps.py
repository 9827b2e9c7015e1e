"""Recorded decode steps: the answer that was measured, every token's origin, trees whose accepted path is the answer."""

import re

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.methods import make_methods
from eagle.eval.record_steps import _choose, record_steps, record_trees
from eagle.eval.report.tree_part import MOST_DRAWN, tree_picture, visible
from eagle.eval.results import parse
from eagle.eval.results_parts import VerifyStep
from eagle.eval.settings import parse_setting
from eagle.eval.suites.prompt import Prompt
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model, tiny_tokenizer

torch.set_num_threads(1)
IDS = [5, 17, 40, 33, 60]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(EagleHeadConfig.for_target(target.config))


DECODE = decode_config(budget=40, top_k=8, depth=4)


def guessing_decoder(target: Target, rule: str) -> SpeculativeDecoder:
    """Drafts with the target itself, a little spoilt: some guesses are right, some are not."""
    model = tiny_model()
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.15 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    decode = decode_config(drafter="model", budget=10, top_k=3, depth=3, rule=rule)  # type: ignore[arg-type]
    draft = Target.from_pretrained(model, target.tokenizer)
    return SpeculativeDecoder.from_pretrained(target, decode=decode, draft_model=draft)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["T=0", "T=1 top_p=0.9"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_recorded_answer_is_the_decoders_and_its_steps_add_up(target: Target, label: str, rule: str) -> None:
    decoder = guessing_decoder(target, rule)
    setting = parse_setting(label)
    found = record_steps(
        decoder, IDS, setting=setting, seed=11, max_new_tokens=24, question="q", method="eagle2", shown=100
    )
    with bare_generation_config(target):
        out = decoder.generate(torch.tensor([IDS]), max_new_tokens=24, seed=[11], **setting.arguments())
    assert out.stats is not None
    answer, (stats,) = out.sequences[0, len(IDS) :].tolist(), out.stats
    assert found["accepted"] == stats.accepted
    assert len(set(found["accepted"])) > 1, "else this test shows little"
    assert [token["origin"] for token in found["tokens"]] == stats.origins
    assert len(found["tokens"]) == len(answer)
    assert len(found["steps"]) == found["verify_steps"] == stats.verify_steps
    said = [answer[0]]
    for number, step in enumerate(found["steps"]):
        nodes, emitted = step["nodes"], step["emitted"]
        path = [i for i, node in enumerate(nodes) if node["accepted"]]
        assert nodes[0]["token"] == said[-1], "the root is the last token"
        assert [nodes[i]["parent"] for i in path[1:]] == path[:-1]
        assert emitted["parent"] == path[-1]
        assert emitted["origin"] == ("correction" if path[-1] in {node["parent"] for node in nodes} else "bonus")
        assert all(node["confidence"] <= nodes[node["parent"]]["confidence"] + 1e-6 for node in nodes[1:])
        said += [nodes[i]["token"] for i in path[1:]] + [emitted["token"]]
        assert {token["step"] for token in found["tokens"][len(said) - 1 : len(said)]} <= {number}
    assert said[: len(answer)] == answer
    drafted = sum(len(step["nodes"]) - 1 for step in found["steps"])
    assert sum(one["nodes"] for one in found["calibration"]) == drafted
    accepted = sum(one["nodes"] * one["accepted"] for one in found["calibration"])
    assert accepted == pytest.approx(sum(stats.accepted))


def test_the_shown_steps_are_the_longest_and_one_that_accepted_nothing() -> None:
    assert _choose([2, 1, 4, 3, 1, 2], 3) == [1, 2, 3]
    assert _choose([2, 3], 5) == [0, 1]
    assert _choose([], 5) == []


def test_the_evaluation_records_the_first_prompt_that_fits_and_only_methods_that_draft(
    target: Target, head: EagleHead
) -> None:
    def prompt(name: str, text: str) -> Prompt:
        return Prompt(id=name, category="c", turns=(text,), reference=(), source="s")

    prompts = [prompt("s/1", "hello " * 2000), prompt("s/2", "hello to the cat")]
    settings = [parse_setting(label) for label in ("T=0", "T=1", "T=0.5")]
    methods = make_methods(("hf", "plain", "eagle2"), target, head, decode=DECODE, chain_depth=3)
    found = record_trees(methods, settings, prompts, max_new_tokens=10, seed=0)
    assert [(one["question"], one["setting"], one["method"]) for one in found] == [
        ("hello to the cat", "T=0", "eagle2"),
        ("hello to the cat", "T=1", "eagle2"),
    ]
    assert record_trees({"plain": methods["plain"]}, settings, prompts, max_new_tokens=10, seed=0) == []


def test_a_large_tree_is_drawn_by_its_likeliest_nodes_and_tabled_whole(target: Target, head: EagleHead) -> None:
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=DECODE)
    (step, *_) = record_steps(
        decoder, IDS, setting=parse_setting("T=0"), seed=0, max_new_tokens=12, question="q", method="eagle2"
    )["steps"]
    picture = tree_picture(parse(VerifyStep, step), key="k")
    assert len(step["nodes"]) == 40
    assert picture.drawing.count('class="node') == MOST_DRAWN + 1, "and the emitted token"
    assert f"{40 - MOST_DRAWN} less likely nodes" in picture.definition
    assert len(picture.rows) == 41


def test_the_accepted_path_runs_along_the_top_line_with_marks_of_its_own() -> None:
    def node(text: str, parent: int, depth: int, confidence: float, accepted: bool) -> dict[str, object]:
        return {
            "text": text,
            "token": 0,
            "parent": parent,
            "depth": depth,
            "confidence": confidence,
            "accepted": accepted,
        }

    nodes = [
        node("r", -1, 0, 1.0, True),
        node("x", 0, 1, 0.7, False),
        node("y", 0, 1, 0.2, True),
        node("z", 1, 2, 0.6, False),
    ]
    emitted = {"text": "<b>", "token": 9, "parent": 2, "origin": "bonus"}
    picture = tree_picture(parse(VerifyStep, {"step": 4, "nodes": nodes, "emitted": emitted}), key="k")
    boxes = re.findall(r'class="node (\w+)"><title>(.*?)</title><rect x="(\d+)" y="(\d+)"', picture.drawing)
    top = min(int(y) for *_, y in boxes)
    assert [(kind, text) for kind, text, _, y in sorted(boxes, key=lambda box: int(box[2])) if int(y) == top] == [
        ("root", "r"),
        ("on", "y"),
        ("out", "&lt;b&gt;"),
    ]
    assert "✓ 0.20" in picture.drawing
    assert "✓ 0.70" not in picture.drawing
    assert picture.title == "Verify step 5: 1 of 3 drafts accepted"
    assert "accepted: y; then the bonus <b>" in picture.alt


def test_spaces_and_line_ends_of_tokens_are_visible() -> None:
    assert visible(" a\n") == "·a↵"
    assert visible("") == "∅"
    assert visible("\x00") == "□"
