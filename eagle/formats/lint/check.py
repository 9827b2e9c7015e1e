"""`eagle lint`: what breaks when a runtime loads a head's folder, why, and what to do about it.

    report = lint("runs/mine/head", runtime="vllm", target=TargetConfig(model="Qwen/Qwen3-8B"))
    report.findings[0].rule, .severity, .evidence, .effect, .remedy

The folder is read as the runtime would, not by our own strict loader; rules are in eagle/lint_rules_*.py.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle.config import TargetConfig
from eagle.formats.lint import config as lint_rules_config
from eagle.formats.lint import layers as lint_rules_layers
from eagle.formats.lint import vocabulary as lint_rules_vocabulary
from eagle.formats.lint import weights as lint_rules_weights
from eagle.formats.lint.files import FoundHead, read_head, read_target
from eagle.formats.lint.rules import READING, RULES, SEVERITIES, Found, Look, Runtime

__all__ = ["Finding", "Report", "lint", "rules"]
_MODULES = (
    lint_rules_config,
    lint_rules_layers,
    lint_rules_vocabulary,
    lint_rules_weights,
)  # they register their rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Found):
    """One finding of one rule."""

    rule: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a folder looks like to one runtime."""

    head: Path
    runtime: Runtime
    target: str | None
    version: str
    findings: tuple[Finding, ...]
    """The worst first."""

    @property
    def sound(self) -> bool:
        """Whether the runtime loads it and drafts as trained: there may be warnings."""
        return all(finding.severity == "warning" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "head": str(self.head),
            "runtime": self.runtime,
            "target": self.target,
            "version": self.version,
            "sound": self.sound,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def lint(head: str | Path, *, runtime: Runtime, target: TargetConfig | None = None) -> Report:
    """Looks at a head's folder with the eyes of a runtime; with a target, also whether the two fit.

    Raises EagleError when there is no such folder or target.
    """
    files = read_head(Path(head))
    facts = None if target is None else read_target(target, embedding="embed_tokens.weight" in files.tensors)
    findings = sorted(
        _findings(files, Look(head=files, target=facts, runtime=runtime)),
        key=lambda finding: SEVERITIES.index(finding.severity),
    )
    return Report(
        head=files.folder,
        runtime=runtime,
        target=None if target is None else target.model,
        version=files.version,
        findings=tuple(findings),
    )


def _findings(files: FoundHead, look: Look) -> Iterator[Finding]:
    for trouble in files.troubles:
        yield Finding(
            rule=trouble.rule,
            severity="breaks",
            evidence=trouble.evidence,
            effect=f"{look.name} cannot load the folder",
            remedy=trouble.remedy,
        )
    if not files.readable:
        return
    for one in RULES.values():
        if one.applies(look):
            for found in one.check(look):
                yield Finding(rule=one.id, **dataclasses.asdict(found))


def rules() -> dict[str, str]:
    """Every rule's id and what it is about."""
    return {**READING, **{one.id: one.about for one in RULES.values()}}
