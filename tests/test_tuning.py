"""Tuned trees lie beside the head, hold for one machine, and are taken where a recipe leaves the tree open."""

import json
from pathlib import Path

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft import tuning
from eagle.draft.timed_trees import best_tree
from eagle.draft.tuned import TunedDrafter
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, machine_name, read_tuned, write_tuned
from eagle.errors import EagleError
from eagle.formats.checkpoint import load_head, save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model

torch.set_num_threads(1)
SMALL, WIDE, NONE = (
    TreeSettings(budget=4, top_k=2, depth=2),
    TreeSettings(budget=9, top_k=3, depth=3),
    TreeSettings(drafter="none"),
)
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(tiny_model())


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_head(EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)), tmp_path / "head")
    return tmp_path / "head"


def tuned(*choices: TunedChoice, engine: str = "compiled", machine: str | None = None) -> TunedTrees:
    return TunedTrees(
        hardware=machine_name(torch.device("cpu")) if machine is None else machine,
        engine=engine,  # type: ignore[arg-type]
        dtype="float32",
        choices=choices,
        measured={"prompts": 4},
    )


def choice(tree: TreeSettings, *, batch: int = 1, temperature: float = 0.0) -> TunedChoice:
    return TunedChoice(batch=batch, temperature=temperature, tree=tree)


def test_an_entry_reads_back_and_replaces_only_its_own_machines(folder: Path) -> None:
    here, there = tuned(choice(SMALL)), tuned(choice(WIDE), machine="another")
    for entry in (here, there):
        assert write_tuned(folder, entry) == folder / "tuned.json"
    assert read_tuned(folder) == [here, there]
    again = tuned(choice(WIDE), choice(SMALL, batch=8))
    write_tuned(folder, again)
    assert sorted(read_tuned(folder), key=lambda one: one.hardware == "another") == [again, there]
    assert read_tuned(folder.parent) == []


@pytest.mark.parametrize("text", ["{", '{"format": 9}', '{"format": 1, "machines": [{}]}', "[]", '{"format": 1}'])
def test_a_broken_file_is_named_with_its_remedy(folder: Path, target: Target, text: str) -> None:
    (folder / "tuned.json").write_text(text)
    with pytest.raises(EagleError, match=r"tuned\.json is not what `eagle tune` writes .* delete it"):
        SpeculativeDecoder.from_pretrained(target, folder)


@pytest.mark.parametrize(
    ("key", "value"), [("drafter", "eagle9"), ("budget", 0), ("depth", 0), ("top_k", 0), ("level_cost", 2.0)]
)
def test_a_tree_that_cannot_be_is_refused(folder: Path, target: Target, key: str, value: object) -> None:
    write_tuned(folder, tuned(choice(SMALL)))
    values = json.loads((folder / "tuned.json").read_text())
    values["machines"][0]["choices"][0]["tree"][key] = value
    (folder / "tuned.json").write_text(json.dumps(values))
    with pytest.raises(EagleError, match=r"tuned\.json"):
        SpeculativeDecoder.from_pretrained(target, folder)


def test_the_nearest_temperature_and_then_the_nearest_batch_is_taken() -> None:
    entry = tuned(choice(SMALL), choice(WIDE, batch=8), choice(NONE, temperature=1.0))
    assert entry.at(batch=1, temperature=0.0) == SMALL
    assert entry.at(batch=2, temperature=0.0) == SMALL
    assert entry.at(batch=4, temperature=0.0) == WIDE
    assert entry.at(batch=64, temperature=0.2) == WIDE
    assert entry.at(batch=8, temperature=0.9) == NONE


