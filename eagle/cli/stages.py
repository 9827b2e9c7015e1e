"""What `eagle data inspect`, `tune` and `eval` take besides a recipe, and what they do with it."""

import argparse

from eagle.config import Recipe


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle data inspect`."""
    parser.add_argument(
        "--measure", action="store_true", help="time the target on a few documents, to estimate the extraction"
    )


def inspect(recipe: Recipe, options: argparse.Namespace) -> None:
    """`eagle data inspect`."""
    from eagle.data.inspect import inspect, measured_rate

    inspect(recipe, tokens_per_second=measured_rate(recipe) if options.measure else None)


def tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle tune`."""
    parser.add_argument("--head", metavar="PATH", help="tune for this head instead of the recipe's own")


def tune(recipe: Recipe, options: argparse.Namespace) -> None:
    """`eagle tune`."""
    from eagle.eval.tuner.tune import tune

    tune(recipe, head=options.head)


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle eval`."""
    parser.add_argument("--head", metavar="PATH", help="evaluate this head instead of the recipe's own")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        choices=["exact", "distribution"],
        help="do not measure; exact: compare every token with plain decoding's, under all of eval.sampling; distribution: "
        "chi-square tests of every lossless rule, under those above temperature 0 (exit code 1: different, or rejected)",
    )
    instead.add_argument(
        "--decoding",
        action="store_true",
        help="the prompts under greedy, beam search, top-k, top-p, min-p and a hybrid: texts side by side, latency, memory",
    )
    instead.add_argument(
        "--quality",
        action="store_true",
        help="what the lossy rules cost: likelihood of the text and GSM8K accuracy against the lossless rule, and the speed",
    )


def evaluate(recipe: Recipe, options: argparse.Namespace) -> int:
    """`eagle eval`, or what it was asked to do instead; returns the exit code."""
    if options.decoding:
        from eagle.eval.quality.decoding import compare_decoding

        compare_decoding(recipe, options.head)
    elif options.quality:
        from eagle.eval.quality.quality import compare_quality

        compare_quality(recipe, options.head)
    elif options.check == "exact":
        from eagle.eval.checks.check import check_exact

        return 0 if check_exact(recipe, options.head) else 1
    elif options.check == "distribution":
        from eagle.eval.checks.distribution import check_distribution

        return 0 if check_distribution(recipe, options.head) else 1
    else:
        from eagle.eval.harness import evaluate

        evaluate(recipe, head=options.head)
    return 0
