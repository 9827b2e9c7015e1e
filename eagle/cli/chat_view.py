"""What a chat looks like: the answer as it comes, coloured by how each token came, with live figures below it."""

import sys
from collections.abc import Callable, Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from eagle.decode.pieces import Piece
from eagle.sample.stats import DecodeStats, Origin

STYLES: dict[Origin, str] = {"drafted": "green", "bonus": "yellow", "correction": "yellow", "plain": ""}
_LEGEND: tuple[tuple[Origin, str], ...] = (
    ("drafted", "accepted draft"),
    ("bonus", "the target's own: bonus behind the drafts, or correction of one"),
    ("plain", "without drafts"),
)
StatsOf = Callable[[], DecodeStats]
"""Gives the figures of the answer that is running."""
_ESCAPES = str.maketrans({"\x1b": "\u241b", "\r": None, "\x9b": "\u241b"})
"""A model must not steer the terminal: what starts a control sequence is shown as a sign."""


class ChatView:
    """Answers go to standard output, remarks to standard error. Where standard output is no terminal: bare text."""

    def __init__(self, out: Console | None = None, remarks: Console | None = None):
        self.out = out or Console(highlight=False)
        self.remarks = remarks or Console(stderr=True, highlight=False)
        self.live = self.out.is_terminal and not self.out.is_dumb_terminal

    @property
    def coloured(self) -> bool:
        return self.out.is_terminal and not self.out.no_color and self.out.color_system is not None

    def remark(self, text: str, style: str = "dim") -> None:
        """A line on standard error."""
        self.remarks.print(Text(text.translate(_ESCAPES), style=style), soft_wrap=True)

    def say(self, text: str) -> None:
        """What a command was asked to show, on standard output."""
        self.out.print(Text(text.translate(_ESCAPES)), soft_wrap=True)

    def legend(self) -> None:
        """What the colours mean; nothing where there are none."""
        if self.coloured:
            parts = [Text.assemble((name, STYLES[name]), f": {meaning}") for name, meaning in _LEGEND]
            self.remarks.print(Text("  ").join(parts), soft_wrap=True)

    def stream(self, blocks: Iterable[list[Piece]], stats: StatsOf) -> None:
        """Shows an answer as it comes. stats: gives the figures so far. What was shown stays when the answer is interrupted."""
        if self.live:
            self._stream_live(blocks, stats)
            return
        shown = False
        try:
            for block in blocks:
                shown = True
                sys.stdout.write("".join(piece.text for piece in block).translate(_ESCAPES))
                sys.stdout.flush()
        finally:
            if shown:
                print(flush=True)

    def _stream_live(self, blocks: Iterable[list[Piece]], stats: StatsOf) -> None:
        """Lines that are complete are printed for good; the last one and the figures are redrawn below them."""
        line, shown = Text(), False
        live = Live(console=self.out, auto_refresh=False, transient=True)
        try:
            with live:
                for block in blocks:
                    shown = True
                    for piece in block:
                        line.append(piece.text.translate(_ESCAPES), style=STYLES[piece.origin])
                    *complete, line = line.wrap(self.out, self.out.width)
                    for one in complete:
                        self.out.print(one)
                    live.update(Group(line, Text(_figures(stats()), style="dim")), refresh=True)
        finally:
            if shown:
                self.out.print(line)


def _figures(stats: DecodeStats) -> str:
    tau = f"  tau {stats.tau:.2f}" if stats.attempts_per_depth else ""
    return f"{stats.new_tokens} tokens  {stats.tokens_per_second:.1f} tok/s{tau}  Ctrl-C stops"
