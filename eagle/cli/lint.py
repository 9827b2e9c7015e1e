"""`eagle lint`: what breaks when a runtime loads a head, and whether every way of running it gives the same logits."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from eagle.cli.import_ import add_trust
from eagle.errors import EagleError

if TYPE_CHECKING:
    from eagle.config import TargetConfig
    from eagle.formats.lint.check import Report

PARITY = ("prompts", "limit", "depth", "tolerance", "formats")
"""Options of --parity alone."""
_STYLES = {"breaks": "bold red", "silently wrong": "red", "warning": "yellow"}
EPILOG = """\
The folder is read as the runtime would read it, so that also a head that `eagle` itself refuses can be looked at.
breaks: loading or drafting ends in an error there. silently wrong: it runs, with other drafts than the trained head's.
Exit codes: 0 sound (there may be warnings), 1 something breaks or goes wrong silently, or a parity tolerance is exceeded,
2 a mistake in the command.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle lint`."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("head", metavar="HEAD", nargs="?", help="the head's folder, hub id, or a name of `eagle zoo`")
    parser.add_argument(
        "--for",
        dest="runtime",
        choices=["vllm", "sglang", "speculators", "reference"],
        help="whose loader to look with (reference: the EAGLE authors' code)",
    )
    parser.add_argument(
        "--target", metavar="MODEL", help="also hold it against this target: folder, hub id, .gguf file"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rules", action="store_true", help="list the rules and stop")
    parity = parser.add_argument_group("parity", "needs --target")
    parity.add_argument(
        "--parity",
        action="store_true",
        help="largest logit difference per draft depth between training, decoding, and each format exported and imported again",
    )
    parity.add_argument("--prompts", nargs="+", metavar="FILE", help="prompt files (default: shipped:mt_bench)")
    parity.add_argument("--limit", type=int, metavar="N", help="prompts per file (default: 4)")
    parity.add_argument("--depth", type=int, metavar="D", help="draft depths compared (default: 4)")
    parity.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference, as a share of the largest logit (default: measured, by what rounding alone moves)",
    )
    parity.add_argument(
        "--formats", nargs="*", metavar="F", help="formats to export to (default: all that take the head)"
    )


def lint(options: argparse.Namespace) -> int:
    """Prints the findings, or the parity table; returns the exit code."""
    if options.rules:
        return _print_rules()
    if options.head is None:
        raise EagleError("no head; give its folder: eagle lint HEAD --for vllm")
    if options.runtime is None and not options.parity:
        raise EagleError("no runtime; give --for vllm, sglang, speculators or reference (or --parity)")
    given = [f"--{name}" for name in PARITY if getattr(options, name) is not None]
    if given and not options.parity:
        raise EagleError(f"{', '.join(given)} without --parity: no effect; add --parity")
    if options.parity:
        return _parity(options)
    from eagle.formats.files import head_folder
    from eagle.formats.lint.check import lint

    folder = head_folder(options.head)
    report = lint(folder, runtime=options.runtime, target=_target(options.target, folder, options.trust_remote_code))
    if options.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    return 0 if report.sound else 1


def _target(model: str | None, folder: Path, trust_remote_code: bool) -> "TargetConfig | None":
    """The target as it was loaded for the head's training, where the head's papers say so."""
    from eagle.formats.target_facts import settings_as_trained

    return None if model is None else settings_as_trained(model, folder, trust_remote_code=trust_remote_code)


def _print(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from eagle.formats.lint.rules import NAMES

    console = Console(highlight=False)
    against = f", target {report.target}" if report.target else " (without --target: not held against a target)"
    kind = {"eagle1": "EAGLE-1", "eagle3": "EAGLE-3"}[report.version]
    console.print(f"{report.head}: an {kind} head, read as {NAMES[report.runtime]} would{against}", markup=False)
    if not report.findings:
        console.print("nothing found", style="green")
        return
    table = Table(box=None, padding=(0, 2, 1, 0), show_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("what was found, what happens there, the remedy", overflow="fold")
    for finding in report.findings:
        severity = Text(finding.severity, style=_STYLES[finding.severity])
        said = Text(finding.evidence) + Text(f"\n{finding.effect}", style="dim") + Text(f"\nremedy: {finding.remedy}")
        table.add_row(Text(finding.rule, style="bold") + Text("\n") + severity, said)
    console.print(table)
    counts = {kind: sum(finding.severity == kind for finding in report.findings) for kind in _STYLES}
    console.print(", ".join(f"{count} {kind}" for kind, count in counts.items() if count), markup=False)


def _print_rules() -> int:
    from eagle.formats.lint.check import rules

    for id, about in rules().items():
        print(f"{id:24} {about}")
    return 0


def _parity(options: argparse.Namespace) -> int:
    from eagle.cli.parity import parity, print_parity

    if options.target is None:
        raise EagleError("--parity runs the head behind its target; give --target MODEL")
    if options.runtime is not None:
        raise EagleError("--for and --parity are two different looks at a head; give one at a time")
    result = parity(
        options.head,
        target=options.target,
        prompts=tuple(options.prompts or ("shipped:mt_bench",)),
        limit=4 if options.limit is None else options.limit,
        depth=4 if options.depth is None else options.depth,
        tolerance=options.tolerance,
        formats=options.formats,
        trust_remote_code=options.trust_remote_code,
    )
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_parity(result)
    return 0 if result["within"] else 1
