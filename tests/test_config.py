"""Recipes: what is read, what is refused, and that refusals name the nearest key."""

from pathlib import Path

import pytest
import yaml

from eagle import config
from eagle.config import Recipe, as_dict, read_recipe, sections_help
from eagle.decode_config import DRAFTERS, RULES, Block, Chain, DecodeConfig, TopK, Tree
from eagle.errors import EagleError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: runs/x\ntarget: {model: some/model}\ntrain: {lr: 1e-4, betas: [0.9, 0.99]}\n")
    return path


def test_values_overrides_and_defaults(recipe: Path) -> None:
    read = read_recipe(recipe, ["--train.batch_size", "7", "--data.sources=[a.jsonl, b.jsonl]"])
    assert (read.train.lr, read.train.betas, read.train.batch_size) == (1e-4, (0.9, 0.99), 7)
    assert read.data.sources == ("a.jsonl", "b.jsonl")
    assert read.data.max_len == 2048
    assert read.head_dir == Path("runs/x/head")


def test_a_resolved_recipe_reads_back_as_itself(recipe: Path, tmp_path: Path) -> None:
    read = read_recipe(recipe, ["--train.trackers", "[wandb]", "--data.regenerate.temperatures", "[0.0, 1.0]"])
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(as_dict(read)))
    assert read_recipe(tmp_path / "resolved.yaml") == read


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert read_recipe(path).target.model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("train: {lrr: 1}", [], "unknown key train.lrr; did you mean train.lr?"),
        ("trian: {lr: 1}", [], "unknown key trian; did you mean train?"),
        ("", ["--train.lrr", "1"], "unknown key train.lrr; did you mean train.lr?"),
        ("", ["--nothing_like_it", "1"], "sections are output_dir, target, data"),
        ("train: {lr: fast}", [], "train.lr"),
        ("train: {epochs: 1.5}", [], "train.epochs"),
        ("data: [a]", [], "data"),
        ("train: {precision: fp8}", [], "train.precision"),
        ("target: {}", [], "target.model"),
        ("", ["--eval.seed=-1"], "eval.seed is -1, expected 0 or more"),
        ("eval: {max_new_tokens: 0}", [], "eval.max_new_tokens is 0, expected 1 or more"),
        ("eval: {warmup_prompts: -1}", [], "eval.warmup_prompts is -1"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    base = "output_dir: x\n" if text.startswith("target") else "output_dir: x\ntarget: {model: m}\n"
    (tmp_path / "recipe.yaml").write_text(base + text + "\n")
    with pytest.raises(EagleError) as caught:
        read_recipe(tmp_path / "recipe.yaml", overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "does not exist"), ("a: [", "not valid YAML"), ("- a", "holds list"), ("", "holds NoneType")],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(EagleError, match=message):
        read_recipe(tmp_path / "recipe.yaml")


def test_the_help_of_all_sections_tells_every_key() -> None:
    told = sections_help()
    kinds = [
        {"decode.drafter": drafter, "decode.rule": rule} for drafter in DRAFTERS.values() for rule in RULES.values()
    ]
    keys = {key for each in kinds for key in config._flat_fields(Recipe, each)}
    assert {"decode.drafter.tree_file", "decode.rule.k", "train.lr"} < keys
    assert [key for key in sorted(keys) if f"--{key}" not in told] == []


READ = {"output_dir": "out", "target": {"model": "m"}}


def decode_of(*overrides: str, **decode: object) -> DecodeConfig:
    return config.recipe_of({**READ, "decode": decode}, overrides).decode


@pytest.mark.slow
def test_a_drafter_is_a_name_or_a_section_and_an_override_of_its_kind_drops_the_others_options() -> None:
    assert decode_of(drafter="chain", rule="block") == DecodeConfig(drafter=Chain(), rule=Block())
    sizes = {"budget": 8, "top_k": 3}
    assert decode_of(drafter=sizes).drafter == Tree(budget=8, top_k=3)
    assert decode_of("--decode.drafter.depth=2", drafter={**sizes, "kind": "eagle2"}).drafter == Tree(**sizes, depth=2)
    for said in (("--decode.drafter", "chain"), ("--decode.drafter.kind=chain",)):
        assert decode_of(*said, "--decode.drafter.depth", "5", drafter=sizes).drafter == Chain(depth=5)
    assert decode_of("--decode.drafter=eagle2", drafter=sizes).drafter == Tree(**sizes)
    assert decode_of(rule={"kind": "top_k", "k": 5}).rule == TopK(k=5)
    whole = config.recipe_of({**READ, "decode": {"drafter": sizes, "rule": "typical"}})
    assert config.recipe_of(config.as_dict(whole)) == whole


@pytest.mark.parametrize(
    ("decode", "overrides", "message"),
    [
        ({"drafter": "eagel2"}, (), "decode.drafter is 'eagel2', expected one of .* did you mean eagle2"),
        ({"drafter": {"budgt": 8}}, (), "unknown key decode.drafter.budgt; did you mean decode.drafter.budget"),
        ({"budget": 8}, (), "unknown key decode.budget; did you mean decode.drafter.budget"),
        (
            {"drafter": {"tree_file": "x.json"}},
            (),
            "decode.drafter.tree_file is read by static, and decode.drafter is eagle2",
        ),
        ({"drafter": {"kind": "static", "longest": 3}}, (), "longest is read by ngram, and decode.drafter is static"),
        ({"drafter": {"kind": "chain", "model": "x"}}, (), "model is read by model, and decode.drafter is chain"),
        ({"rule": "typical"}, ("--decode.rule.k", "3"), "decode.rule.k is read by top_k, and decode.rule is typical"),
        (
            {"drafter": ["chain"]},
            (),
            "expected one of eagle2, static, chain, model, ngram, none, or a section with kind",
        ),
        ({"drafter": {"budget": "few"}}, (), "decode.drafter.budget is few, expected int or null"),
        ({"drafter": {"budget": 0}}, (), "decode.drafter.budget is 0, expected 1 or more"),
        ({"rule": "block"}, (), 'the rule "block" got a tree with siblings, expected a chain'),
        ({"drafter": "static", "rule": "block"}, (), 'cannot choose children "sampled"'),
        ({"drafter": "ngram", "rule": "block"}, (), 'cannot choose children "sampled", only top'),
        (
            {"rule": "rejection", "children": "coupled"},
            (),
            'the rule "rejection" got a tree whose children are "coupled"',
        ),
    ],
)
def test_what_a_drafter_or_rule_cannot_do_is_refused_as_the_recipe_is_read(
    decode: dict[str, object], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(EagleError, match=message):
        decode_of(*overrides, **decode)
