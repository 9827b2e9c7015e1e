"""decoder.pieces: the text of every token, and how it came."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.pieces import TextGrowth
from eagle.sample.stats import DecodeStats
from eagle.target.target import Target
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


def _byte_level(merged: list[bytes]) -> PreTrainedTokenizerFast:
    """GPT-2's kind: every byte, and tokens of any bytes, whole characters or not."""
    letters = _byte_letters()
    words = ["</s>", *letters, *("".join(letters[byte] for byte in one) for one in merged if len(one) > 1)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(dict.fromkeys(words))}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def _byte_letters() -> list[str]:
    """ByteLevel's letter of every byte: printable ones are their own, the others follow from U+0100 on."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte if byte in own else next(others)) for byte in range(256)]
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def _byte_fallback(merged: list[bytes]) -> PreTrainedTokenizerFast:
    """Llama-2's kind: words, and bytes as tokens of their own."""
    words = [
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581the",
        "\u2581a",
        "n",
        "\u00e9",
        "\U0001f600",
    ]
    words += [one.decode("utf-8", "ignore") or "x" for one in merged]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(dict.fromkeys(words))}, merges=[]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def _cleaned_up(merged: list[bytes]) -> PreTrainedTokenizerFast:
    """A tokenizer whose decoded text loses spaces before punctuation and contractions."""
    words = [
        "</s>",
        " ",
        "  ",
        ".",
        " .",
        "?",
        ",",
        "'",
        " '",
        "' ",
        "n",
        " n",
        "t",
        "'t",
        "ve",
        "v",
        "e",
        " r",
        "m",
        "s",
        "x",
        " x",
    ]
    words += [one.decode("utf-8", "ignore") or "y" for one in merged]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="</s>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=True)


def _word_pieces(merged: list[bytes]) -> PreTrainedTokenizerFast:
    words = ["</s>", "do", "##n", "'", "t", "n't", ".", "##.", "caf\u00e9", "##\u00e9", "!", "##s"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="</s>"))
    tokenizer.decoder = decoders.WordPiece(cleanup=len(merged) % 2 == 0)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=True)


def _metaspace(merged: list[bytes]) -> PreTrainedTokenizerFast:
    words = [
        "</s>",
        "\u2581",
        "\u2581the",
        "cat",
        "\u2581.",
        "s",
        "\u2581'",
        *(one.decode("utf-8", "ignore") or "y" for one in merged),
    ]
    vocab = [(word, 0.0) for word in dict.fromkeys(words)]
    tokenizer = Tokenizer(models.Unigram(vocab))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=len(merged) % 2 == 0
    )


KINDS = [_byte_level, _byte_fallback, _cleaned_up, _word_pieces, _metaspace]
CHARACTERS = st.sampled_from(["a", " ", "\u00e9", "\u20ac", "\U0001f600", "\ufffd", "'", "."])
BYTES = st.one_of(
    st.binary(min_size=1, max_size=4),
    st.lists(CHARACTERS, min_size=1, max_size=3).map(lambda some: "".join(some).encode()),
    CHARACTERS.flatmap(lambda one: st.integers(1, len(one.encode())).map(lambda n: (one * 2).encode()[n - 1 : n + 3])),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
def test_the_pieces_of_any_tokens_add_up_to_the_decoded_text(
    kind: Callable[[list[bytes]], PreTrainedTokenizerFast],
) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.lists(BYTES, min_size=1, max_size=12), st.data())
    def check(merged: list[bytes], data: st.DataObject) -> None:
        tokenizer = kind(merged)
        last, vocab = len(tokenizer) - 1, tokenizer.get_vocab()
        names = [name for byte in b"\xc3\xa9\xf0\x9f\x98\x80" for name in (_byte_letters()[byte], f"<0x{byte:02X}>")]
        telling = [0, last, *(vocab[name] for name in names if name in vocab)]
        token = st.one_of(st.integers(0, last), st.integers(max(0, last - len(merged)), last), st.sampled_from(telling))
        tokens = data.draw(st.lists(token, max_size=24))
        growth = TextGrowth(tokenizer)
        said = [growth.add(one) for one in tokens]
        assert "".join([*said, growth.end()]) == tokenizer.decode(tokens, skip_special_tokens=True)

    check()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([b"\xc3", b"\xf0", b"\x9f", b"\x98", b"\x80"], "\ufffd\U0001f600"),
        ([b"\xf0\x9f", b"\x98\x80\xc3", b"\xa9"], "\U0001f600\u00e9"),
        ([b"\xe2\x82", b"\xac\xe2", b"\x82\xac\xe2", b"\x82\xac\xe2", b"\x82\xac\xe2", b"\x82\xac"], "\u20ac" * 5),
        ([b"\xf0", b"\x9f", b"\x98", b"\xff", b"\x80", b"a"], "\ufffd\ufffd\ufffda"),
    ],
)
def test_broken_and_shared_characters_stream_as_they_are_decoded(words: list[bytes], text: str) -> None:
    tokenizer, letters = _byte_level(words), _byte_letters()
    ids = [tokenizer.convert_tokens_to_ids("".join(letters[byte] for byte in word)) for word in words]
    growth = TextGrowth(tokenizer)
    said = "".join([growth.add(token) for token in ids]) + growth.end()
    assert said == tokenizer.decode(ids) == text


@pytest.mark.slow
def test_a_whole_answer_streams_as_it_is_decoded_cleaned_up_or_not() -> None:
    """Through the decoder: random tokens of a random model, the answer's end included."""
    for tokenizer in (_byte_level([bytes([0xC3, 0xA9, 0xC3])]), _cleaned_up([b"z"])):
        vocab = max(16, len(tokenizer))
        target = Target(tiny_model(vocab_size=vocab, pad_token_id=0, bos_token_id=0, eos_token_id=0), tokenizer)
        for seed in range(4):
            ask = dict(max_new_tokens=40, eos_token_id=[], do_sample=True, temperature=3.0, top_k=0, seed=seed)
            ids = torch.tensor([[3, 4, 5]])
            decoder = SpeculativeDecoder(target)
            tokens = decoder.generate(ids, **ask).sequences[0, 3:]
            assert "".join(decoder.stream(ids, **ask)) == tokenizer.decode(tokens, skip_special_tokens=True)
