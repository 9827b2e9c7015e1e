"""`eagle report`: the page of an evaluation from its results.json, without measuring anything."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `eagle report`."""
    parser.description = (
        "Makes report.html and summary.md anew from results.json, without measuring anything. With several folders: one table "
        "on the terminal that puts their main figures side by side (ratios of different machines or prompts do not compare)."
    )
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="what eagle eval wrote: OUTPUT_DIR/eval"
    )


def report(options: argparse.Namespace) -> None:
    """Writes the pages, prints where they lie, and the comparison of several."""
    from eagle.eval.report.page import report_folders

    report_folders(options.folders)
