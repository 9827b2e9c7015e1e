"""Command-line options that say which decoder and how it samples; shared by `eagle generate` and `eagle chat`."""

import argparse
import secrets
from typing import TYPE_CHECKING, Any

from eagle.errors import EagleError
from eagle.presets import NAMES, PRESETS, within

if TYPE_CHECKING:
    from eagle.config import DecodeConfig, TargetConfig
    from eagle.decode import SpeculativeDecoder

DEFAULT_NEW_TOKENS = 256
"""Longest answer, in tokens, without --max-new-tokens and --preset."""

_SAMPLING = ("top_k", "top_p", "min_p", "seed")
_OF_DRAFTING = (
    *("drafter", "draft_model", "tree_budget", "tree_top_k", "tree_depth"),
    *("rule", "rule_top_k", "rule_epsilon", "rule_delta"),
)
# Options of a rule: the key of the recipe that each one sets.
_RULE_OPTIONS = {"top_k": ("rule_top_k",), "typical": ("rule_epsilon", "rule_delta")}


def add_decoder_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares target, head, drafter, tree and rule."""
    parser.add_argument("--recipe", metavar="RECIPE", help="take target, head and tree from this recipe")
    parser.add_argument("--target", metavar="MODEL", help="folder, hub id, .gguf file or package:NAME/FILE.gguf")
    parser.add_argument("--head", metavar="PATH", help="the draft head's folder, a name of eagle zoo, or a hub id")
    parser.add_argument(
        "--drafter", choices=["eagle2", "static", "chain", "model", "ngram"], help="what drafts (default: eagle2)"
    )
    parser.add_argument("--draft-model", metavar="MODEL", help="a small model that drafts (--drafter model)")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="no drafting (a head stays unused): the same text at plain decoding's speed",
    )
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1 ... (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", default=None, choices=["auto", "float32", "bfloat16", "float16"], help="weights' dtype"
    )
    parser.add_argument(
        "--engine",
        default=None,
        choices=["auto", "eager", "compiled", "cudagraph"],
        help="how forwards run (default: the recipe's, or auto: the fastest that can be had). compiled: packed matrices on a "
        "CPU, float32; cudagraph: captured graphs on one GPU. Trees of eagle tune hold for the engine they were tuned with",
    )
    tree = parser.add_argument_group(
        "draft tree",
        "default: the recipe's, or the one tuned for this machine and engine (eagle tune), or the published one",
    )
    tree.add_argument("--tree-budget", type=int, metavar="N", help="nodes per verification, the root included")
    tree.add_argument("--tree-top-k", type=int, metavar="K", help="children per node and nodes per level")
    tree.add_argument("--tree-depth", type=int, metavar="D", help="levels below the root")
    rule = parser.add_argument_group(
        "verification rule", "default: the recipe's, or coupled: plain decoding's text, token for token"
    )
    rule.add_argument(
        "--rule",
        choices=["coupled", "rejection", "block", "top_k", "typical"],
        help="coupled, rejection and block (chains) are lossless; top_k and typical change the text",
    )
    rule.add_argument(
        "--rule-top-k", type=int, metavar="K", help="rule top_k: accept among the target's K likeliest (default: 3)"
    )
    rule.add_argument(
        "--rule-epsilon", type=float, metavar="P", help="rule typical: probability that is always enough (default: 0.3)"
    )
    rule.add_argument(
        "--rule-delta", type=float, metavar="D", help="rule typical: else more than D * exp(-entropy) (default: 0.09)"
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


def decoder_of(options: argparse.Namespace, *, search: bool = False) -> "SpeculativeDecoder":
    """The decoder that the options (and their recipe) describe. search: it will search, which is done without drafting."""
    target, head, decode, chat_template = _what(options, search=search)
    return load_decoder(target, head, decode, chat_template)


def load_decoder(
    target: "TargetConfig", head: str | None, decode: "DecodeConfig", chat_template: str | None
) -> "SpeculativeDecoder":
    """Loads target and head."""
    from eagle.decode import SpeculativeDecoder
    from eagle.target import Target

    loaded = Target.from_config(target, chat_template)
    return SpeculativeDecoder.from_pretrained(loaded, head, decode=decode)


def _what(options: argparse.Namespace, *, search: bool) -> "tuple[TargetConfig, str | None, DecodeConfig, str | None]":
    """Target, head, decoding and chat template from the recipe, where there is one, and the options over it."""
    import dataclasses

    from eagle.config import DecodeConfig, TargetConfig, read_recipe
    from eagle.drafters import NEEDS_HEAD, with_drafter

    _refuse_without_drafting(options, search=search)
    recipe = read_recipe(options.recipe) if options.recipe else None
    if options.target is None and recipe is None:
        raise EagleError("no target; give --target MODEL (and --head PATH), or --recipe RECIPE")
    if recipe is None:
        target = TargetConfig(model=options.target)
    elif options.target is not None:
        target = TargetConfig(model=options.target, date=recipe.target.date)
    else:
        target = recipe.target
    changes = {key: value for key in ("device", "dtype") if (value := getattr(options, key)) is not None}
    target = dataclasses.replace(target, **changes)
    head = options.head or (str(recipe.head_dir) if recipe is not None else None)
    decode = recipe.decode if recipe is not None else DecodeConfig()
    if options.drafter not in (None, decode.drafter):
        decode = with_drafter(decode, options.drafter)  # of the recipe's options, those that it reads
    names = {"budget": "tree_budget", "top_k": "tree_top_k", "depth": "tree_depth"}
    same = ("drafter", "draft_model", "engine", "rule", "rule_top_k", "rule_epsilon", "rule_delta")
    names |= {name: name for name in same}
    given = {key: value for key, name in names.items() if (value := getattr(options, name)) is not None}
    decode = dataclasses.replace(decode, **given)
    _refuse_idle(decode, given)
    template = recipe.data.chat_template if recipe is not None else None
    if search:
        return target, None, dataclasses.replace(decode, drafter="none"), template
    if options.plain:
        decode = dataclasses.replace(decode, drafter="none")
    elif head is None and decode.drafter in NEEDS_HEAD:
        raise EagleError("no draft head; give --head PATH (or --drafter ngram, or --plain to decode without drafting)")
    elif options.head is not None and decode.drafter not in NEEDS_HEAD:
        raise EagleError(f"--head was given, but the drafter {decode.drafter} reads no head; leave it out")
    return target, head, decode, template


def _refuse_without_drafting(options: argparse.Namespace, *, search: bool) -> None:
    """Raises EagleError for options of drafting where nothing is drafted."""
    if not (search or options.plain):
        return
    names = ("head", *_OF_DRAFTING) if search else _OF_DRAFTING
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        why = "--num-beams searches with the target alone" if search else "--plain decodes without drafting"
        raise EagleError(f"{why}, so --{given[0].replace('_', '-')} does nothing; leave it out")


def _refuse_idle(decode: "DecodeConfig", given: dict[str, Any]) -> None:
    for rule, keys in _RULE_OPTIONS.items():
        for key in keys:
            if key in given and decode.rule != rule:
                raise EagleError(
                    f"--{key.replace('_', '-')} {given[key]} is an option of the rule {rule}, and the rule is {decode.rule}; "
                    f"add --rule {rule}, or leave it out"
                )
