"""`eagle generate`: a prompt, a file or standard input, answered as a stream."""

import argparse
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.config import DecodeConfig, Recipe, TargetConfig
    from eagle.decode import SpeculativeDecoder
    from eagle.stats import DecodeStats

Messages = list[dict[str, str]]

_SAMPLING = ("top_k", "top_p", "min_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle generate`."""
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the text to answer; without it (and --file): standard input"
    )
    parser.add_argument(
        "--file", metavar="PATH", help="the whole file is one prompt; .jsonl: one conversation per line"
    )
    parser.add_argument("--recipe", metavar="RECIPE", help="take target, head and tree from this recipe")
    parser.add_argument("--target", metavar="MODEL", help="folder, hub id, .gguf file or package:NAME/FILE.gguf")
    parser.add_argument("--head", metavar="PATH", help="the draft head's folder or hub id")
    parser.add_argument(
        "--drafter", choices=["eagle2", "static", "chain", "model", "ngram"], help="what drafts (default: eagle2)"
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="a small model that drafts (--drafter model)")
    parser.add_argument("--plain", action="store_true", help="no drafting: the same text at plain decoding's speed")
    parser.add_argument("--raw", action="store_true", help="continue the bare text, without the chat template")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: 256)")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer behind this text; repeatable")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1 ... (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", default=None, choices=["auto", "float32", "bfloat16", "float16"], help="weights' dtype"
    )
    parser.add_argument(
        "--stats", action="store_true", help="acceptance length and speed on standard error, after each answer"
    )
    sampling = parser.add_argument_group("sampling", "default: greedy; the draft head never changes the text")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0: sample")
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="among the K best tokens, 0: all (default: the model's, or 50)"
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help="among the best tokens of this total probability")
    sampling.add_argument("--min-p", type=float, metavar="P", help="among tokens of this share of the best one's")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed, the same text (default: a new one)")
    tree = parser.add_argument_group("draft tree", "default: the recipe's, or the published one")
    tree.add_argument("--tree-budget", type=int, metavar="N", help="nodes per verification, the root included")
    tree.add_argument("--tree-top-k", type=int, metavar="K", help="children per node and nodes per level")
    tree.add_argument("--tree-depth", type=int, metavar="D", help="levels below the root")


def generate(options: argparse.Namespace) -> None:
    """Answers every prompt of the options, streaming to standard output."""
    if options.max_new_tokens < 1:
        raise EagleError(f"--max-new-tokens is {options.max_new_tokens}, expected at least 1")
    asked = _asked(options)
    prompts = list(_prompts(options))
    target, head, decode, chat_template = _what(options)
    decoder = _decoder(target, head, decode, chat_template)
    from eagle.chat import prompt_ids, text_ids

    tokenizer = decoder.target.tokenizer
    assert tokenizer is not None
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{'' if number == 0 else chr(10)}### {number + 1} of {len(prompts)}", flush=True)
        if isinstance(prompt, str) and options.raw:
            ids = text_ids(tokenizer, prompt)
        else:
            ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        stream_answer(decoder, ids, stats=options.stats, **asked)


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `SpeculativeDecoder.generate` that the options say."""
    given = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    if options.temperature == 0 and given:
        name = next(iter(given))
        raise EagleError(
            f"--{name.replace('_', '-')} {given[name]} does nothing at temperature 0 (greedy); add --temperature, "
            "for instance --temperature 0.7"
        )
    if options.temperature != 0:
        # A fresh process starts torch's generator at the same place: a new text needs a seed from elsewhere.
        given |= {
            "do_sample": True,
            "temperature": options.temperature,
            "seed": given.get("seed", secrets.randbits(32)),
        }
    return {"max_new_tokens": options.max_new_tokens, "stop_strings": options.stop, **given}


def stream_answer(decoder: "SpeculativeDecoder", ids: list[int], *, stats: bool, **asked: Any) -> None:
    """Prints an answer to standard output as its tokens are accepted; with `stats`, a line on standard error.

    asked: keywords of SpeculativeDecoder.generate; without do_sample: greedy.
    """
    import torch
    from transformers import TextStreamer

    assert decoder.target.tokenizer is not None
    streamer = TextStreamer(decoder.target.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids_1T = torch.tensor([ids], device=decoder.target.device)
    out = decoder.generate(ids_1T, streamer=streamer, **{"do_sample": False, **asked})
    if stats:
        assert out.stats is not None
        print(stats_line(out.stats[0], seed=asked.get("seed")), file=sys.stderr)


def answer_one(recipe: "Recipe", question: str, *, max_new_tokens: int) -> None:
    """Streams the answer of a recipe's own head to one question, with the statistics line."""
    from eagle.chat import prompt_ids

    decoder = _decoder(recipe.target, str(recipe.head_dir), recipe.decode, recipe.data.chat_template)
    assert decoder.target.tokenizer is not None
    ids = prompt_ids(decoder.target.tokenizer, [{"role": "user", "content": question}])
    stream_answer(decoder, ids, max_new_tokens=max_new_tokens, stats=True)


