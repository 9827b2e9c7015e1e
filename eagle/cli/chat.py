"""`eagle chat`: a conversation on the terminal, every token coloured by how it came."""

import argparse
import difflib
import functools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from eagle.cli.decoding import add_decoder_arguments, add_sampling_arguments, decoder_of, sampling_keywords
from eagle.errors import EagleError
from eagle.sample.presets import NAMES, summary

if TYPE_CHECKING:
    from eagle.cli.chat_session import ChatSession
    from eagle.cli.chat_view import ChatView
    from eagle.config import Recipe
    from eagle.decode.pieces import Piece

_COMMANDS = {
    "/reset": "forget the turns; system message and settings stay",
    "/system TEXT": "another system message, and a fresh conversation (without TEXT: the template's own)",
    "/set NAME VALUE": "temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens or seed; VALUE default: back",
    "/preset NAME": f"parameter template: {', '.join(NAMES)}, or none",
    "/stats": "figures of this chat so far",
    "/save FILE": "the conversation: .jsonl as a row of training data, else JSON with the figures",
    "/help": "this list",
    "/quit": "leave (Ctrl-D does too); Ctrl-C stops an answer",
}
_LEAVE = object()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle chat`."""
    parser.description = (
        "Chat with a target and a draft head. Lines are turns; a line that ends in a backslash goes on in the next; one that "
        "starts with / is a command (/help lists them; // says a slash). Lines from a pipe are a scripted chat."
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message (default: the chat template's own, if any)"
    )
    add_decoder_arguments(parser)
    add_sampling_arguments(parser)


def chat(options: argparse.Namespace, recipe: "Recipe") -> None:
    """Runs the chat until Ctrl-D, /quit or the end of standard input.

    A mistake is told and the chat goes on; in a scripted chat (standard input is no terminal) it ends it.
    """
    sampling_keywords(options)  # mistakes are told before anything is loaded
    decoder = decoder_of(options, recipe)
    from eagle.cli.chat_session import SETTINGS, ChatSession
    from eagle.cli.chat_view import ChatView
    from eagle.target.prompt import utf8

    settings = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    session = ChatSession(decoder=decoder, settings=settings, preset=options.preset)
    if options.system:
        session.set_system(utf8(options.system, "--system"))
    view = ChatView()
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (input() then edits lines and remembers them)

        drafting = "without drafting" if decoder.drafter is None else f"rule {decoder.rule.name}"
        view.remark(
            f"{decoder.target.name}, {drafting}; {session.described()}. /help lists the commands, Ctrl-D leaves."
        )
        view.legend()
    while True:
        try:
            text = _read(view, interactive=interactive)
            if text is None or _turn(session, view, text, interactive=interactive) is _LEAVE:
                return
        except EagleError as error:
            if not interactive:
                raise
            view.remark(str(error), style="red")
        except KeyboardInterrupt:
            if not interactive:
                raise
            view.remark("\n(Ctrl-D or /quit leaves)")


def _read(view: "ChatView", *, interactive: bool) -> str | None:
    """The next turn; None: there is none. A line that ends in a backslash goes on in the next."""
    from eagle.target.prompt import read_utf8

    lines: list[str] = []
    while True:
        if not interactive:
            line = read_utf8(lambda: sys.stdin.readline(), "standard input")
            if not line:
                return "\n".join(lines) or None
            line = line.rstrip("\n")
        else:
            prompt = "you> " if not lines else "...> "
            if not sys.stdout.isatty():  # input() would write the prompt among the answers
                print(prompt, end="", file=sys.stderr, flush=True)
                prompt = ""
            try:
                line = read_utf8(functools.partial(input, prompt), "that line")
            except EOFError:
                print(file=sys.stderr)
                return None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix("\\"))


def _turn(session: "ChatSession", view: "ChatView", text: str, *, interactive: bool) -> object:
    """Answers a turn or obeys a command; returns _LEAVE when the chat is to end."""
    text = text.strip()
    if not text:
        return None
    if text.startswith("/") and not text.startswith("//"):
        return _command(session, view, text)
    before = len(session.turns)
    blocks = session.answer(text.removeprefix("/") if text.startswith("//") else text)
    try:
        with _asking() if interactive else nullcontext(lambda: False) as asked:
            view.stream(_until(asked, blocks), lambda: session.turns[-1].stats)
    except KeyboardInterrupt:
        if not interactive:
            raise
    if len(session.turns) > before:
        turn = session.turns[-1]
        view.remark(f"[{turn.line()}]")
        if turn.cut_by_context:
            view.remark(
                f"the context is full: {session.decoder.target.name} takes {session.decoder.target.max_positions:,} tokens, "
                "and the answer was cut there; /reset forgets the turns (after /save FILE, if you want to keep them)",
                style="yellow",
            )
    return None


@contextmanager
def _asking() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C asks for a stop, and the yielded function tells of it; a second one interrupts at once.

    (An interrupt that is raised wherever Python happens to be can be swallowed by a library's callback.)
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _until(asked: Callable[[], bool], blocks: Generator[list["Piece"], None, None]) -> Iterator[list["Piece"]]:
    """The blocks up to the one after which a stop was asked for."""
    with closing(blocks):
        for block in blocks:
            yield block
            if asked():
                return


def _command(session: "ChatSession", view: "ChatView", text: str) -> object:
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    commands: dict[str, Callable[[], object]] = {
        "/reset": lambda: _reset(session, view),
        "/system": lambda: _system(session, view, rest),
        "/set": lambda: _set(session, view, rest),
        "/preset": lambda: _preset(session, view, rest),
        "/stats": lambda: view.say(_stats(session)),
        "/save": lambda: _save(session, view, rest),
        "/help": lambda: view.say("\n".join(f"{command:<17}{what}" for command, what in _COMMANDS.items())),
        "/quit": lambda: _LEAVE,
    }
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise EagleError(f"no command {name}; {hint} (a message that starts with a slash: write two)")
    return commands[name]()


def _reset(session: "ChatSession", view: "ChatView") -> None:
    session.reset()
    view.remark("the turns are forgotten")


def _system(session: "ChatSession", view: "ChatView", text: str) -> None:
    session.set_system(text)
    view.remark(
        "a fresh conversation, " + ("with that system message" if text else "with the template's own system message")
    )


def _set(session: "ChatSession", view: "ChatView", text: str) -> None:
    words = text.replace("=", " ").split()
    if len(words) != 2:
        raise EagleError(f'/set {text}: expected a name and a value, such as "/set temperature 0.7"')
    session.set(words[0], words[1])
    idle = " (greedy decoding: the seed has no effect until a temperature is set)"
    view.remark(session.described() + (idle if words[0] == "seed" and not session.samples() else ""))


def _preset(session: "ChatSession", view: "ChatView", name: str) -> None:
    if not name:
        raise EagleError(
            "/preset: expected a name:\n" + "\n".join(summary(one) for one in NAMES) + "\nnone: no template"
        )
    session.set_preset(None if name == "none" else name)
    view.remark(session.described() if name == "none" else summary(name))


def _save(session: "ChatSession", view: "ChatView", name: str) -> None:
    if not name:
        raise EagleError("/save: expected a file name, such as /save chat.json")
    session.save(Path(os.path.expanduser(name)))
    view.remark(f"saved in {name}")


def _stats(session: "ChatSession") -> str:
    totals = session.totals()
    if not totals["answers"]:
        return f"no answers yet; {session.described()}"
    lines = [
        f"{totals['answers']} answers, {totals['tokens']} tokens, {totals['tokens_per_second']:.1f} tok/s, "
        + ("" if totals["tau"] is None else f"tau {totals['tau']:.2f} over {totals['verify_steps']} verify steps, ")
        + f"median TTFT "
        f"{totals['median_first_token_ms'] / 1e3:.2f} s",
        "tokens: " + ", ".join(f"{count} {name}" for name, count in totals["origins"].items()),
        session.described(),
    ]
    rates = session.turns[-1].stats.acceptance_per_depth
    if rates:
        lines.insert(2, "last answer, acceptance per depth: " + " ".join(f"{rate:.2f}" for rate in rates))
    return "\n".join(lines)
