"""What the ledger says, in lines for the terminal and summary.md."""

from collections.abc import Mapping
from typing import Any


def ledger_lines(body: Mapping[str, Any] | None) -> list[str]:
    """body: results.json's `ledger`; None: nothing to say."""
    lines = []
    for one in [] if body is None else body["settings"]:
        for entry in one["methods"]:
            name = f"{one['setting']}, {entry['method']}"
            measured, gain, rejected = entry["measured"], entry["gain"], entry["rejected"]
            others = "the other" if one["held_out"] else "the same"
            lines.append(
                f"ledger, {name}: cycle {entry['cycle_ms']:.1f} ms (draft {entry['draft_ms']:.1f}, target "
                f"{entry['target_ms']:.1f} for {entry['nodes']:.0f} nodes, host {entry['host_ms']:.1f}), plain step "
                f"{entry['plain_ms']:.1f} ms; tau {entry['tau']:.2f}, pays from {gain['breakeven_tau']:.2f} on"
            )
            lines.append(
                f"ledger, {name}: predicted {entry['predicted']:.2f}x, measured "
                f"{measured['pooled']:.2f}x on {others} prompts ({100 * entry['error']:+.1f}%); rejected nodes "
                f"{100 * rejected['share']:.0f}% of {rejected['nodes_verified']:,}, {rejected['flops_rejected'] / 1e9:,.0f} GFLOP"
            )
            diagnosis = entry["diagnosis"]
            lines.append(f"diagnosis, {name}: {diagnosis['name']}: {diagnosis['figure']}; {diagnosis['change']}")
        if one["curve"]:
            points = ", ".join(
                f"{p['batch']}: {p['predicted']:.2f}x" + ("" if p["measured"] is None else f" ({p['measured']:.2f}x)")
                for p in one["curve"]
            )
            crossing = one["crossing"]
            where = "; ".join(f"{name} {at:.1f}" for name, at in crossing.items() if at is not None)
            lines.append(
                f"ledger, {one['setting']}, {one['main']}: speed-up by batch, predicted (measured): {points}"
                + (f"; falls through 1 for good at batch {where}" if where else "")
            )
    return lines
