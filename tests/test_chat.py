"""`eagle chat`: turns, commands, colours, interruption and the context's end, on a tiny target with a random head."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle.cli.chat import _stats
from eagle.cli.chat_session import ChatSession
from eagle.cli.chat_view import ChatView
from eagle.cli.main import main
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.pieces import Piece
from eagle.errors import EagleError
from eagle.formats.checkpoint import save_head
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.sample.stats import DecodeStats
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from tests.tiny import save_tiny_target

Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_target(folder / "target")
    torch.manual_seed(0)
    config = EagleHeadConfig.for_target(Target.from_pretrained(str(folder / "target")).config, initializer_range=0.2)
    save_head(EagleHead(config), folder / "head")
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(str(folder / "target"), folder / "head")


@pytest.fixture
def chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """A scripted chat: (lines, options) -> exit code, standard output, standard error."""

    def run(lines: list[str], *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        model = ["--target", str(folder / "target"), "--head", str(folder / "head"), "--decode.drafter.budget", "8"]
        code = main(["chat", *model, "--max-new-tokens", "12", *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def plainly(decoder: SpeculativeDecoder, messages: list[dict[str, str]], limit: int) -> str:
    """What the target says, by hand."""
    tokenizer = decoder.target.tokenizer
    ids = torch.tensor([prompt_ids(tokenizer, messages)])
    out = decoder.plain().generate(ids, max_new_tokens=limit, do_sample=False)
    text: str = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.slow
def test_a_scripted_chat_says_what_the_target_says_turn_by_turn(chat: Chat, decoder: SpeculativeDecoder) -> None:
    code, out, err = chat(["hello to the cat", "what is \\", "1 + 1"])
    first = [{"role": "user", "content": "hello to the cat"}]
    said = plainly(decoder, first, 12)
    second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "what is \n1 + 1"}]
    assert (code, out) == (0, f"{said}\n{plainly(decoder, second, 12)}\n".replace("\r", ""))
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert len(lines) == 2
    for word in ("12 tokens", "tok/s", "tau", "drafted", "TTFT", "ended by length"):
        assert word in lines[0]
    assert "\x1b" not in out + err


def test_commands_change_what_is_asked(chat: Chat, tmp_path: Path) -> None:
    script = [
        "/system be brief",
        "hello",
        "/set seed 3",
        "/set temperature 0.7",
        "/set seed 3",
        "hello",
        "/reset",
        "/preset code",
        "/set max_new_tokens 9",
        "hello",
    ]
    saved = tmp_path / "chat.json"
    code, out, err = chat([*script, "/stats", f"/save {saved}", "/help", "/quit", "never read"])
    assert code == 0
    body = json.loads(saved.read_text())
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant"]
    assert body["messages"][0]["content"] == "be brief"
    assert (body["preset"], body["settings"]) == ("code", {"seed": 3, "max_new_tokens": 9})
    assert len(body["answers"]) == 3
    assert [answer["seed"] for answer in body["answers"]][1:] != [0, 0]
    assert "seed 3" in err
    assert err.count("the seed has no effect until a temperature is set") == 1
    assert re.search(r"3 answers, \d+ tokens, .* tau \d\.\d\d over \d+ verify steps", out)
    assert all(
        command in out for command in ("/reset", "/system", "/set", "/preset", "/stats", "/save", "/help", "/quit")
    )
    assert "never read" not in out


@pytest.mark.slow
def test_a_saved_conversation_is_a_row_that_generate_answers(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    assert chat(["hello", f"/save {path}", f"/save {path}"])[0] == 0
    (line,) = path.read_text().splitlines()
    assert [message["role"] for message in json.loads(line)["messages"]] == ["user", "assistant"]
    code, _, err = chat(["hello", f"/save {path}"])
    assert code == 2
    assert "exists already" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sett temperature 1", "no command /sett; did you mean /set?"),
        ("/set temperature", 'such as "/set temperature 0.7"'),
        ("/set warmth 1", "no setting warmth; there are: temperature"),
        ("/set top_k x", "top_k is 'x', expected a whole number"),
        ("/set top_p 0.5", "top_p 0.5 does nothing at temperature 0"),
        ("/preset cod", "unknown preset"),
        ("/save", "expected a file name"),
        ("/save /proc/chat.json", "/proc/chat.json cannot be written"),
        ("hello \udcff", "standard input is not UTF-8 text"),
        ("hello " * 600, "the context is full: this conversation has"),
    ],
)
def test_a_mistake_ends_a_scripted_chat_with_its_message(chat: Chat, line: str, words: str) -> None:
    code, out, err = chat([line, "hello"])
    assert code == 2
    assert words in err
    assert out == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--plain", "--decode.rule", "typical"), "--plain decodes without drafting, so --decode.rule does nothing"),
        (
            ("--plain", "--decode.drafter.budget", "8"),
            "without drafting, so --decode.drafter.budget does nothing",
        ),
        (
            ("--num-beams", "3", "--decode.drafter.depth", "2"),
            "--num-beams searches with the target alone, so --decode.drafter.depth does nothing",
        ),
        (("--decode.drafter", "ngram", "--head", "h"), "the drafter ngram reads no head"),
        (("--file", "."), "prompt file . is a folder"),
    ],
)
def test_options_without_effect_are_told_before_anything_is_loaded(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [] if "--file" in options else ["hello"]
    assert main(["generate", *prompt, "--target", "/nowhere", *options]) == 2
    assert words in capsys.readouterr().err


def test_tau_is_of_drafted_answers_and_the_median_of_all(decoder: SpeculativeDecoder) -> None:
    session = ChatSession(decoder=decoder.plain(), settings={"max_new_tokens": 4})
    for _ in range(2):
        list(session.answer("hello"))
    session.turns[0].first_token_ms, session.turns[1].first_token_ms = 10.0, 20.0
    totals = session.totals()
    assert (totals["tau"], totals["median_first_token_ms"]) == (None, 15.0)
    assert "tau" not in _stats(session)


def test_options_beyond_a_presets_bounds_are_told_before_anything_is_loaded(chat: Chat) -> None:
    code, _, err = chat(["hello"], "--preset", "precise", "--temperature", "0.9", "--target", "/nowhere")
    assert code == 2
    assert "above 0.3 answers to the same question begin to differ" in err


def test_an_answer_that_meets_the_contexts_end_is_cut_there_and_said_to_be(
    chat: Chat, decoder: SpeculativeDecoder
) -> None:
    question = "the cat sat on the mat"
    while (length := len(prompt_ids(decoder.target.tokenizer, [{"role": "user", "content": question}]))) < 480:
        question += " the cat"
    code, _, err = chat([question], "--max-new-tokens", "511")
    assert code == 0
    assert f"[{512 - length} tokens" in err
    assert "the answer was cut there; /reset" in err


def test_an_interrupted_answer_is_kept_as_far_as_it_came(decoder: SpeculativeDecoder) -> None:
    session = ChatSession(decoder=decoder, settings={"max_new_tokens": 40})
    blocks = session.answer("hello")
    for _ in range(3):
        next(blocks)
    with pytest.raises(KeyboardInterrupt):
        blocks.throw(KeyboardInterrupt())
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert session.turns[-1].interrupted
    assert "stopped by you" in session.turns[-1].line()
    assert plainly(decoder, session.messages[:1], 40).startswith(session.messages[-1]["content"].rstrip("\ufffd"))
    list(session.answer("and now?"))
    assert not session.turns[-1].interrupted


def test_a_rejected_turn_leaves_conversation_and_settings_as_they_were(decoder: SpeculativeDecoder) -> None:
    session = ChatSession(decoder=decoder, settings={"temperature": 0.5, "max_new_tokens": 8})
    list(session.answer("hello"))
    before = list(session.messages)
    with pytest.raises(EagleError, match="the context is full"):
        list(session.answer("hello " * 600))
    with pytest.raises(EagleError, match=r"above 0\.3"):
        ChatSession(decoder=decoder, preset="precise").set("temperature", "0.7")
    with pytest.raises(EagleError, match="top_p is 7"):
        session.set("top_p", "7")
    assert session.messages == before
    assert session.settings == {"temperature": 0.5, "max_new_tokens": 8}
    session.set("temperature", "default")
    assert "temperature" not in session.settings


def test_a_seed_may_be_set_under_a_preset_and_temperature_0_is_greedy_there(decoder: SpeculativeDecoder) -> None:
    session = ChatSession(decoder=decoder, preset="code", settings={"max_new_tokens": 8})
    session.set("seed", "5")
    assert session.samples()
    session.set("temperature", "0")
    assert not session.samples()
    list(session.answer("hello"))
    assert session.turns[-1].seed is None
    assert session.messages[-1]["content"] == plainly(decoder, session.messages[:1], 8)


def test_a_turn_ends_at_an_id_that_only_the_config_names(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, session = decoder.target.model, ChatSession(decoder=decoder, settings={"max_new_tokens": 12})
    tokens = [piece.token for block in session.answer("hello") for piece in block]
    monkeypatch.setattr(model.generation_config, "eos_token_id", 377)
    monkeypatch.setattr(model.config, "eos_token_id", tokens[5])
    session.reset()
    ended = [piece.token for block in session.answer("hello") for piece in block]
    assert ended == tokens[: tokens.index(tokens[5]) + 1]


def test_a_fixed_seed_gives_the_same_answer_again(decoder: SpeculativeDecoder) -> None:
    def said(seed: int) -> str:
        session = ChatSession(decoder=decoder, settings={"temperature": 1.0, "max_new_tokens": 12, "seed": seed})
        list(session.answer("hello"))
        return session.messages[-1]["content"]

    assert said(5) == said(5) != said(6)


PIECES = [
    [Piece("the cat ", 1, "plain")],
    [Piece("sat", 2, "drafted"), Piece(" on\n", 3, "bonus"), Piece("a \x1b[31mmat", 4, "correction")],
]


def shown(console: Console) -> str:
    view = ChatView(out=console, remarks=console)
    view.legend()
    view.stream(iter(PIECES), DecodeStats)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_tokens_are_coloured_by_how_they_came_and_cannot_steer_the_terminal() -> None:
    text = shown(
        Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=60, _environ={"TERM": "xterm"})
    )
    assert "\x1b[32msat\x1b[0m" in text
    assert "\x1b[33m on\x1b[0m" in text
    assert "the cat \x1b[32m" in text
    assert "\u241b[31mmat" in text
    assert "\x1b[31m" not in text
    assert "\x1b[32mdrafted\x1b[0m: accepted draft" in text
    assert "tok/s" in text


def test_without_colour_there_is_no_legend_and_no_styled_token() -> None:
    environment = {"TERM": "xterm", "NO_COLOR": "1"}
    text = shown(Console(file=io.StringIO(), force_terminal=True, width=60, _environ=environment))
    assert "accepted draft" not in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    assert "sat on" in text


@pytest.fixture
def terminal(folder: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A chat on a pseudo-terminal: its file descriptor, and the process."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "eagle.cli.main",
        "chat",
        "--target",
        str(folder / "target"),
        "--head",
        str(folder / "head"),
    ]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "400", "--decode.drafter.budget", "8"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    yield ours, process
    process.kill()
    process.wait()
    os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _until(terminal: int, words: str, *, seconds: float = 120) -> str:
    """Reads until `words` were seen."""
    text, end = "", time.monotonic() + seconds
    while words not in text:
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(
    terminal: tuple[int, "subprocess.Popen[bytes]"],
) -> None:
    screen, process = terminal
    assert "drafted" in _until(screen, "you> ")
    os.write(screen, b"hello to the cat\n")
    _until(screen, "Ctrl-C stops")
    os.write(screen, b"\x03")
    assert "stopped by you" in _until(screen, "you> ")
    os.write(screen, b"/sett\n")
    assert "did you mean /set?" in _until(screen, "you> ")
    os.write(screen, b"/set max_new_tokens 5\n")
    _until(screen, "you> ")
    os.write(screen, b"again\n")
    assert "5 tokens" in _until(screen, "you> ")
    os.write(screen, b"\x04")
    assert process.wait(60) == 0
