"""An answer token by token: the text each one adds, and how it came (drafted, bonus, correction or plain)."""

from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle.rows import Row
from eagle.stats import DecodeStats, Origin

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character: so many tokens at most wait for the rest of theirs."""


class Piece(NamedTuple):
    """One new token."""

    text: str
    """What it adds to the text. Empty for special tokens, and for the first bytes of a character, which come with its last."""
    token: int
    origin: Origin


class PieceStream:
    """Iterator over the pieces of one row's answer; `stats` and `tokens` are those of the row so far.

    The texts add up to the decoded answer without its special tokens.
    """

    def __init__(self, blocks: Iterator[list[list[int]]], row: Row, tokenizer: PreTrainedTokenizerBase):
        self._blocks, self._row = blocks, row
        self._text = TextGrowth(tokenizer)
        self._pieces = self._run()

    @property
    def stats(self) -> DecodeStats:
        return self._row.stats

    @property
    def tokens(self) -> list[int]:
        """New token ids so far."""
        return self._row.new_tokens

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def blocks(self) -> Iterator[list[Piece]]:
        """The same, cycle by cycle: what one verify step brought."""
        for (block,) in self._blocks:
            origins = self.stats.origins[-len(block) :] if block else []
            pieces = [Piece(self._text.add(token), token, origin) for token, origin in zip(block, origins, strict=True)]
            if self._row.finished and pieces:
                pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + self._text.end())
            yield pieces

    def _run(self) -> Iterator[Piece]:
        for pieces in self.blocks():
            yield from pieces


class TextGrowth:
    """Text of a growing list of tokens, special ones left out.

    Tokens are decoded together with those before them, back to where a text last ended, since what a token says may depend
    on its neighbours (leading spaces, characters of several tokens).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._said = 0
        """Tokens of the window whose text is out."""

    def add(self, token: int) -> str:
        """The text that the token adds; empty while a character is incomplete."""
        self._window.append(token)
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self._window) - self._said < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def end(self) -> str:
        """What is still held back."""
        return self._take(self._new_text())

    def _take(self, text: str) -> str:
        if text:
            self._window, self._said = self._window[self._said :], len(self._window) - self._said
        return text

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._said])
        return self._decode(self._window)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
