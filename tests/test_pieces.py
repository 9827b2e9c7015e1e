"""decoder.pieces: the text of every token, and how it came."""

import pytest

from eagle.decode import SpeculativeDecoder
from eagle.pieces import TextGrowth
from eagle.stats import DecodeStats
from eagle.target import Target
from tests.oracles import BatchOracle, Chain, prompt
from tests.tiny import tiny_model, tiny_tokenizer

NEW = 30


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(), tiny_tokenizer())


@pytest.fixture(scope="module")
def truth(target: Target) -> list[int]:
    return SpeculativeDecoder(target).generate(prompt(), max_new_tokens=NEW + 9, eos_token_id=[]).sequences[0].tolist()


def test_an_accepted_chain_is_drafted_but_for_the_bonus_behind_each_block(target: Target, truth: list[int]) -> None:
    class Fives(Chain):
        def _random(self, low: int, high: int) -> int:
            return 5

    decoder = SpeculativeDecoder(target, Fives([truth], nodes=8))
    stream = decoder.pieces(prompt(), max_new_tokens=12, eos_token_id=[])
    blocks = [[(piece.token, piece.origin) for piece in block] for block in stream.blocks()]
    assert [token for block in blocks for token, _ in block] == truth[9:21] == stream.tokens
    assert [[origin for _, origin in block] for block in blocks] == [
        ["plain"],
        [*["drafted"] * 7, "bonus"],
        ["drafted"] * 3,  # cut by the length limit
    ]
    assert stream.stats.origins == [origin for block in blocks for _, origin in block]


def test_a_token_is_drafted_exactly_when_its_tree_held_it_on_the_accepted_path(
    target: Target, truth: list[int]
) -> None:

    class Watching(BatchOracle):
        def propose(self):  # type: ignore[no-untyped-def]
            tree = super().propose()
            self.trees.append((len(self.rows[0].tokens), tree))
            return tree

    lies = [3 if position % 4 == 2 and position > 9 else token for position, token in enumerate(truth)]
    drafter = Watching([lies], nodes=9, seed=3)
    drafter.trees = []
    pieces = list(SpeculativeDecoder(target, drafter).pieces(prompt(), max_new_tokens=NEW, eos_token_id=[]))
    origins = {9 + index: piece.origin for index, piece in enumerate(pieces)}
    assert {"drafted", "correction", "plain", "bonus"} == set(origins.values())
    for position, tree in drafter.trees:
        node, children = 0, tree.children_of(0)
        while position in origins:
            following = [child for child in children[node] if int(tree.tokens_BN[0, child]) == truth[position]]
            if not following:
                last = "correction" if children[node] else "bonus" if node else "plain"
                assert origins[position] == last
                break
            assert origins[position] == "drafted"
            node, position = following[0], position + 1


def test_without_a_drafter_every_token_is_plain(target: Target) -> None:
    pieces = list(SpeculativeDecoder(target).pieces(prompt(), max_new_tokens=5, eos_token_id=[]))
    assert [piece.origin for piece in pieces] == ["plain"] * 5


def test_trimmed_tokens_have_no_origin() -> None:
    stats = DecodeStats()
    stats.count_step(path_length=4, at_leaf=True)
    stats.new_tokens = 3
    assert stats.origins == ["plain", "drafted", "drafted"]


def test_characters_of_several_tokens_come_whole_with_their_last_token() -> None:
    tokenizer = tiny_tokenizer()
    text = "caf\u00e9 \u20ac \U0001f600 the cat"
    ids = tokenizer(text)["input_ids"]
    growth = TextGrowth(tokenizer)
    said = [growth.add(token) for token in ids]
    assert "".join(said) + growth.end() == text
    assert "\ufffd" not in "".join(said)
    assert "\U0001f600" in said


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    tokenizer = tiny_tokenizer()
    broken = tokenizer("\u20ac")["input_ids"][:1] * 9
    growth = TextGrowth(tokenizer)
    said = [growth.add(token) for token in broken]
    assert any(said)
    assert "".join(said) + growth.end()
    half = TextGrowth(tokenizer)
    assert half.add(broken[0]) == ""
    assert half.end() == "\ufffd"


def test_bytes_in_use_by_keys_and_values(target: Target) -> None:
    out = SpeculativeDecoder(target).generate(prompt(), max_new_tokens=4, eos_token_id=[])
    assert out.stats is not None
    assert out.stats[0].kv_bytes_per_token == 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
    beams = SpeculativeDecoder(target).generate(prompt(), max_new_tokens=4, num_beams=3, eos_token_id=[]).stats
    assert beams is not None
    assert beams[0].kv_bytes_per_token == out.stats[0].kv_bytes_per_token
    assert beams[0].beams is not None
    assert beams[0].beams.kv_tokens == 3 * (9 + 4 - 1)
