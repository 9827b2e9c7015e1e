"""`python -m eagle.train --config RECIPE [--train.lr 1e-4 ...]`, also under `accelerate launch -m` and torchrun."""

import sys

from eagle.config import read_recipe, sections_help
from eagle.data.features import config_and_overrides
from eagle.exits import exit_code
from eagle.train.loop import train


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or what `eagle train` would end with."""
    if "--help" in arguments or "-h" in arguments:
        print(sections_help(("train", "head", "features", "decode")))
        return 0
    return exit_code(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    path, overrides = config_and_overrides(arguments)
    train(read_recipe(path, overrides))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
