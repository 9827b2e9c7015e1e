"""`eagle generate`: a prompt, a file or standard input, answered as a stream."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.cli.decoding import (
    add_decoder_arguments,
    add_sampling_arguments,
    decoder_of,
    load_decoder,
    sampling_keywords,
    searches,
)
from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.config import Recipe
    from eagle.decode.decoder import SpeculativeDecoder
    from eagle.sample.stats import DecodeStats

Messages = list[dict[str, str]]

_SEARCH = ("length_penalty", "num_return_sequences", "prune_relative", "prune_absolute", "prune_local")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle generate`."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to answer; without it (and --file): standard input"
    )
    parser.add_argument(
        "--file", metavar="PATH", help="the whole file is one prompt; .jsonl: one conversation per line"
    )
    parser.add_argument("--raw", action="store_true", help="continue the bare text, without the chat template")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer behind this text; repeatable")
    parser.add_argument(
        "--stats", action="store_true", help="acceptance length and speed on standard error, after each answer"
    )
    add_decoder_arguments(parser)
    add_sampling_arguments(parser)
    search = parser.add_argument_group("search", "beam search of the target alone: nothing is drafted or streamed")
    search.add_argument("--num-beams", type=int, metavar="K", help="hypotheses carried along, 2 or more")
    search.add_argument(
        "--length-penalty", type=float, metavar="A", help="answers are ranked by score / length^A (default: 1)"
    )
    search.add_argument("--num-return-sequences", type=int, metavar="N", help="print the N best (default: 1)")
    search.add_argument(
        "--prune-relative", type=float, metavar="R", help="drop hypotheses of at most this share of the best one's"
    )
    search.add_argument(
        "--prune-absolute", type=float, metavar="A", help="drop hypotheses this much below the best score"
    )
    search.add_argument(
        "--prune-local", type=float, metavar="R", help="drop those whose last token has at most this share of the best"
    )


def generate(options: argparse.Namespace, recipe: "Recipe") -> None:
    """Answers every prompt of the options, streaming to standard output."""
    asked = {**sampling_keywords(options), "stop_strings": options.stop}
    search = _search_keywords(options)
    prompts = list(_prompts(options))
    decoder = decoder_of(options, recipe)
    from eagle.target.prompt import prompt_ids, text_ids

    tokenizer = decoder.target.tokenizer
    assert tokenizer is not None
    asked["eos_token_id"] = list(decoder.target.eos_token_ids)
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}### {number + 1} of {len(prompts)}", flush=True)
        if isinstance(prompt, str) and options.raw:
            ids = text_ids(tokenizer, prompt)
        else:
            ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if search:
            print_search(decoder, ids, stats=options.stats, **asked, **search)
        else:
            stream_answer(decoder, ids, stats=options.stats, **asked)


def _search_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of a search; empty without one."""
    given = {name: value for name in _SEARCH if (value := getattr(options, name)) is not None}
    if not searches(options):
        if given:
            name = next(iter(given)).replace("_", "-")
            raise EagleError(
                f"--{name} belongs to a search; add --num-beams, for instance --num-beams 4, or leave it out"
            )
        return {}
    if options.temperature or options.preset not in (None, "precise"):
        said = f"--temperature {options.temperature}" if options.temperature else f"--preset {options.preset}"
        raise EagleError(f"--num-beams searches and {said} samples: leave one of them out (or take --preset precise)")
    return {"num_beams": options.num_beams, **given}