def _prompts(options: argparse.Namespace) -> Iterator[str | Messages]:
    if options.prompt is not None and options.file is not None:
        raise EagleError("both a PROMPT and --file were given; give one of them")
    if options.file is not None:
        path = Path(options.file)
        if not path.is_file():
            raise EagleError(f"prompt file {path} does not exist; give the path of a text file or of a .jsonl file")
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _conversations(path, raw=options.raw)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise EagleError(f"prompt file {path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    elif options.prompt is not None:
        text = options.prompt
    else:
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D:", file=sys.stderr)
        text = sys.stdin.read()
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


def _what(options: argparse.Namespace) -> "tuple[TargetConfig, str | None, DecodeConfig, str | None]":
    """Target, head, tree and chat template from the recipe, where there is one, and the options over it."""
    import dataclasses

    from eagle.config import DecodeConfig, TargetConfig, read_recipe

    recipe = read_recipe(options.recipe) if options.recipe else None
    if options.target is None and recipe is None:
        raise EagleError("no target; give --target MODEL (and --head PATH), or --recipe RECIPE")
    target = TargetConfig(model=options.target) if options.target is not None or recipe is None else recipe.target
    changes = {key: value for key in ("device", "dtype") if (value := getattr(options, key)) is not None}
    target = dataclasses.replace(target, **changes)
    head = options.head or (str(recipe.head_dir) if recipe is not None else None)
    decode = recipe.decode if recipe is not None else DecodeConfig()
    names = {"budget": "tree_budget", "top_k": "tree_top_k", "depth": "tree_depth"}
    names |= {"drafter": "drafter", "draft_model": "draft_model"}
    decode = dataclasses.replace(
        decode, **{key: value for key, name in names.items() if (value := getattr(options, name)) is not None}
    )
    if options.plain:
        decode = dataclasses.replace(decode, drafter="none")
    elif head is None and decode.drafter in ("eagle2", "static", "chain"):
        raise EagleError("no draft head; give --head PATH (or --drafter ngram, or --plain to decode without drafting)")
    return target, head, decode, recipe.data.chat_template if recipe is not None else None


def _decoder(
    target: "TargetConfig", head: str | None, decode: "DecodeConfig", chat_template: str | None
) -> "SpeculativeDecoder":
    from eagle.decode import SpeculativeDecoder
    from eagle.target import Target

    loaded = Target.from_config(target, chat_template)
    return SpeculativeDecoder.from_pretrained(loaded, head, decode=decode)


def stats_line(stats: "DecodeStats", *, seed: int | None = None) -> str:
    """One answer's figures in a line; the seed that gives it again, where it was sampled."""
    drafted = ""
    if stats.attempts_per_depth:
        rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_per_depth)
        drafted = f", tau {stats.tau:.2f} over {stats.verify_steps} verify steps, acceptance per depth {rates}"
    return (
        f"[{stats.new_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s{drafted}; "
        f"prefill {stats.prefill_ms:.0f} ms, draft {stats.draft_ms:.0f} ms, verify {stats.verify_ms:.0f} ms, "
        f"host {stats.host_ms:.0f} ms; ended by {stats.finish_reason}{'' if seed is None else f'; seed {seed}'}]"
    )
