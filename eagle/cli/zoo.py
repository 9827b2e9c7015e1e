"""`eagle zoo`: the heads that come with this package; `eagle zoo add` packs another."""

import argparse
from pathlib import Path

from eagle.errors import EagleError


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
        for line in _measured(head.folder):
            print(f"    measured         {line}")
        print(f"    papers           {head.folder}")


def _measured(folder: Path) -> list[str]:
    """A line for each method and setting that was measured: of the trees asked for and of the tuned ones."""
    from eagle.eval.report.parts import number, ratio_text
    from eagle.eval.results import RESULTS, load_results

    if not (folder / RESULTS).is_file():
        return ["no"]
    results, lines = load_results(folder), []
    for name in ("eagle2", "tuned"):
        for setting, body in results.settings.items():
            if name in body.methods:
                row, trees = body.methods[name].overall, body.methods[name].trees
                faster = "" if row.speedup_plain is None else f", {ratio_text(row.speedup_plain)} over plain"
                tau = f"tau {number(row.tau)} (raw {number(row.tau_raw)})"
                lines.append(f"{setting}: {tau}{faster} ({' and '.join(trees) or 'trees not recorded'})")
    machine = results.hardware
    return [*lines, f"on {machine.cpu}, {machine.cores} cores, {machine.gpu or 'no GPU'}, {results.prompts} prompts"]


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
    if not (head.folder / "results.json").is_file():
        console.print(
            f"no results of this head were found: evaluate it (eagle eval RECIPE --head {head.folder}), then add it again "
            "with --results",
            markup=False,
            soft_wrap=True,
        )
