"""An evaluation in the words of a model card."""

from collections.abc import Mapping
from typing import Any

from eagle.eval.results import HEADINGS, drawn_words, headline, markdown_table, method_rows, trees_line


def results_section(result: Mapping[str, Any]) -> str:
    """Markdown of an evaluation (`eagle.eval.results.load_results`): every method's figures, trees and the hardware."""
    lines: list[str] = []
    for setting, body in result["settings"].items():
        lines += [f"{headline(result, setting)}:", "", *markdown_table(HEADINGS, method_rows(body)), ""]
        trees = trees_line(body)
        lines += [f"{trees[:1].upper()}{trees[1:]}.", ""] if trees else []
    hardware = result["hardware"]
    gpus = ", ".join(hardware["gpus"]) or "no GPU"
    named = [f"{key} {value}" for key, value in result["versions"].items() if key in ("torch", "transformers")]
    engine = result["recipe"]["decode"].get("engine")
    lines.append(
        f"Measured on {hardware['cpu']}, {hardware['cores']} cores, {gpus}, {hardware['system']}"
        f"{'' if engine is None else f', engine {engine}'}; {', '.join(named)}; commit "
        f"{result['commit'] or 'of an installed package'}, {result['created']}. tau: tokens per verification that "
        "reached the answers; over HF, over plain: speed-up, median of paired ratios with its 95% interval over "
        f"{drawn_words(result)}."
    )
    return "\n".join(lines)