def print_search(decoder: "SpeculativeDecoder", ids: list[int], *, stats: bool, **asked: Any) -> None:
    """Prints a search's answers, best first; with `stats`, a line on standard error."""
    import torch

    assert decoder.target.tokenizer is not None
    out = decoder.generate(torch.tensor([ids], device=decoder.target.device), **asked)
    assert out.sequences_scores is not None
    for number, (row, score) in enumerate(zip(out.sequences[:, len(ids) :], out.sequences_scores.tolist()), start=1):
        if len(out.sequences) > 1:
            print(f"--- {number} of {len(out.sequences)}, score {score:.3f}")
        print(decoder.target.tokenizer.decode(row, skip_special_tokens=True), flush=True)
    if stats:
        assert out.stats is not None
        (found,) = out.stats
        assert found.beams is not None
        print(
            f"[best of {found.beams.num_beams} beams: {found.new_tokens} tokens in {found.total_ms / 1e3:.2f} s; "
            f"{found.beams.forward_rows} target rows, {100 * found.beams.share_saved:.0f}% saved by pruning; "
            f"keys and values {found.beams.kv_tokens * found.kv_bytes_per_token / 2**20:.1f} MiB at most; "
            f"ended by {found.finish_reason}]",
            file=sys.stderr,
        )


def stream_answer(decoder: "SpeculativeDecoder", ids: list[int], *, stats: bool, **asked: Any) -> None:
    """Prints an answer to standard output as its tokens are accepted; with `stats`, a line on standard error.

    asked: keywords of SpeculativeDecoder.generate.
    """
    import torch

    stream = decoder.pieces(torch.tensor([ids], device=decoder.target.device), **asked)
    for piece in stream:
        print(piece.text, end="", flush=True)
    print(flush=True)
    if stats:
        print(stats_line(stream.stats, seed=asked.get("seed")), file=sys.stderr)


def answer_one(recipe: "Recipe", question: str, *, max_new_tokens: int) -> None:
    """Streams the answer of a recipe's own head to one question, with the statistics line."""
    from eagle.target.prompt import prompt_ids

    decoder = load_decoder(recipe, str(recipe.head_dir))
    assert decoder.target.tokenizer is not None
    ids = prompt_ids(decoder.target.tokenizer, [{"role": "user", "content": question}])
    stream_answer(decoder, ids, max_new_tokens=max_new_tokens, do_sample=False, stats=True)


def _prompts(options: argparse.Namespace) -> Iterator[str | Messages]:
    from eagle.target.prompt import read_utf8, utf8

    if options.prompt is not None and options.file is not None:
        raise EagleError("both a PROMPT and --file were given; give one of them")
    if options.file is not None:
        path = Path(options.file)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise EagleError(f"prompt file {path} {what}; give the path of a text file or of a .jsonl file")
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _conversations(path, raw=options.raw)
            return
        text = read_utf8(lambda: path.read_text(encoding="utf-8"), f"prompt file {path}")
    elif options.prompt is not None:
        text = utf8(options.prompt, "the prompt")
    else:
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D:", file=sys.stderr)
        text = read_utf8(lambda: sys.stdin.read(), "standard input")
    text = text if options.raw else text.strip()
    if not text.strip():
        raise EagleError("the prompt is empty; give some text as argument, with --file or on standard input")
    yield text


def _conversations(path: Path, *, raw: bool) -> Iterator[Messages]:
    from eagle.data.conversations import Conversation, read_conversations

    if raw:
        raise EagleError(f"--raw continues bare text, but {path} holds conversations; leave out --raw")
    for row in read_conversations([str(path)]):
        if not isinstance(row, Conversation):
            raise EagleError(f"{row}; mend or remove that row")
        # A conversation that already ends in an answer is asked again from its last user turn.
        last = max(i for i, message in enumerate(row.messages) if message["role"] != "assistant")
        yield [dict(message) for message in row.messages[: last + 1]]


def stats_line(stats: "DecodeStats", *, seed: int | None = None) -> str:
    """One answer's figures in a line; the seed that gives it again, where it was sampled."""
    drafted = ""
    if stats.attempts_per_depth:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_per_depth)
        drafted = f", tau {stats.tau:.2f} over {stats.verify_steps} verify steps, acceptance per depth {rates}"
    return (
        f"[{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{drafted}; "
        f"prefill {stats.prefill_ms:.0f} ms, draft {stats.draft_ms:.0f} ms, verify {stats.verify_ms:.0f} ms, "
        f"host {stats.host_ms:.0f} ms; ended by {stats.finish_reason}"
        f"{'' if not stats.tree else f'; tree {stats.tree}'}{'' if seed is None else f'; seed {seed}'}]"
    )
