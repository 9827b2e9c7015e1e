"""The `eagle` command: one table of commands. What one runs is imported when it runs, so that `eagle --help` is quick."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from eagle.exits import exit_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One command."""

    about: str
    runs: str
    """MODULE:FUNCTION"""
    takes: tuple[Literal["recipe", "options"], ...] = ("options",)
    """Its arguments."""
    arguments: str | None = None
    """MODULE:FUNCTION that declares its own options; None: it has none."""
    recipe: Literal["needed", "optional", "none"] = "none"
    """Whether it reads a recipe, as its first argument or by --recipe, and overrides of a recipe's keys."""
    sections: tuple[str, ...] = ()
    """The recipe's sections that it is about, which its help shows; (): all."""


def _stage(about: str, runs: str, *sections: str, arguments: str | None = None) -> Command:
    takes: tuple[Literal["recipe", "options"], ...] = ("recipe",) if arguments is None else ("recipe", "options")
    return Command(about=about, runs=runs, takes=takes, arguments=arguments, recipe="needed", sections=sections)


def _tool(about: str, module: str, function: str) -> Command:
    return Command(about=about, runs=f"{module}:{function}", arguments=f"{module}:add_arguments")


_ANSWERS = ("decode", "target")
COMMANDS = {
    "run": _stage(
        "All stages of a recipe: data, features, training, evaluation; what is complete is skipped.",
        "eagle.cli.run:run",
    ),
    "data prepare": _stage(
        "Conversations -> token ids with a loss mask.", "eagle.data.prepare:prepare", "data", "target"
    ),
    "data regenerate": _stage(
        "Let the target itself answer prompts: better training data than others' answers.",
        "eagle.data.regenerate:regenerate",
        "data",
        "target",
    ),
    "data inspect": _stage(
        "Show what will be trained on: mask preview, lengths, duplicates, disk and time estimates.",
        "eagle.cli.stages:inspect",
        "data",
        "target",
        "features",
        arguments="eagle.cli.stages:inspect_arguments",
    ),
    "data report": _stage(
        "How far the answers are from what the target would say; duplicates, cuts, draft vocabulary coverage.",
        "eagle.data.report:report",
        "data",
        "target",
    ),
    "features": _stage(
        "Run the target over the prepared data and store its features.",
        "eagle.data.features:extract",
        "features",
        "target",
    ),
    "train": _stage(
        "Train the draft head on the feature store.", "eagle.train.loop:train", "train", "head", "features", "decode"
    ),
    "tune": _stage(
        "Find the fastest draft tree for the head on this machine, or none; keep it beside the head.",
        "eagle.cli.stages:tune",
        "tune",
        "decode",
        "eval",
        arguments="eagle.cli.stages:tune_arguments",
    ),
    "eval": _stage(
        "Acceptance, exactness and speed against Hugging Face generate and our own plain loop.",
        "eagle.cli.stages:evaluate",
        "eval",
        "decode",
        "target",
        arguments="eagle.cli.stages:eval_arguments",
    ),
    "generate": Command(
        about="Answer a prompt with a target and a draft head, streaming.",
        runs="eagle.cli.generate:generate",
        takes=("options", "recipe"),
        arguments="eagle.cli.generate:add_arguments",
        recipe="optional",
        sections=_ANSWERS,
    ),
    "chat": Command(
        about="Chat on the terminal, tokens coloured by how they came.",
        runs="eagle.cli.chat:chat",
        takes=("options", "recipe"),
        arguments="eagle.cli.chat:add_arguments",
        recipe="optional",
        sections=_ANSWERS,
    ),
    "import": _tool(
        "Make another project's head one of this: what it assumed is printed.", "eagle.cli.import_", "import_head"
    ),
    "export": _tool(
        "Write a head for vLLM, SGLang, TensorRT-LLM ..., with a model card.", "eagle.cli.export", "export"
    ),
    "lint": _tool(
        "What breaks when vLLM, SGLang or speculators loads a head, why, and the remedy.", "eagle.cli.lint", "lint"
    ),
    "report": _tool(
        "Make an evaluation's report.html anew, or put several side by side.", "eagle.cli.report", "report"
    ),
    "zoo": _tool("The draft heads that come with this package. Give a name as --head.", "eagle.cli.zoo", "zoo"),
    "presets": Command(
        about="The parameter templates: each value, its range and the reasons.",
        runs="eagle.sample.presets:show",
        takes=(),
    ),
    "demo": _tool(
        "The whole path on SmolLM2-135M-Instruct, some 15 minutes on two cores.", "eagle.cli.demo", "demo_command"
    ),
}
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
    name = next((name for words in (2, 1) if (name := " ".join(arguments[:words])) in COMMANDS), None)
    if name is None:
        _overview().parse_args(arguments)  # prints help or the version, or says what is wrong
        return 2
    command, rest = COMMANDS[name], arguments[len(name.split()) :]
    parser = _parser(name, command)
    overrides: list[str] = []
    if command.recipe != "none":
        rest, overrides = split_overrides(rest)
        if "-h" in rest or "--help" in rest:
            from eagle.config import sections_help

            parser.print_help()
            print("\n" + sections_help(command.sections))
            return 0
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        _refuse(unknown[0], parser, command)
    values: dict[str, Any] = {"options": options}
    if command.recipe != "none":
        from eagle.config import as_dict

        values["recipe"] = _recipe(command, options, overrides)
        if options.print_config:
            import yaml

            print(yaml.safe_dump(as_dict(values["recipe"]), sort_keys=False, allow_unicode=True), end="")
            return 0
    from eagle.quiet import quieten

    quieten()
    result = _named(command.runs)(*[values[one] for one in command.takes])
    return result if isinstance(result, int) else 0


