"""What a method's tokens are held against, and what was found: told without the target, for who only reads results."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Check = Literal["hf", "plain", "distribution", "lossy", "none"]
"""What a method's tokens are held against. hf, plain: those of that method must be equal; distribution: another draw of the
same distribution, of which tokens say nothing (`eagle.eval.checks.chi_square` tests it); lossy: another distribution; none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exactness:
    """Counts over requests of one method against its reference."""

    requests: int
    equal: int
    ties: int
    """Differ, first at a place where the reference's two best logits are a tie, or behind a tie of two experts."""
    router_ties: int = 0
    """Those of them whose logits are no tie, but whose experts are (a mixture of experts)."""
    different: int
    """Differ otherwise: the method is not lossless here, and no speed-up of it is printed."""

    @property
    def exact(self) -> bool:
        return self.different == 0


def kind_of(found: Mapping[str, Any]) -> str:
    """A divergence in a word: "tie", "router tie" or "DIFFERENT"."""
    kind = found.get("kind", "tie" if found["tie"] else "different")
    return "DIFFERENT" if kind == "different" else str(kind)


def margins_of(found: Mapping[str, Any]) -> str:
    """The margins behind a divergence's kind."""
    router = found.get("router")
    return f"top-2 margin {found['margin']:.2g}" + ("" if router is None else f"; closest experts: {router['said']}")
