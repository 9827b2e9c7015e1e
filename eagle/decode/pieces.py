"""An answer token by token: the text each one adds, and how it came (drafted, bonus, correction or plain)."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eagle.sample.row import Row
from eagle.sample.stats import DecodeStats, Origin

_UNFINISHED = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_UNSETTLED_SPACE = re.compile(r" [ 'n]*[vr]?\Z")
"""A text's end that transformers' clean-up of spaces (" .", " n't", " ' ", " 've" ...) may still change."""


class Piece(NamedTuple):
    """One new token."""

    text: str
    """What it adds to the text. Empty for special tokens, and for the first bytes of a character, which come with its last;
    what a later token could still change (bytes without their character, a space that may be cleaned up) comes with that."""
    token: int
    origin: Origin


class PieceStream:
    """Iterator over the pieces of one row's answer; `stats` and `tokens` are those of the row so far.

    The texts add up to the tokenizer's `decode` of the answer, without its special tokens.
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
    """Text of a growing list of tokens, special ones left out: what it says adds up to the tokenizer's `decode` of them all.

    Tokens are decoded together with those before them, back to where a text last ended, since what a token says may depend
    on its neighbours (leading spaces, characters of several tokens). Said is what no later token can change (`_settled`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._cleans = bool(tokenizer.clean_up_tokenization_spaces)
        self._window: list[int] = []
        self._fresh = 0
        """Tokens of the window before the current segment, whose text is out: the context."""
        self._said = 0
        """Characters of the window's raw text (spaces not cleaned up) that are out."""
        self._run = 0
        """Byte tokens at the window's end."""

    def add(self, token: int) -> str:
        """The text that can be said now; empty while a character is incomplete."""
        self._window.append(token)
        self._run = self._run + 1 if self._goes_on(token) else 0
        raw = self._decode(self._window)
        settled = self._settled(raw)
        said = self._say(raw, settled)
        segment = self._window[self._fresh :]
        if settled == len(raw) and (context := self._decode(segment)):
            self._window, self._fresh, self._said = segment, len(segment), len(context)
        return said

    def end(self) -> str:
        """What is still held back."""
        raw = self._decode(self._window)
        return self._say(raw, len(raw))

    def _goes_on(self, token: int) -> bool:
        """Whether the token is a byte token, or one without text (a special one) amid them."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        return bool(_BYTE_TOKEN.fullmatch(name)) or (self._run > 0 and not self._decode([token]))

    def _settled(self, raw: str) -> int:
        """Characters that no later token changes.

        A run of byte tokens (<0xF0>) is decoded as a whole: one more byte may turn a character into replacements. Elsewhere
        the replacement character at the end is the only one that stands for bytes of an unfinished character.
        """
        if self._run:
            raw = self._decode(self._window[: -self._run])
        settled = len(raw) - raw.endswith(_UNFINISHED)
        unsettled = _UNSETTLED_SPACE.search(raw, 0, settled) if self._cleans else None
        return settled if unsettled is None else unsettled.start()

    def _say(self, raw: str, upto: int) -> str:
        start, self._said = self._said, max(self._said, upto)
        piece = raw[start : self._said]
        if self._cleans and raw != self._tokenizer.decode(self._window, skip_special_tokens=True):
            return self._tokenizer.clean_up_tokenization(piece)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