def _recipe(command: Command, options: argparse.Namespace, overrides: list[str]) -> Any:
    from eagle.config import read_recipe

    if command.recipe == "needed":
        return read_recipe(options.recipe, overrides)
    from eagle.cli.decoding import recipe_of_options

    return recipe_of_options(options, overrides)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates overrides of a recipe's keys, `--section.key value` (or `=value`) and --output_dir, from a command's own
    arguments, in whatever order they come."""
    kept, overrides = list[str](), list[str]()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not re.match(r"--(output_dir|[\w-]+\.[^=]*)(=|$)", word):
            kept.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return kept, overrides


def _refuse(unknown: str, parser: argparse.ArgumentParser, command: Command) -> None:
    from eagle.config import unknown_key
    from eagle.errors import EagleError

    if command.recipe == "needed" and unknown.startswith("--"):
        raise EagleError(unknown_key(unknown.removeprefix("--").split("=")[0]))
    parser.error(f"unrecognized arguments: {unknown}")


def _named(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"eagle {name}", description=command.about, allow_abbrev=False, add_help=command.recipe == "none"
    )
    if command.recipe == "needed":
        parser.add_argument("recipe", metavar="RECIPE", help="the recipe, a YAML file")
    if command.recipe != "none":
        parser.add_argument("--print_config", action="store_true", help="print the resolved recipe and stop")
        parser.add_argument(
            "-h", "--help", action="store_true", help="this text, with the recipe keys that it is about"
        )
    if command.arguments is not None:
        _named(command.arguments)(parser)
    return parser


def _overview() -> argparse.ArgumentParser:
    """The commands, for the help and for misspellings."""
    parser = argparse.ArgumentParser(
        prog="eagle",
        description="Train EAGLE draft heads for Hugging Face causal LMs, decode losslessly, measure the gain.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    for name, command in COMMANDS.items():
        group, _, action = name.partition(" ")
        if not action:
            commands.add_parser(name, help=command.about)
            continue
        if group not in groups:
            about = "prepare, regenerate, inspect or report on training conversations"
            groups[group] = commands.add_parser(group, help=about).add_subparsers(metavar="ACTION", required=True)
        groups[group].add_parser(action, help=command.about)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        from eagle.environment import package_version

        print(f"eagle {package_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
