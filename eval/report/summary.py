"""An evaluation in words and tables: on the terminal, in summary.md and on a model card."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle.eval.report.parts import Table, label_of, number, pooled, times
from eagle.eval.report.tables import category_table, method_table, rates, record_table
from eagle.eval.report.verdict import facts, versions_of
from eagle.eval.results import Hardware, Method, Results, SettingResult, parse
from eagle.eval.statistics import FEWEST
from eagle.files import atomic_path

SMALL_TAU = 2.0
SMALL_HEAD_NOTE = (
    "An acceptance length (tau) below 2 is what a head trained on a million tokens or fewer reaches. Published heads "
    'saw tens of millions of tokens and reach 4 to 6: see "How much data a head needs" in the README.'
)


def write_text(path: Path, text: str) -> None:
    """Atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def print_tables(
    tables: Sequence[Table], lines: Iterable[str], console: Console | None = None, *, style: str = ""
) -> None:
    """Tables, and what there is to say about them."""
    console = console or Console(highlight=False)
    for table in tables:
        console.print(table.for_terminal())
    for line in lines:
        console.print(line, markup=False, soft_wrap=True, style=style)


def print_results(values: Mapping[str, Any], console: Console | None = None) -> None:
    """values: results.json's."""
    result = parse(Results, values)
    for setting, body in result.settings.items():
        tables = [method_table(body, headline(result, setting)), _categories(body)]
        print_tables(tables if len(tables[1].rows) > 2 else tables[:1], notes(body), console)
    print_tables([], footnotes(result), console)


def summary_markdown(result: Results) -> str:
    """The same as the terminal shows, with hardware, versions and definitions."""
    lines = ["# Evaluation", ""]
    for setting, body in result.settings.items():
        for level, table in (("##", method_table(body, headline(result, setting))), ("###", _categories(body))):
            lines += [f"{level} {table.caption}", "", *table.markdown(), ""]
        lines += [*bullets(notes(body)), ""]
    lines += [*bullets(footnotes(result)), ""]
    record = record_table(result)
    if record is not None:
        lines += ["## Record table", "", "Inter-token latency: p50, in milliseconds.", "", *record.markdown(), ""]
    lines += ["## Measured on", "", *bullets(f"{name}: {value}" for name, value in facts(result))]
    lines += ["", "## Definitions", "", *bullets(f"**{name}**: {text}" for name, text in result.definitions.items())]
    return "\n".join([*lines, ""])


def card_section(result: Results) -> str:
    """Markdown for a model card: every method's figures, trees and the hardware."""
    lines: list[str] = []
    for setting, body in result.settings.items():
        table = method_table(body, headline(result, setting))
        lines += [f"{table.caption}:", "", *table.markdown(), ""]
        trees = trees_line(body)
        lines += [f"{trees[:1].upper()}{trees[1:]}.", ""] if trees else []
    machine, engine = result.hardware, result.asked.decode.engine
    named = [f"{key} {value}" for key, value in result.versions.items() if key in ("torch", "transformers")]
    lines.append(
        f"Measured on {machine.cpu}, {machine.cores} cores, {machine.gpu or 'no GPU'}, {machine.system}"
        f"{'' if engine is None else f', engine {engine}'}; {', '.join(named)}; commit "
        f"{result.commit or 'of an installed package'}, {result.created}. tau: tokens per verification that "
        "reached the answers; over HF, over plain: speed-up, median of paired ratios with its 95% interval over "
        f"{drawn_words(result)}."
    )
    return "\n".join(lines)


def measured_on(values: Mapping[str, Any]) -> list[str]:
    """The last part of a comparison's Markdown. values: its hardware, versions and commit."""
    machine = parse(Hardware, values["hardware"])
    gpu = f"GPU: {machine.gpu or 'none'}; commit {values['commit'] or '(installed package)'}"
    return ["", "## Measured on", "", *bullets([str(machine), gpu, versions_of(values["versions"])]), ""]


def _categories(body: SettingResult) -> Table:
    return category_table(body, f"{label_of(body.main)}, by category")


