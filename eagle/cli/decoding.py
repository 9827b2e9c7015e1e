"""Command-line options that say which decoder and how it samples; shared by `eagle generate` and `eagle chat`."""

import argparse
import re
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eagle.errors import EagleError
from eagle.sample.presets import NAMES, PRESETS, within

if TYPE_CHECKING:
    from eagle.config import Recipe
    from eagle.decode.decoder import SpeculativeDecoder

DEFAULT_NEW_TOKENS = 256
"""Longest answer, in tokens, without --max-new-tokens and --preset."""

_SAMPLING = ("top_k", "top_p", "min_p", "seed")


def add_decoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares target and head; everything else of a decoder is a key of a recipe."""
    parser.add_argument("--recipe", metavar="RECIPE", help="take target, head and decoding from this recipe")
    parser.add_argument(
        "--target", metavar="MODEL", help="folder, hub id, .gguf file or package:NAME/FILE.gguf: --target.model"
    )
    parser.add_argument("--head", metavar="PATH", help="the draft head's folder, a name of eagle zoo, or a hub id")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no drafting (a head stays unused): the same text at plain decoding's speed: --decode.drafter none",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the preset, temperature, filters, penalty and length."""
    sampling = parser.add_argument_group(
        "sampling", "default: greedy; under the lossless rules the draft head never changes the text"
    )
    sampling.add_argument(
        "--preset",
        choices=NAMES,
        help="a parameter template with bounds; the options below go over its values, within them. "
        + "; ".join(f"{name}: {one.purpose}" for name, one in PRESETS.items()),
    )
    sampling.add_argument("--temperature", type=float, metavar="T", help="above 0: sample (default: 0, greedy)")
    sampling.add_argument(
        "--top-k", type=int, metavar="K", help="among the K best tokens, 0: all (default: the model's, or 50)"
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help="among the best tokens of this total probability")
    sampling.add_argument("--min-p", type=float, metavar="P", help="among tokens of this share of the best one's")
    sampling.add_argument("--seed", type=int, metavar="S", help="the same seed, the same text (default: a new one)")
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: tokens that occurred become less likely"
    )
    sampling.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"longest answer (default: the preset's, or {DEFAULT_NEW_TOKENS})",
    )


def sampling_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `SpeculativeDecoder.generate` that the sampling options say.

    Raises EagleError for what has no effect, is out of range or lies beyond the preset's bounds.
    """
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise EagleError(f"--max-new-tokens is {options.max_new_tokens}, expected at least 1")
    names = (*_SAMPLING, "temperature", "max_new_tokens", "repetition_penalty")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.preset is not None:
        temperature = within(options.preset, given).get("temperature", 0)
    else:
        temperature = given.setdefault("temperature", 0)
        given.setdefault("max_new_tokens", DEFAULT_NEW_TOKENS)
    idle = [name for name in _SAMPLING if name in given]
    if temperature == 0 and idle:
        raise EagleError(
            f"--{idle[0].replace('_', '-')} {given[idle[0]]} does nothing at temperature 0 (greedy); add --temperature, "
            "for instance --temperature 0.7"
        )
    return keywords_of(given, preset=options.preset)


def keywords_of(given: dict[str, Any], *, preset: str | None) -> dict[str, Any]:
    """Keywords of `generate` for the settings that were given; what is sampled gets a seed."""
    keywords = {key: value for key, value in given.items() if value is not None}
    if preset is not None:
        keywords["preset"] = preset
        sampled = within(preset, given)["do_sample"]
    else:
        sampled = keywords["do_sample"] = keywords.get("temperature", 0) != 0
    if not sampled:  # a preset must hear of temperature 0; without one, do_sample says it
        idle = ("seed",) if preset is not None else ("temperature", "seed")
        return {key: value for key, value in keywords.items() if key not in idle}
    # A fresh process starts torch's generator at the same place: a new text needs a seed from elsewhere.
    keywords.setdefault("seed", secrets.randbits(32))
    return keywords


def recipe_of_options(options: argparse.Namespace, overrides: Sequence[str]) -> "Recipe":
    """The recipe that was given, or one that names the target alone, with the overrides. Raises EagleError without a target
    and for overrides of drafting where nothing is drafted."""
    from eagle.config import read_recipe, recipe_of

    said = list(overrides)
    if options.target is not None:
        said = ["--target.model", options.target, *said]
    why = "--num-beams searches with the target alone" if searches(options) else "--plain decodes without drafting"
    if options.plain or searches(options):
        idle = [word for word in overrides if re.match(r"--decode\.(drafter|rule|children)\b", word)]
        if searches(options) and options.head is not None:
            idle.insert(0, "--head")
        if idle:
            raise EagleError(f"{why}, so {idle[0].partition('=')[0]} does nothing; leave it out")
        said += ["--decode.drafter", "none"]
    if options.recipe is not None:
        return read_recipe(options.recipe, said)
    if not any(word.partition("=")[0] == "--target.model" for word in said):
        raise EagleError("no target; give --target MODEL (and --head PATH), or --recipe RECIPE")
    return recipe_of({"output_dir": "."}, said)


def searches(options: argparse.Namespace) -> bool:
    """Whether the options ask for a beam search."""
    return getattr(options, "num_beams", None) not in (None, 1)


def decoder_of(options: argparse.Namespace, recipe: "Recipe") -> "SpeculativeDecoder":
    """The decoder that the options and their recipe describe."""
    drafter = recipe.decode.drafter
    head = options.head
    if drafter.reads_head and head is None and options.recipe is not None:
        head = str(recipe.head_dir)
    if drafter.reads_head and head is None:
        raise EagleError(
            "no draft head; give --head PATH (or --decode.drafter ngram, or --plain to decode without drafting)"
        )
    if not drafter.reads_head and head is not None and not options.plain:
        raise EagleError(f"--head was given, but the drafter {drafter.name} reads no head; leave it out")
    return load_decoder(recipe, head if drafter.reads_head else None)


def load_decoder(recipe: "Recipe", head: str | None) -> "SpeculativeDecoder":
    """Loads target and head."""
    from eagle.decode.decoder import SpeculativeDecoder
    from eagle.target.target import Target

    loaded = Target.from_config(recipe.target, recipe.data.chat_template)
    return SpeculativeDecoder.from_pretrained(loaded, head, decode=recipe.decode)
