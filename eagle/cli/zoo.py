"""`eagle zoo`: the heads that come with this package; `eagle zoo add` packs another."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.formats.zoo.catalogue import ZooHead


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle zoo`."""
    actions = parser.add_subparsers(metavar="ACTION")
    add = actions.add_parser(
        "add",
        help="pack a trained head with its results into the zoo",
        description="Packs a trained head in bfloat16 with its recipe, data hashes, log and results into ZOO/NAME.",
    )
    add.add_argument("head", metavar="HEAD", help="the trained head's folder")
    add.add_argument("name", metavar="NAME", help="its name in the zoo: small letters, digits, hyphens")
    add.add_argument("--license", required=True, metavar="ID", help="the head's licence, such as apache-2.0")
    add.add_argument("--base-model", metavar="ID", help="the target's public name, for the card, such as a hub id")
    add.add_argument(
        "--run", metavar="DIR", help="the recipe's output_dir, for data/ and train/ (default: HEAD's parent)"
    )
    add.add_argument("--results", metavar="DIR", help="folder with this head's results.json (default: RUN/eval)")
    add.add_argument("--zoo", metavar="DIR", help="where to (default: the package's own zoo)")
    add.set_defaults(zoo_action=_add)


def zoo(options: argparse.Namespace) -> None:
    """Lists the zoo, or packs a head into it."""
    action = getattr(options, "zoo_action", _list)
    action(options)


def _list(options: argparse.Namespace) -> None:
    from eagle.formats.zoo.catalogue import ZOO, zoo_head, zoo_names

    names = zoo_names()
    if not names:
        raise EagleError(f"the zoo ({ZOO}) is empty; pack a head into it with eagle zoo add")
    for name in names:
        head = zoo_head(name)
        kind = {"eagle1": "EAGLE-1/2", "eagle3": "EAGLE-3"}[head.version]
        print(f"{name}   {kind} head, {head.bytes / 1e6:.1f} MB, {head.licence}")
        print(f"    target           {head.target.get('model')}")
        print(f"    training tokens  {'not recorded' if head.training_tokens is None else f'{head.training_tokens:,}'}")
        for line in _measured(head):
            print(f"    measured         {line}")
        print(f"    papers           {head.folder}")


def _measured(head: "ZooHead") -> list[str]:
    """A line for each method and setting that was measured."""
    lines = []
    for method in head.results.get("methods", {}).values():
        for setting, found in method.items():
            speed = found["over_plain"]
            faster = (
                "" if speed is None else f", {speed['median']:.2f}x plain [{speed['low']:.2f}, {speed['high']:.2f}]"
            )
            tau = f"tau {found['tau']:.2f} (raw {found['tau_raw']:.2f})"
            lines.append(f"{setting}: {tau}{faster} ({found['trees'] or 'trees not recorded'})")
    return [*lines, f"on {head.results['hardware']}, {head.results['prompts']} prompts"] if lines else ["no"]


def _add(options: argparse.Namespace) -> None:
    from eagle.cli.zoo_packing import pack
    from eagle.progress import console

    head = pack(
        options.head,
        options.name,
        licence=options.license,
        base_model=options.base_model,
        run=options.run,
        results=options.results,
        zoo=None if options.zoo is None else Path(options.zoo),
    )
    console.print(f"packed {head.bytes / 1e6:.1f} MB into {head.folder}", markup=False, soft_wrap=True)
    if not head.tau:
        console.print(
            f"no results of this head were found: evaluate it (eagle eval RECIPE --head {head.folder}), then add it again "
            "with --results",
            markup=False,
            soft_wrap=True,
        )
