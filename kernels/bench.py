"""Every kernel's benchmark in one table, with the hardware, the versions and the commit.

    python -m eagle.kernels.bench --output table.md           with a GPU: times, roofline share, others beside it
    python -m eagle.kernels.bench --kernel tree_attention     without one: correctness only

Ends in one JSON line; exit code 1 when a result is wrong. What a kernel measures is what `cases(device)` in its bench.py
yields.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle.errors import EagleError
from eagle.kernels.measure import interpret_without_gpu, report


def folders() -> list[str]:
    """Kernels that have a benchmark."""
    return sorted(file.parent.name for file in Path(__file__).parent.glob("*/bench.py"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eagle.kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kernel", action="append", help="a kernel folder; may be given again; all of them otherwise")
    parser.add_argument("--match", default="", help="only cases whose name contains this text")
    parser.add_argument("--output", type=Path, help="also write the table to this file, and the JSON beside it (.json)")
    args = parser.parse_args(arguments)
    unknown = set(args.kernel or ()) - set(folders())
    if unknown:
        raise EagleError(f"no benchmark of {', '.join(sorted(unknown))}; expected some of {', '.join(folders())}")
    device = interpret_without_gpu()
    cases = (
        case
        for kernel in args.kernel or folders()
        for case in importlib.import_module(f"eagle.kernels.{kernel}.bench").cases(device)
        if args.match in case.name
    )
    return report(cases, output=args.output)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EagleError as error:
        sys.exit(f"error: {error}")
