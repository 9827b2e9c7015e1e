"""The `eagle` command. Every subcommand imports what it needs when it runs, so that `eagle --help` is quick."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eagle.exits import exit_code

RECIPE_COMMANDS = {
    "run": ("All stages of a recipe: data, features, training, evaluation; what is complete is skipped.", ()),
    "data prepare": ("Conversations -> token ids with a loss mask.", ("data", "target")),
    "data regenerate": (
        "Let the target itself answer prompts: better training data than others' answers.",
        ("data", "target"),
    ),
    "data inspect": (
        "Show what will be trained on: mask preview, lengths, duplicates, disk and time estimates.",
        ("data", "target", "features"),
    ),
    "data report": (
        "How far the answers are from what the target would say; duplicates, cuts, draft vocabulary coverage.",
        ("data", "target"),
    ),
    "features": ("Run the target over the prepared data and store its features.", ("features", "target")),
    "train": ("Train the draft head on the feature store.", ("train", "head", "features", "decode")),
    "tune": (
        "Find the fastest draft tree for the head on this machine, or none; keep it beside the head.",
        ("tune", "decode", "eval"),
    ),
    "eval": (
        "Acceptance, exactness and speed against Hugging Face generate and our own plain loop.",
        ("eval", "decode", "target"),
    ),
}
"""What each does, and the recipe's sections that it is about, which its help shows; (): all."""
_EPILOG = """\
A recipe is a YAML file with the sections target, data, features, head, train, decode, eval
and tune; configs/ holds examples.
Every key can be overridden: eagle train RECIPE --train.lr 1e-4 --train.epochs 3
Every stage resumes what an earlier run left.
Exit codes: 0 done, 1 eval --check or lint found something, 2 a mistake that is explained, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _dispatch(arguments))


def _dispatch(arguments: list[str]) -> int:
    parser = _parser()
    command = _recipe_command(arguments)
    if command is None:
        options = parser.parse_args(arguments)
        _quieten()
        return int(options.action(options) or 0)
    rest = arguments[len(command.split()) :]
    own = {"--head", "--check"} if command == "eval" else {"--head"} if command == "tune" else set()
    arguments, overrides = split_overrides(rest, own)
    if "-h" in rest or "--help" in rest:
        from eagle.config import sections_help

        _command_parser(command).print_help()
        print("\n" + sections_help(RECIPE_COMMANDS[command][1]))
        return 0
    options = _command_parser(command).parse_args(arguments)
    from eagle.config import as_dict, read_recipe

    recipe = read_recipe(options.recipe, overrides)
    if options.print_config:
        import yaml

        print(yaml.safe_dump(as_dict(recipe), sort_keys=False, allow_unicode=True), end="")
        return 0
    _quieten()
    if command == "eval" and (options.check or options.decoding or options.quality):
        return _eval_otherwise(options, recipe)
    if getattr(options, "measure", False):
        from eagle.data.inspect import inspect, measured_rate

        inspect(recipe, tokens_per_second=measured_rate(recipe))
        return 0
    _stage(command, getattr(options, "head", None))(recipe)
    return 0


_FLAGS = ("--help", "--print_config", "--measure", "--decoding", "--quality")
"""Options of recipe commands that take no value"""


def _eval_otherwise(options: argparse.Namespace, recipe: Any) -> int:
    """`eagle eval` with one of the options that measure something else; returns the exit code."""
    if options.decoding:
        from eagle.eval.quality.decoding import compare_decoding

        compare_decoding(recipe, options.head)
        return 0
    if options.quality:
        from eagle.eval.quality.quality import compare_quality

        compare_quality(recipe, options.head)
        return 0
    if options.check == "exact":
        from eagle.eval.checks.check import check_exact

        return 0 if check_exact(recipe, options.head) else 1
    from eagle.eval.checks.distribution import check_distribution

    return 0 if check_distribution(recipe, options.head) else 1


def split_overrides(arguments: Sequence[str], own: set[str]) -> tuple[list[str], list[str]]:
    """Separates `--section.key value` (or `=value`) from the command's own arguments, in whatever order they come.

    own: the command's own options that take a value, besides those without one (_FLAGS, -h).
    """
    kept: list[str] = []
    overrides: list[str] = []
    i = 0
    while i < len(arguments):
        argument = arguments[i]
        name, has_value = argument.split("=", 1)[0], "=" in argument
        if not argument.startswith("--") or name in _FLAGS:
            kept.append(argument)
        else:
            into = kept if name in own else overrides
            into.append(argument)
            if not has_value and i + 1 < len(arguments) and not arguments[i + 1].startswith("--"):
                i += 1
                into.append(arguments[i])
        i += 1
    return kept, overrides


def _recipe_command(arguments: Sequence[str]) -> str | None:
    for words in (1, 2):
        command = " ".join(arguments[:words])
        if command in RECIPE_COMMANDS:
            return command
    return None


def _stage(command: str, head: str | None) -> Callable[[Any], object]:
    """The function behind a recipe command; importing it imports torch."""
    if command == "run":
        from eagle.cli.run import run

        return run
    if command == "data prepare":
        from eagle.data.prepare import prepare

        return prepare
    if command == "data regenerate":
        from eagle.data.regenerate import regenerate

        return regenerate
    if command == "data inspect":
        from eagle.data.inspect import inspect

        return inspect
    if command == "data report":
        from eagle.data.report import report

        return report
    if command == "features":
        from eagle.data.features import extract

        return extract
    if command == "train":
        from eagle.train.loop import train

        return train
    if command == "tune":
        from eagle.eval.tuner.tune import tune

        return lambda recipe: tune(recipe, head=head)
    from eagle.eval.harness import evaluate

    return lambda recipe: evaluate(recipe, head=head)


def _command_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"eagle {command}", description=RECIPE_COMMANDS[command][0], allow_abbrev=False, add_help=False
    )
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe, a YAML file")
    parser.add_argument("--print_config", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument(
        "-h", "--help", action="store_true", help="this text, with the keys of the recipe that it is about"
    )
    if command == "data inspect":
        parser.add_argument(
            "--measure", action="store_true", help="time the target on a few documents, to estimate the extraction"
        )
    if command == "tune":
        parser.add_argument("--head", metavar="PATH", help="tune for this head instead of the recipe's own")
    if command == "eval":
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
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle",
        description="Train EAGLE draft heads for Hugging Face causal LMs, decode losslessly, measure the gain.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Recipe commands are dispatched before this parser; they are here for the help and for misspellings.
    for name in ("run", "data", "features", "train", "tune", "eval"):
        if name == "data":
            data = commands.add_parser("data", help="prepare, regenerate, inspect or report on training conversations")
            actions = data.add_subparsers(metavar="ACTION", required=True)
            for action in ("prepare", "regenerate", "inspect", "report"):
                actions.add_parser(action, help=RECIPE_COMMANDS[f"data {action}"][0])
        else:
            commands.add_parser(name, help=RECIPE_COMMANDS[name][0])
    _add_generate(commands)
    _add_formats(commands)
    _add_chat(commands)
    _add_report(commands)
    _add_lint(commands)
    _add_zoo(commands)
    presets = commands.add_parser("presets", help="The parameter templates: each value, its range and the reasons.")
    presets.set_defaults(action=_presets)
    demo = commands.add_parser("demo", help="The whole path on SmolLM2-135M-Instruct, some 15 minutes on two cores.")
    demo.add_argument("--output", default="runs/demo", metavar="DIR", help="where everything goes (default: runs/demo)")
    demo.set_defaults(action=_demo)
    return parser


def _presets(options: argparse.Namespace) -> None:
    from eagle.sample.presets import PRESETS, bounds_text

    for name, one in PRESETS.items():
        print(f"{name}: {one.purpose}")
        for key, bound in one.bounds():
            print(f"    {bounds_text(key, bound)}")


def _add_formats(commands: Any) -> None:
    from eagle.cli import export as export_cli
    from eagle.cli import import_ as import_cli

    parser = commands.add_parser("import", help="Make another project's head one of this: what it assumed is printed.")
    import_cli.add_arguments(parser)
    parser.set_defaults(action=import_cli.import_head)
    parser = commands.add_parser("export", help="Write a head for vLLM, SGLang, TensorRT-LLM ..., with a model card.")
    export_cli.add_arguments(parser)
    parser.set_defaults(action=export_cli.export)


def _add_generate(commands: Any) -> None:
    from eagle.cli.generate import add_arguments, generate

    parser = commands.add_parser("generate", help="Answer a prompt with a target and a draft head, streaming.")
    add_arguments(parser)
    parser.set_defaults(action=generate)


def _add_lint(commands: Any) -> None:
    from eagle.cli.lint import EPILOG, add_arguments, lint

    about = "What breaks when vLLM, SGLang or speculators loads a head, why, and the remedy."
    parser = commands.add_parser(
        "lint",
        help=about,
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(action=lint)


def _add_report(commands: Any) -> None:
    from eagle.cli.report import add_arguments, report

    parser = commands.add_parser("report", help="Make an evaluation's report.html anew, or put several side by side.")
    add_arguments(parser)
    parser.set_defaults(action=report)


def _add_chat(commands: Any) -> None:
    from eagle.cli.chat import add_arguments, chat

    parser = commands.add_parser("chat", help="Chat on the terminal, tokens coloured by how they came.")
    add_arguments(parser)
    parser.set_defaults(action=chat)


def _add_zoo(commands: Any) -> None:
    from eagle.cli.zoo import add_arguments, zoo

    about = "The draft heads that come with this package."
    parser = commands.add_parser("zoo", help=about, description=f"{about} Give a name as --head.")
    add_arguments(parser)
    parser.set_defaults(action=zoo)


def _demo(options: argparse.Namespace) -> None:
    from eagle.cli.demo import demo

    demo(output=options.output)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from eagle.environment import package_version

        print(f"eagle {package_version()}")
        parser.exit()


def _quieten() -> None:
    from eagle.quiet import quieten

    quieten()


if __name__ == "__main__":
    sys.exit(main())