@pytest.mark.slow
def test_a_tree_left_open_is_the_tuned_one_of_this_machine_engine_and_dtype(
    folder: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(**decode: object) -> tuple[str, float]:
        decoder = SpeculativeDecoder.from_pretrained(target, folder, decode=decode_config(**decode))  # type: ignore[arg-type]
        stats = decoder.generate(IDS, max_new_tokens=6, do_sample=False).stats[0]
        return stats.tree, stats.nodes / stats.verify_steps

    whole = "60 nodes, top-k 10, 6 levels"
    timed = source()[0]
    assert timed.startswith("timed: "), "a CPU where nothing was tuned takes what it timed"
    write_tuned(folder, tuned(choice(SMALL)))
    assert source() == ("tuned: 4 nodes, top-k 2, 2 levels", 4.0)
    assert source(budget=5) == ("given: 5 nodes, top-k 10, 6 levels", 5.0)
    assert source(depth=1)[0] == "given: 60 nodes, top-k 10, 1 level"
    assert source(level_cost=0.0)[0] == f"published: {whole}"
    assert source(drafter="chain")[0] == "published: chain of 6"
    assert source(drafter="static")[0] == "published: EAGLE-1's static tree"
    assert source(rule="rejection")[0] == f"published: sampled {whole}"
    assert source(children="top")[0] == f"published: {whole}"
    decoder = SpeculativeDecoder.from_pretrained(target, load_head(folder), decode=decode_config())
    assert isinstance(decoder.drafter, TunedDrafter), "a loaded head knows where it was read"
    monkeypatch.setattr(tuning, "machine_name", lambda device: "another machine")
    assert source()[0] == timed


def test_a_processors_name_alone_is_no_machine() -> None:
    assert torch.backends.cpu.get_cpu_capability() in machine_name(torch.device("cpu"))


def test_what_was_tuned_for_another_engine_is_not_taken(folder: Path, target: Target) -> None:
    write_tuned(folder, tuned(choice(SMALL), engine="eager"))
    drafter = SpeculativeDecoder.from_pretrained(target, folder).drafter
    assert isinstance(drafter, TunedDrafter)
    assert drafter.tuned.source == "timed"


@pytest.mark.slow
@pytest.mark.parametrize("tree", [SMALL, WIDE, TreeSettings(drafter="static"), NONE], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_every_tuned_tree_says_what_plain_decoding_says_in_ragged_batches_too(
    folder: Path, target: Target, tree: TreeSettings, sampled: bool
) -> None:
    write_tuned(folder, tuned(choice(tree)))
    decoder = SpeculativeDecoder.from_pretrained(target, folder)
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10], [0, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])
    asked = dict(max_new_tokens=12, seed=[1, 2, 3]) | ({"do_sample": True} if sampled else {"do_sample": False})
    # Rows end at different times: a stop token that some of them say early.
    eos = int(decoder.plain().generate(ids, mask, **asked).sequences[1, 4 + 5])
    out = decoder.generate(ids, mask, eos_token_id=eos, **asked)
    assert out.sequences.tolist() == decoder.plain().generate(ids, mask, eos_token_id=eos, **asked).sequences.tolist()
    assert {row.tree for row in out.stats} == {f"tuned: {tree}"}
    assert len({row.new_tokens for row in out.stats}) > 1
    if tree == NONE:
        assert all(row.nodes == row.verify_steps for row in out.stats)
        assert out.stats[0].tree == "tuned: no drafting"


def test_one_decoder_changes_its_tree_with_the_batch_and_the_temperature(folder: Path, target: Target) -> None:
    write_tuned(folder, tuned(choice(WIDE), choice(NONE, batch=4), choice(SMALL, temperature=1.0)))
    decoder = SpeculativeDecoder.from_pretrained(target, folder)
    plain = decoder.plain()
    trees = []
    for rows, asked in (
        (1, {"do_sample": False}),
        (4, {"do_sample": False}),
        (1, {"do_sample": True}),
        (1, {"do_sample": False}),
    ):
        ids = IDS.expand(rows, -1)
        out = decoder.generate(ids, max_new_tokens=8, seed=list(range(rows)), **asked)
        assert (
            out.sequences.tolist()
            == plain.generate(ids, max_new_tokens=8, seed=list(range(rows)), **asked).sequences.tolist()
        )
        trees.append(out.stats[0].tree.removeprefix("tuned: "))
    assert trees == [str(WIDE), str(NONE), str(SMALL), str(WIDE)]


def test_a_timed_tree_grows_while_nodes_cost_little_and_none_is_taken_where_drafting_costs_more() -> None:
    free, dear = [1.0] * 7, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    assert best_tree(free, 0.0, batch=1).budget >= 16, (
        "until further nodes are expected to add less than timings are sure of"
    )
    assert best_tree(dear, 0.1, batch=1) == NONE
    assert best_tree(free, 10.0, batch=1) == NONE
    barely = [1.0, 1.0, 1.3, 1.56, 2.0, 3.0, 5.0]
    assert best_tree(barely, 0.0, batch=1).budget == 2, "the smallest of those that are forecast nearly alike"
    modest = best_tree([1.0, 1.05, 1.1, 1.4, 2.0, 3.5, 7.0], 0.05, batch=1)
    assert 3 <= modest.budget <= 8
    assert best_tree([1.0, 1.05, 1.1, 1.4, 2.0, 3.5, 7.0], 0.05, batch=4).budget < modest.budget


def test_published_fills_in_what_is_left_open() -> None:
    filled = decode_config(top_k=3, engine="eager").as_published()
    assert filled == decode_config(budget=60, top_k=3, level_cost=0.0, engine="eager")
    assert decode_config("chain").as_published() == decode_config("chain")
