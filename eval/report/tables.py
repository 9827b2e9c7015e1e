"""The tables of an evaluation: the same on the terminal, in summary.md and in report.html."""

from collections.abc import Sequence
from typing import Any

from eagle.eval.report.parts import Table, exact_text, label_of, number, pooled, ratio_text, times
from eagle.eval.results import Results, SettingResult
from eagle.eval.results_parts import LedgerSetting


def method_table(body: SettingResult, caption: str) -> Table:
    """Every method over all requests of a setting."""
    rows = []
    for name, method in body.methods.items():
        row = method.overall
        over_hf = ratio_text(row.speedup_hf) if name != "hf" else "1"
        over_plain = {"plain": "1", "hf": ""}.get(name, ratio_text(row.speedup_plain))
        times_ms = (number(row.ms_per_token, 1), number(row.first_token_ms, 0) + " ms")
        rows.append(
            (
                *(label_of(name), f"{row.tokens_per_second:.1f}", *times_ms, number(row.tau)),
                *(over_hf, over_plain, exact_text(row)),
            )
        )
    return Table(
        caption=caption,
        headings=("method", "tok/s", "ms/tok", "TTFT", "tau", "over HF", "over plain", "exact"),
        rows=tuple(rows),
        strong=list(body.methods).index(body.main),
    )


def category_table(body: SettingResult, caption: str) -> Table:
    """The main method by category, and over all."""
    method = body.methods[body.main]
    return Table(
        caption=caption,
        headings=("category", "requests", "tau", "tok/s", "over HF", "over plain", "exact"),
        rows=tuple(
            (
                *(name, str(row.requests), number(row.tau), f"{row.tokens_per_second:.1f}"),
                *(ratio_text(row.speedup_hf), ratio_text(row.speedup_plain), exact_text(row)),
            )
            for name, row in {**method.categories, "all": method.overall}.items()
        ),
    )


def record_table(result: Results) -> Table | None:
    """What an experiment notes: latency of the baselines and of the method, device use, memory, acceptance."""
    rows = []
    for setting, methods in (result.record or {}).items():
        for name, row in methods.items():
            peak = row.peak_memory.cuda_bytes or row.peak_memory.rss_bytes
            base = (number(row.baseline_inter_token_ms.get(baseline), 1) for baseline in ("hf", "plain"))
            use = "-" if row.device_use is None else f"{100 * row.device_use:.0f}%"
            memory = number(None if peak is None else peak / 2**20, 0)
            rows.append(
                (
                    *(f"{label_of(name)}, {setting}", *base, number(row.inter_token_ms, 1), use, memory),
                    *(number(row.tau), rates(row.acceptance) or "-"),
                )
            )
    return _table(
        "Record table: inter-token latency (p50) in milliseconds, device use, peak memory, acceptance",
        ("method", "HF ms", "plain ms", "its own ms", "device use", "peak MiB", "tau", "acceptance by depth"),
        rows,
    )


def divergence_table(result: Results) -> Table | None:
    """Every answer that leaves its reference, ties included."""
    return _table(
        "Answers that leave those they are held against, at their first different token",
        ("method", "setting", "prompt", "turn", "token", "top-2 margin", "kind"),
        [
            (
                *(label_of(found.method), setting, found.prompt, str(found.turn), str(found.index)),
                *(found.margins.removeprefix("top-2 margin "), found.word),
            )
            for setting, body in result.settings.items()
            for found in body.divergences
        ],
    )


def ledger_tables(one: LedgerSetting) -> list[Table]:
    """The parts of every method's cycle; predicted and measured speed-ups; what was verified for nothing."""
    where = "the other half of the prompts" if one.held_out else "the same prompts"
    tables: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = [
        (
            f"A cycle's parts in milliseconds, {one.setting}",
            ("method", "nodes", "draft", "target(n)", "host", "cycle", "plain step", "tau", "pays from tau"),
            [
                (
                    label_of(entry.method),
                    *(number(part, 1) for part in (entry.nodes, entry.draft_ms, entry.target_ms, entry.host_ms)),
                    *(number(part, 1) for part in (entry.cycle_ms, entry.plain_ms)),
                    *(number(entry.tau), number(entry.breakeven_tau)),
                )
                for entry in one.methods
            ],
        ),
        (
            f"Speed-up over the plain loop behind the prefill: predicted, and measured on {where}, {one.setting}",
            ("method", "predicted", "measured (pooled)", "error", "measured median [95% interval]", "gain"),
            [
                (
                    *(label_of(entry.method), times(entry.predicted), pooled(entry.measured)),
                    *(f"{100 * entry.error:+.1f}%", ratio_text(entry.measured), "yes" if entry.gains else "no"),
                )
                for entry in one.methods
            ],
        ),
        (
            f"Verified nodes and the operations of rejected ones, {one.setting}",
            ("method", "verified", "accepted", "rejected", "share rejected", "GFLOP rejected"),
            [
                (
                    *(label_of(entry.method), f"{spent.nodes_verified:,}", f"{spent.nodes_accepted:,}"),
                    *(f"{spent.nodes_rejected:,}", f"{100 * spent.share:.0f}%"),
                    number(spent.flops_rejected / 1e9, 0),
                )
                for entry in one.methods
                for spent in (entry.rejected,)
            ],
        ),
    ]
    return [Table(caption=caption, headings=headings, rows=tuple(rows)) for caption, headings, rows in tables]


def tune_table(result: Results) -> Table | None:
    """Every tree that decoded in earnest: forecast, measured, and which was kept."""
    tune = result.tune
    if tune is None:
        return None
    return _table(
        f"Trees tried on {tune.hardware}, engine {tune.engine}, {tune.dtype}",
        ("tree", "setting", "batch", "tau", "tokens/s", "forecast", "measured over plain", ""),
        [
            (
                *(tree.name, one.setting, str(one.batch), number(tree.tau), number(tree.tokens_per_second, 1)),
                *(times(None if tree.forecast is None else tree.forecast.speedup), ratio_text(tree.speedup)),
                "kept" if tree.chosen else "",
            )
            for one in tune.measured.batches
            for tree in one.candidates
        ],
    )


def comparison(names: Sequence[str], results: Sequence[Results]) -> Table:
    """One row per setting and method, in the order of their first appearance; per evaluation: tau, tokens/s, over plain."""
    figures: list[dict[tuple[str, str], tuple[str, ...]]] = [
        {
            (setting, name): (
                *(number(method.overall.tau), number(method.overall.tokens_per_second, 1)),
                ratio_text(method.overall.speedup_plain),
            )
            for setting, body in result.settings.items()
            for name, method in body.methods.items()
        }
        for result in results
    ]
    return Table(
        caption="Evaluations side by side",
        headings=("method", *(f"{name} {what}" for name in names for what in ("tau", "tok/s", "over plain"))),
        rows=tuple(
            (f"{label_of(key[1])}, {key[0]}", *(cell for one in figures for cell in one.get(key, ("-",) * 3)))
            for key in dict.fromkeys(key for one in figures for key in one)
        ),
    )


def rates(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _table(caption: str, headings: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> Table | None:
    return Table(caption=caption, headings=headings, rows=tuple(rows)) if rows else None
