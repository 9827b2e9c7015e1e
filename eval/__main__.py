"""`python -m eagle.eval --config RECIPE [--head PATH] [--eval.limit 10 ...]`, also under `accelerate launch -m` and torchrun."""

import argparse
import sys

from eagle.config import read_recipe, sections_help
from eagle.data.features import config_and_overrides
from eagle.eval.harness import evaluate
from eagle.exits import exit_code
from eagle.quiet import quieten


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or what `eagle eval` would end with."""
    if "--help" in arguments or "-h" in arguments:
        print(sections_help(("eval", "decode")))
        return 0
    quieten()
    return exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--head")
    known, rest = parser.parse_known_args(arguments)
    path, overrides = config_and_overrides(rest)
    evaluate(read_recipe(path, overrides), head=known.head)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
