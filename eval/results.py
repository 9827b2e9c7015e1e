"""results.json, summary.md and the table on the terminal, all from one dictionary."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle.eval.answers import FORMAT
from eagle.files import atomic_path, write_json

LABELS = {
    "hf": "HF generate",
    "plain": "plain loop",
    "eagle2": "EAGLE-2 tree",
    "chain": "chain",
}
SMALL_TAU = 2.0
SMALL_HEAD_NOTE = (
    "An acceptance length (tau) of about 1.3 is what a head trained on about 100,000 tokens reaches. Published heads "
    'saw tens of millions of tokens and reach 4 to 6: see "How much data a head needs" in the README.'
)
_HEADINGS = ("method", "tok/s", "ms/tok", "TTFT", "tau", "over HF", "over plain", "exact")
_CATEGORY_HEADINGS = ("category", "requests", "tau", "tok/s", "over HF", "over plain", "exact")


def write_results(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes results.json and summary.md into `folder`, each atomically."""
    with atomic_path(folder / "summary.md") as temporary:
        temporary.write_text(summary_markdown(result), encoding="utf-8")
    write_json(folder / "results.json", result)


def read_results(folder: Path) -> dict[str, Any] | None:
    """The results that lie in `folder`; None when there are none (or of another format)."""
    path = folder / "results.json"
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return result if isinstance(result, dict) and result.get("format") == FORMAT else None


def print_results(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the tables and what there is to say about them."""
    console = console or Console(highlight=False)
    console.print(_rich_table(headline(result), _HEADINGS, method_rows(result)))
    method = "eagle2" if "eagle2" in result["methods"] else "plain"
    if len(result["methods"][method]["categories"]) > 1:
        console.print(_rich_table(f"{LABELS[method]}, by category", _CATEGORY_HEADINGS, category_rows(result, method)))
    for line in notes(result):
        console.print(line, markup=False, soft_wrap=True)


def summary_markdown(result: Mapping[str, Any]) -> str:
    """The same as the terminal shows, with hardware, versions and definitions."""
    lines = ["# Evaluation", "", headline(result), "", *_markdown_table(_HEADINGS, method_rows(result)), ""]
    method = "eagle2" if "eagle2" in result["methods"] else "plain"
    lines += [
        f"## {LABELS[method]}, by category",
        "",
        *_markdown_table(_CATEGORY_HEADINGS, category_rows(result, method)),
    ]
    lines += ["", *(f"- {line}" for line in notes(result)), "", "## Measured on", ""]
    hardware, target, head = result["hardware"], result["target"], result["head"]
    gpus = ", ".join(hardware["gpus"]) or "none"
    lines += [
        f"- target: {target.get('model')} ({result['target_dtype']}), weights {target.get('weights_sha256', '?')}",
        f"- head: {head['path']}, {head['sha256']}",
        f"- {hardware['cpu']}, {hardware['cores']} cores, {hardware['torch_threads']} threads, {hardware['system']}",
        f"- GPU: {gpus}",
        "- " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        f"- commit {result['commit'] or '(installed package)'}, {result['created']}",
        f"- peak resident memory {result['peak_memory']['rss_bytes'] / 2**20:,.0f} MiB",
        "",
        "## Definitions",
        "",
        *(f"- **{name}**: {text}" for name, text in result["definitions"].items()),
        "",
    ]
    return "\n".join(lines)


def headline(result: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    limit = result["recipe"]["eval"]["max_new_tokens"]
    return (
        f"{result['requests']} requests ({result['prompts']} prompts), at most {limit} tokens each, temperature 0, "
        f"{result['target_dtype']}"
    )


def method_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """One row per method, over all requests."""
    rows = []
    for name, method in result["methods"].items():
        row = method["overall"]
        rows.append(
            [
                LABELS.get(name, name),
                f"{row['tokens_per_second']:.1f}",
                _number(row["ms_per_token"], 1),
                _number(row["first_token_ms"], 0) + " ms",
                _number(row["tau"], 2),
                _ratio(row["speedup_hf"]) if name != "hf" else "1",
                _ratio(row["speedup_plain"]) if name not in ("hf", "plain") else "1" if name == "plain" else "",
                _exact(row["exact"]),
            ]
        )
    return rows


def category_rows(result: Mapping[str, Any], method: str) -> list[list[str]]:
    """One row per category of one method, and one over all."""
    rows = []
    for name, row in {**result["methods"][method]["categories"], "all": result["methods"][method]["overall"]}.items():
        rows.append(
            [
                name,
                str(row["requests"]),
                _number(row["tau"], 2),
                f"{row['tokens_per_second']:.1f}",
                _ratio(row["speedup_hf"]),
                _ratio(row["speedup_plain"]),
                _exact(row["exact"]),
            ]
        )
    return rows


def notes(result: Mapping[str, Any]) -> list[str]:
    """Errors, acceptance, divergences and footnotes, a line each."""
    lines = [f"ERROR: {error}" for error in result["errors"]]
    tree = result["methods"].get("eagle2", {}).get("overall")
    if tree:
        lines.append(
            f"tree: acceptance per depth {_rates(tree['acceptance'])}; tau {_number(tree['tau'], 3)} (after "
            f"trimming {_number(tree['tau_trimmed'], 3)}) over {tree['verify_steps']} verify steps"
        )
        for baseline, label in (("speedup_hf", "HF"), ("speedup_plain", "plain")):
            if tree[baseline]:
                lines.append(f"tree: pooled speed-up over {label} (total seconds) {tree[baseline]['pooled']:.2f}x")
    plain = result["methods"].get("plain", {}).get("overall")
    if tree and plain and tree["step_ms"] and plain["step_ms"]:
        lines.append(
            f"tree: a cycle of drafting and verifying takes {tree['step_ms']:.1f} ms, a plain step {plain['step_ms']:.1f} ms: "
            f"it pays where tau exceeds {tree['step_ms'] / plain['step_ms']:.2f}"
        )
    if result["n_alpha"]:
        lines.append(f"chain: n-alpha, n = 0, 1, ...: {_rates(result['n_alpha'])}")
    for found in result["divergences"]:
        kind = "tie" if found["tie"] else "DIFFERENT"
        lines.append(
            f"{found['method']} leaves {found['versus']} ({kind}): {found['prompt']}, turn {found['turn']}, token "
            f"{found['index']}, top-2 logit margin {found['margin']:.2g}"
        )
    for skipped in result["skipped"]:
        lines.append(f"passed over: {skipped['prompt']}, turn {skipped['turn']} ({skipped['reason']})")
    lines.append(
        "over HF, over plain: speed-up, the median over requests of the paired ratio of time per token "
        "[95% bootstrap interval]; TTFT: time to first token"
    )
    if tree and tree["tau"] is not None and tree["tau"] < SMALL_TAU:
        lines.append(SMALL_HEAD_NOTE)
    return lines


def _ratio(value: Mapping[str, float] | None) -> str:
    return "-" if value is None else f"{value['median']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _exact(counts: Mapping[str, int] | None) -> str:
    if counts is None:
        return ""
    text = f"{counts['equal']}/{counts['requests']}"
    text += f" + {counts['ties']} ties" if counts["ties"] else ""
    return text + (f", {counts['different']} DIFFERENT" if counts["different"] else "")


def _rich_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") for cell in row))
    return table


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
