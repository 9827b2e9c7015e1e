"""`python -m eagle.train --config RECIPE [--train.lr 1e-4 ...]`, also under `accelerate launch -m` and torchrun."""

import os
import sys

from eagle.config import read_recipe, recipe_parser
from eagle.errors import EagleError
from eagle.train.loop import train


def main(arguments: list[str]) -> int:
    """Exit code 0, or 2 after printing what the user can mend (once per machine)."""
    if "--help" in arguments or "-h" in arguments:
        recipe_parser().print_help()
        return 0
    try:
        path, overrides = _split(arguments)
        train(read_recipe(path, overrides))
    except EagleError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe's path and the overrides that are left."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return argument.removeprefix("--config="), arguments[:index] + arguments[index + 1 :]
        if argument == "--config" and index + 1 < len(arguments):
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
    raise EagleError("no recipe given; usage: python -m eagle.train --config RECIPE [--section.key VALUE ...]")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
