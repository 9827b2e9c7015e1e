"""Methods take what the recipe says of them: plain decoding its kernels and engine, prompt lookup its own tree."""

from pathlib import Path

import pytest
import torch

from eagle.config import read_recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.eval import harness
from eagle.eval.methods import Method, make_methods
from eagle.eval.settings import parse_setting
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.eval.test_harness import random_head
from tests.recipes import write_recipe
from tests.tiny import tiny_model

torch.set_num_threads(1)
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def tree_of(method: Method) -> str:
    return method(IDS, 4, parse_setting("T=0"), 0).tree


def test_plain_decoding_runs_with_the_recipes_kernels() -> None:
    target = Target.from_pretrained(tiny_model())
    for kernels in ("auto", "reference"):
        decode = decode_config(kernels=kernels)  # type: ignore[arg-type]
        decoder = make_methods(("plain",), target, None, decode=decode, chain_depth=2)["plain"].decoder
        assert decoder is not None
        assert decoder.kernels == kernels


@pytest.mark.slow
def test_without_a_drafter_the_engine_is_the_recipes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(write_recipe(tmp_path), ["--eval.methods=[hf,plain]", "--decode.engine=compiled"])
    save_head(random_head(Target.from_config(recipe.target)), recipe.head_dir)
    engines: list[str] = []

    def noted(names: tuple[str, ...], target: Target, *rest: object, **named: object) -> dict[str, Method]:
        methods = make_methods(names, target, *rest, **named)  # type: ignore[arg-type]
        engines.append(target.engine)
        return methods

    monkeypatch.setattr(harness, "make_methods", noted)
    result = harness.evaluate(recipe)
    assert engines == ["compiled"]
    assert result["settings"]["T=0"]["errors"] == []


def test_prompt_lookup_drafts_its_own_length_unless_it_is_the_recipes_drafter() -> None:
    target = Target.from_pretrained(tiny_model())
    head = EagleHead(EagleHeadConfig.for_target(target.config))
    sizes = decode_config(budget=3, top_k=1, depth=2)
    methods = make_methods(("plain", "eagle2", "ngram"), target, head, decode=sizes, chain_depth=2)
    assert {name: tree_of(method) for name, method in methods.items()} == {
        "plain": "",
        "eagle2": "given: chain of 2",
        "ngram": "prompt lookup: up to 6 tokens",
    }
    for given, said in (
        (decode_config(drafter="ngram", budget=3, depth=5), "up to 2 tokens"),
        (decode_config(drafter="ngram", depth=1), "up to 1 token"),
        (
            decode_config(drafter="ngram", depth=3, budget=9, continuations=2),
            "2 continuations of up to 3 tokens, 9 nodes at most",
        ),
    ):
        method = make_methods(("plain", "ngram"), target, None, decode=given, chain_depth=2)["ngram"]
        assert tree_of(method) == f"prompt lookup: {said}"


def test_default_is_what_a_decoder_takes_that_is_told_nothing_of_its_tree() -> None:
    target = Target.from_pretrained(tiny_model()).on_engine("compiled")
    head = EagleHead(EagleHeadConfig.for_target(target.config))
    told = decode_config(budget=3, top_k=1, depth=2)
    methods = make_methods(("plain", "eagle2", "default"), target, head, decode=told, chain_depth=2)
    nothing = SpeculativeDecoder.from_pretrained(target, head)
    expected = nothing.generate(IDS, max_new_tokens=4, do_sample=False).stats[0].tree
    assert (tree_of(methods["eagle2"]), tree_of(methods["default"])) == ("given: chain of 2", expected)
    assert expected.startswith("timed: ")
