"""What preparation counted: rows, samples, tokens, repairs and rejections, and how the terminal shows them."""

import dataclasses
from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from eagle.data.render import Rendered, Sample
from eagle.data.sources import Rejected

SHOWN = 3
"""Rejected rows named per reason, on the terminal and in the error."""


@dataclasses.dataclass
class Tally:
    """Counts of one preparation; memory does not grow with the data."""

    rows: int = 0
    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    turns: int = 0
    turns_beyond_max_len: int = 0
    turns_not_learnt: int = 0
    cut: int = 0
    longest: int = 0
    split_samples: Counter[str] = dataclasses.field(default_factory=Counter)
    split_tokens: Counter[str] = dataclasses.field(default_factory=Counter)
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: dict[str, list[Rejected]] = dataclasses.field(default_factory=dict)

    def reject(self, rejected: Rejected) -> None:
        """Counts a row that is not used; the first few of each reason are kept to be named."""
        self.skipped[rejected.reason] += 1
        kept = self.examples.setdefault(rejected.reason, [])
        if len(kept) < SHOWN:
            kept.append(rejected)

    def keep(self, rendered: Rendered) -> None:
        """Counts a conversation that is used."""
        self.conversations += 1
        self.turns_beyond_max_len += rendered.turns_beyond
        self.turns_not_learnt += rendered.turns_not_learnt
        self.notes.update(rendered.notes)

    def add(self, sample: Sample, *, split: str) -> None:
        """Counts one written sample."""
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.supervised_tokens += sum(sample.loss_mask)
        self.turns += sample.turns
        self.cut += sample.cut
        self.longest = max(self.longest, len(sample.input_ids))
        self.split_samples[split] += 1
        self.split_tokens[split] += len(sample.input_ids)

    @property
    def skipped_rows(self) -> int:
        return sum(self.skipped.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "examples"]
        values = {name: getattr(self, name) for name in names}
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values.items()}

    def reasons(self) -> str:
        """One line per reason with the rows that show it: file:line and what was wrong there."""
        lines = []
        for reason, count in self.skipped.most_common():
            lines.append(f"  {count} x {reason}")
            lines += [f"      {item.origin}" + f": {item.detail}" * bool(item.detail) for item in self.examples[reason]]
            if count > len(self.examples[reason]):
                lines.append("      ...")
        return "\n".join(lines)

    def table(self, *, title: str) -> RenderableType:
        """The report of a preparation. Texts from the data are never read as markup."""
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(justify="left")
        table.add_column(justify="right")
        shown: dict[str, int | str] = {
            "rows read": self.rows,
            "conversations kept": self.conversations,
            "rows skipped": self.skipped_rows,
            "samples (train / validation)": self._splits(self.split_samples),
            "tokens (train / validation)": self._splits(self.split_tokens),
            "supervised tokens": f"{self.supervised_tokens:,} ({self.supervised_tokens / max(self.tokens, 1):.0%})",
            "assistant turns": self.turns,
            "samples cut at max_len": self.cut,
            "turns beyond max_len": self.turns_beyond_max_len,
            "turns left out by loss flags": self.turns_not_learnt,
            "longest sample": f"{self.longest:,} tokens",
        }
        for name, value in shown.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
        if self.notes:
            table.add_section()
            for note, count in self.notes.most_common():
                table.add_row(Text(note), f"{count:,}")
        for reason, count in self.skipped.most_common():
            table.add_section()
            table.add_row(Text(f"skipped: {reason}", style="yellow"), f"{count:,}")
            for item in self.examples[reason]:
                table.add_row(Text(f"  {item.origin}" + f" ({item.detail})" * bool(item.detail), style="dim"), "")
        return table

    def _splits(self, counts: Counter[str]) -> str:
        return f"{counts['train']:,} / {counts['validation']:,}"
