"""Reading results.json; summary.md and the tables on the terminal from it. The page is made in report.py."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle.errors import EagleError
from eagle.eval.checks.exactness import kind_of, margins_of
from eagle.eval.ledger.lines import ledger_lines
from eagle.eval.report.parts import number
from eagle.eval.schema import FORMAT, NOT_DESCRIBED, problems, results_schema
from eagle.eval.statistics import FEWEST
from eagle.files import atomic_path

LABELS = {
    "hf": "HF generate",
    "hf-lookup": "HF prompt lookup",
    "hf-assisted": "HF assisted",
    "plain": "plain loop",
    "eagle2": "EAGLE-2 tree",
    "tuned": "tuned tree",
    "default": "default tree",
    "static": "EAGLE-1 tree",
    "chain": "chain",
    "model": "draft model",
    "ngram": "prompt lookup",
}
RESULTS = "results.json"
SMALL_TAU = 2.0
SMALL_HEAD_NOTE = (
    "An acceptance length (tau) below 2 is what a head trained on a million tokens or fewer reaches. Published heads "
    'saw tens of millions of tokens and reach 4 to 6: see "How much data a head needs" in the README.'
)
HEADINGS = ("method", "tok/s", "ms/tok", "TTFT", "tau", "over HF", "over plain", "exact")
RECORD_HEADINGS = ("method", "HF ms", "plain ms", "its own ms", "device use", "peak MiB", "tau", "acceptance by depth")
CATEGORY_HEADINGS = ("category", "requests", "tau", "tok/s", "over HF", "over plain", "exact")


def write_summary(folder: Path, result: Mapping[str, Any]) -> None:
    """Writes summary.md into `folder`, atomically."""
    with atomic_path(folder / "summary.md") as temporary:
        temporary.write_text(summary_markdown(result), encoding="utf-8")


def read_results(folder: Path) -> dict[str, Any] | None:
    """The results that lie in `folder`; None when there are none (or of another format)."""
    try:
        return load_results(folder)
    except EagleError:
        return None


def load_results(folder: Path) -> dict[str, Any]:
    """The results that lie in `folder`. Raises EagleError when there are none, or none that this version reads."""
    path = folder / RESULTS
    if not path.is_file():
        raise EagleError(f"there is no {RESULTS} in {folder}; give the folder that eagle eval wrote (OUTPUT_DIR/eval)")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EagleError(f"{path} is not JSON ({error}); delete it and measure again with eagle eval RECIPE") from error
    found = result.get("format") if isinstance(result, dict) else None
    if found != FORMAT:
        raise EagleError(
            f"{path} has format {found}, this version of eagle reads format {FORMAT}; run eagle eval RECIPE again (it "
            "takes over the answers beside it that it knows)"
        )
    schema = results_schema()
    # What a later version may have added does no harm here.
    wrong = [each for each in problems(result, schema, schema) if not each.endswith(NOT_DESCRIBED)]
    if not wrong:
        settings = result["settings"]
        wrong = [] if settings else ["results.settings is empty"]
        wrong += [
            f"results.settings.{name}.methods.plain is missing"
            for name in settings
            if "plain" not in settings[name]["methods"]
        ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise EagleError(
            f"{path} is damaged or was changed: {wrong[0]}{more}; delete it and run eagle eval RECIPE again (the answers beside "
            "it are kept)"
        )
    return dict(result)


def print_results(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints the tables and what there is to say about them."""
    console = console or Console(highlight=False)
    for setting, body in result["settings"].items():
        console.print(rich_table(headline(result, setting), HEADINGS, method_rows(body)))
        method = main_method(body)
        if len(body["methods"][method]["categories"]) > 1:
            title = f"{label_of(method)}, by category"
            console.print(rich_table(title, CATEGORY_HEADINGS, category_rows(body, method)))
        for line in notes(body):
            console.print(line, markup=False, soft_wrap=True)
    for line in footnotes(result):
        console.print(line, markup=False, soft_wrap=True)