def bullets(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def trees_of(method: Method) -> str:
    """The trees that a method drafted, in words; "": none, or none recorded."""
    return " and ".join(method.trees)


def trees_line(body: SettingResult) -> str:
    """The trees that a setting's methods drafted; "": none."""
    drafted = [f"{label_of(name)} ({trees})" for name, method in body.methods.items() if (trees := trees_of(method))]
    return "trees: " + "; ".join(drafted) if drafted else ""


def headline(result: Results, setting: str) -> str:
    """What was measured under one setting, in one line."""
    titles = ", ".join(one.title for one in result.suites)
    return (
        f"{setting}: {result.settings[setting].requests} requests ({result.prompts} prompts of {titles or '?'}), at "
        f"most {result.asked.eval.max_new_tokens} tokens each, {result.target_dtype}"
    )


def notes(body: SettingResult) -> list[str]:
    """A setting's errors, trees, acceptance, time split and divergences, a line each."""
    lines = [f"ERROR: {error}" for error in body.errors]
    lines += filter(None, [trees_line(body)])
    main, row, plain = label_of(body.main), body.main_figures, body.methods["plain"].overall
    if row.tau is not None:
        lines.append(
            f"{main}: acceptance per depth {rates(row.acceptance)}; tau {number(row.tau, 3)} (raw, "
            f"before EOS and the length limit cut: {number(row.tau_raw, 3)}) over {row.verify_steps} verify steps"
        )
        lines += [
            f"{main}: pooled speed-up over {label} (seconds for as many tokens) {pooled(ratio)}"
            for label, ratio in (("HF", row.speedup_hf), ("plain", row.speedup_plain))
            if ratio is not None
        ]
    if row.tau is not None and row.step_ms and plain.step_ms:
        lines.append(
            f"{main}: a cycle of drafting and verifying takes {row.step_ms:.1f} ms, a plain step "
            f"{plain.step_ms:.1f} ms: it pays where tau exceeds {row.step_ms / plain.step_ms:.2f}"
        )
    for name in dict.fromkeys(("plain", body.main)):
        shares = body.methods[name].overall.shares
        if shares:
            split = ", ".join(f"{key} {100 * part:.1f}%" for key, part in shares.items())
            lines.append(f"{label_of(name)}: time {split}")
    if body.n_alpha:
        lines.append(f"chain: n-alpha, n = 0, 1, ...: {rates(body.n_alpha)}")
    lines += [
        f"{found.method} leaves {found.versus} ({found.word}): {found.prompt}, turn {found.turn}, token "
        f"{found.index}, {found.margins}"
        for found in body.divergences
    ]
    return lines


def footnotes(result: Results) -> list[str]:
    """What holds for all settings."""
    lines = [f"passed over: {one.prompt}, turn {one.turn}, {one.setting} ({one.reason})" for one in result.skipped]
    lines += [f"{one.title}: {one.note}" for one in result.suites if one.note]
    lines += [f"{curve.setting}, rows together: {curve.verdict}" for curve in result.throughput]
    if result.processes.note:
        lines.append(f"{result.processes.processes} processes: {result.processes.note}")
    lines += ledger_lines(result)
    lines.append(
        "over HF, over plain: speed-up, the median over requests of the paired ratio of time per token "
        f"[95% bootstrap interval over {drawn_words(result)}, of {FEWEST} or more]; TTFT: time to first token; exact, by law, "
        "lossy: see the definitions in summary.md"
    )
    taus = [body.main_figures.tau for body in result.settings.values()]
    if any(tau is not None and tau < SMALL_TAU for tau in taus):
        lines.append(SMALL_HEAD_NOTE)
    return lines


def drawn_words(result: Results) -> str:
    """What the speed-ups' intervals drew."""
    rows = [method.overall for body in result.settings.values() for method in body.methods.values()]
    found = {ratio.unit for row in rows for ratio in (row.speedup_hf, row.speedup_plain) if ratio is not None}
    return (
        "turns (as if those of one prompt were independent)" if "turn" in found else "prompts (each with all its turns)"
    )


def ledger_lines(result: Results) -> list[str]:
    """What the ledger says."""
    lines = []
    for one in result.ledger.settings if result.ledger is not None else []:
        for entry in one.methods:
            name, rejected, diagnosis = f"{one.setting}, {entry.method}", entry.rejected, entry.diagnosis
            lines += [
                f"ledger, {name}: cycle {entry.cycle_ms:.1f} ms (draft {entry.draft_ms:.1f}, target "
                f"{entry.target_ms:.1f} for {entry.nodes:.0f} nodes, host {entry.host_ms:.1f}), plain step "
                f"{entry.plain_ms:.1f} ms; tau {entry.tau:.2f}, pays from {entry.breakeven_tau:.2f} on",
                f"ledger, {name}: predicted {times(entry.predicted)}, measured {pooled(entry.measured)} on "
                f"{'the other' if one.held_out else 'the same'} prompts ({100 * entry.error:+.1f}%); rejected nodes "
                f"{100 * rejected.share:.0f}% of {rejected.nodes_verified:,}, {rejected.flops_rejected / 1e9:,.0f} GFLOP",
                f"diagnosis, {name}: {diagnosis.name}: {diagnosis.figure}; {diagnosis.change}",
            ]
        if one.curve and one.crossing is not None:
            points = ", ".join(
                f"{p.batch}: {times(p.predicted)}" + ("" if p.measured is None else f" ({times(p.measured)})")
                for p in one.curve
            )
            falls = (("predicted", one.crossing.predicted), ("measured", one.crossing.measured))
            where = "; ".join(f"{name} {at:.1f}" for name, at in falls if at is not None)
            lines.append(
                f"ledger, {one.setting}, {one.main}: speed-up by batch, predicted (measured): {points}"
                + (f"; falls through 1 for good at batch {where}" if where else "")
            )
    return lines