def summary_markdown(result: Mapping[str, Any]) -> str:
    """The same as the terminal shows, with hardware, versions and definitions."""
    lines = ["# Evaluation", ""]
    for setting, body in result["settings"].items():
        method = main_method(body)
        lines += [f"## {headline(result, setting)}", "", *markdown_table(HEADINGS, method_rows(body)), ""]
        lines += [f"### {label_of(method)}, by category", ""]
        lines += [*markdown_table(CATEGORY_HEADINGS, category_rows(body, method)), ""]
        lines += [*(f"- {line}" for line in notes(body)), ""]
    lines += [*(f"- {line}" for line in footnotes(result)), ""]
    if result.get("record"):
        lines += ["## Record table", "", "Inter-token latency: p50, in milliseconds.", ""]
        lines += [*markdown_table(RECORD_HEADINGS, record_rows(result["record"])), ""]
    lines += ["## Measured on", ""]
    hardware, target, head = result["hardware"], result["target"], result["head"]
    gpus = ", ".join(hardware["gpus"]) or "none"
    lines += [
        f"- target: {target.get('model')} ({result['target_dtype']}), weights {target.get('weights_sha256', '?')}",
        f"- head: {head['path']}, {head['sha256']}",
        f"- {hardware['cpu']}, {hardware['cores']} cores, {hardware['torch_threads']} threads, {hardware['system']}",
        f"- GPU: {gpus}",
        f"- {runs_on(result)}",
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


def runs_on(result: Mapping[str, Any]) -> str:
    """The engine and what multiplies by the weights, in words."""
    runs = result.get("runs", {})
    products = Counter(runs.get("products", {}).values())
    counted = ", ".join(f"{count} shapes of weights {name}" for name, count in sorted(products.items()))
    return f"engine {runs.get('engine', 'not recorded')}" + (f" ({counted})" if counted else "")


def trees_of(method: Mapping[str, Any]) -> str:
    """The trees that a method drafted, in words; "": none, or none recorded."""
    return " and ".join(method.get("trees", ()))


def trees_line(body: Mapping[str, Any]) -> str:
    """The trees that a setting's methods drafted; "": none."""
    drafted = {label_of(name): trees for name, method in body["methods"].items() if (trees := trees_of(method))}
    return "trees: " + "; ".join(f"{label} ({trees})" for label, trees in drafted.items()) if drafted else ""


def headline(result: Mapping[str, Any], setting: str) -> str:
    """What was measured under one setting, in one line."""
    titles = ", ".join(one["title"] for one in result.get("suites", []))
    return (
        f"{setting}: {result['settings'][setting]['requests']} requests ({result['prompts']} prompts of {titles or '?'}), at "
        f"most {result['recipe']['eval']['max_new_tokens']} tokens each, {result['target_dtype']}"
    )


def method_rows(body: Mapping[str, Any]) -> list[list[str]]:
    """One row per method, over all requests of a setting."""
    rows = []
    for name, method in body["methods"].items():
        row = method["overall"]
        rows.append(
            [
                label_of(name),
                f"{row['tokens_per_second']:.1f}",
                number(row["ms_per_token"], 1),
                number(row["first_token_ms"], 0) + " ms",
                number(row["tau"], 2),
                ratio_text(row["speedup_hf"]) if name != "hf" else "1",
                ratio_text(row["speedup_plain"]) if name not in ("hf", "plain") else "1" if name == "plain" else "",
                exact_text(row),
            ]
        )
    return rows


def category_rows(body: Mapping[str, Any], method: str) -> list[list[str]]:
    """One row per category of one method, and one over all."""
    rows = []
    for name, row in {**body["methods"][method]["categories"], "all": body["methods"][method]["overall"]}.items():
        rows.append(
            [
                name,
                str(row["requests"]),
                number(row["tau"], 2),
                f"{row['tokens_per_second']:.1f}",
                ratio_text(row["speedup_hf"]),
                ratio_text(row["speedup_plain"]),
                exact_text(row),
            ]
        )
    return rows


def record_rows(record: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """What an experiment notes: latency of the baselines and of the method, device use, memory, acceptance."""
    rows = []
    for setting, methods in record.items():
        for name, row in methods.items():
            base, memory = row["baseline_inter_token_ms"], row["peak_memory"]
            peak = memory["cuda_bytes"] or memory["rss_bytes"]
            rows.append(
                [
                    f"{label_of(name)}, {setting}",
                    number(base.get("hf"), 1),
                    number(base.get("plain"), 1),
                    number(row["inter_token_ms"], 1),
                    "-" if row["device_use"] is None else f"{100 * row['device_use']:.0f}%",
                    "-" if peak is None else f"{peak / 2**20:,.0f}",
                    number(row["tau"], 2),
                    _rates(row["acceptance"]) or "-",
                ]
            )
    return rows


def notes(body: Mapping[str, Any]) -> list[str]:
    """A setting's errors, trees, acceptance, time split and divergences, a line each."""
    lines = [f"ERROR: {error}" for error in body["errors"]]
    lines += filter(None, [trees_line(body)])
    main = main_method(body)
    row, plain = body["methods"][main]["overall"], body["methods"]["plain"]["overall"]
    if row["tau"] is not None:
        lines.append(
            f"{label_of(main)}: acceptance per depth {_rates(row['acceptance'])}; tau {number(row['tau'], 3)} (raw, "
            f"before EOS and the length limit cut: {number(row['tau_raw'], 3)}) over {row['verify_steps']} verify steps"
        )
        for baseline, label in (("speedup_hf", "HF"), ("speedup_plain", "plain")):
            if row[baseline]:
                lines.append(
                    f"{label_of(main)}: pooled speed-up over {label} (seconds for as many tokens) "
                    f"{row[baseline]['pooled']:.2f}x"
                )
    if row["tau"] is not None and row["step_ms"] and plain["step_ms"]:
        lines.append(
            f"{label_of(main)}: a cycle of drafting and verifying takes {row['step_ms']:.1f} ms, a plain step "
            f"{plain['step_ms']:.1f} ms: it pays where tau exceeds {row['step_ms'] / plain['step_ms']:.2f}"
        )
    for name in dict.fromkeys(("plain", main)):
        shares = body["methods"][name]["overall"]["shares"]
        if shares:
            lines.append(
                f"{label_of(name)}: time " + ", ".join(f"{key} {100 * part:.1f}%" for key, part in shares.items())
            )
    if body["n_alpha"]:
        lines.append(f"chain: n-alpha, n = 0, 1, ...: {_rates(body['n_alpha'])}")
    for found in body["divergences"]:
        lines.append(
            f"{found['method']} leaves {found['versus']} ({kind_of(found)}): {found['prompt']}, turn {found['turn']}, token "
            f"{found['index']}, {margins_of(found)}"
        )
    return lines


def footnotes(result: Mapping[str, Any]) -> list[str]:
    """What holds for all settings."""
    lines = [
        f"passed over: {skipped['prompt']}, turn {skipped['turn']}, {skipped['setting']} ({skipped['reason']})"
        for skipped in result["skipped"]
    ]
    lines += [f"{one['title']}: {one['note']}" for one in result.get("suites", []) if one["note"]]
    lines += [f"{curve['setting']}, rows together: {curve['verdict']}" for curve in result.get("throughput", [])]
    if result.get("processes", {}).get("note"):
        lines.append(f"{result['processes']['processes']} processes: {result['processes']['note']}")
    lines += ledger_lines(result.get("ledger"))
    lines.append(
        "over HF, over plain: speed-up, the median over requests of the paired ratio of time per token "
        f"[95% bootstrap interval over {drawn_words(result)}, of {FEWEST} or more]; TTFT: time to first token; exact, by law, "
        "lossy: see the definitions in summary.md"
    )
    bodies = result["settings"].values()
    taus = [body["methods"][main_method(body)]["overall"]["tau"] for body in bodies]
    if any(tau is not None and tau < SMALL_TAU for tau in taus):
        lines.append(SMALL_HEAD_NOTE)
    return lines


def main_method(body: Mapping[str, Any]) -> str:
    """The one whose categories and time split are shown: the EAGLE-2 tree, else the first drafter of ours, else plain."""
    drafting = [name for name in body["methods"] if name not in ("hf", "hf-lookup", "hf-assisted", "plain")]
    return "eagle2" if "eagle2" in drafting else (drafting or ["plain"])[0]


def label_of(name: str) -> str:
    """A method's name as it is shown."""
    drafter, _, rule = name.partition("@")
    return LABELS.get(drafter, drafter) + (f", {rule}" if rule else "")


def ratio_text(value: Mapping[str, float] | None) -> str:
    """A speed-up with its interval; alone where there are too few samples for one, or none of them differs."""
    if value is None:
        return "-"
    alone = value["units"] < FEWEST or value["low"] == value["high"]
    return f"{value['median']:.2f}x" + ("" if alone else f" [{value['low']:.2f}, {value['high']:.2f}]")


def drawn_words(result: Mapping[str, Any]) -> str:
    """What the speed-ups' intervals drew."""
    rows = [method["overall"] for body in result["settings"].values() for method in body["methods"].values()]
    found = {row[key]["unit"] for row in rows for key in ("speedup_hf", "speedup_plain") if row[key] is not None}
    return (
        "turns (as if those of one prompt were independent)" if "turn" in found else "prompts (each with all its turns)"
    )


def _rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def exact_text(row: Mapping[str, Any]) -> str:
    """How many answers equal those they are held against, or why nothing is."""
    counts = row["exact"]
    if counts is None:
        return {"distribution": "by law", "lossy": "lossy", "none": ""}.get(row["check"], "not checked")
    text = f"{counts['equal']}/{counts['requests']}"
    routers = f" ({counts['router_ties']} of routers)" if counts.get("router_ties") else ""
    text += f" + {counts['ties']} ties{routers}" if counts["ties"] else ""
    return text + (f", {counts['different']} DIFFERENT" if counts["different"] else "")


def rich_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal; intervals go below their ratios."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(cell.replace(" [", "\n[") for cell in row))
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
