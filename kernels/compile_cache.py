"""What the compile table has found before, kept so that a kill loses nothing and a rerun compiles only what changed.

A file of JSON lines, one per kernel version and architecture, appended as each one is done. A row is found again under the
hash of everything that the compiler is given: the function's code and that of what it calls (comments, line breaks and its
place in the file aside), argument types, constants, options, the architecture, and triton's version.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from eagle.kernels.variants import Variant

Row = TypeVar("Row")


def fingerprint(variant: Variant, arch: int) -> str:
    """The hash that a row is kept under."""
    import triton

    told = {
        "code": _code_of(variant.function),
        "types": dict(variant.types),
        "constants": {name: str(value) for name, value in variant.constants.items()},
        "divisible": sorted(variant.divisible),
        "warps": variant.num_warps,
        "stages": variant.num_stages,
        "options": {name: str(value) for name, value in variant.options.items()},
        "arch": arch,
        "triton": triton.__version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _code_of(function: Any) -> list[str]:
    """The syntax trees of a Triton function and of the Triton functions it calls, and the constants they name."""
    import triton

    told: dict[str, str] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        place = f"{one.fn.__module__}.{one.fn.__qualname__}"
        if place in told:
            continue
        # What the interpreter runs keeps no source of its own.
        tree = ast.parse(getattr(one, "src", None) or textwrap.dedent(inspect.getsource(one.fn)))
        told[place] = ast.dump(tree)
        for node in ast.walk(tree):
            name = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            start, *rest = name.split(".")
            value = one.fn.__globals__.get(start)
            for part in rest:
                value = getattr(value, part, None)
            if isinstance(value, triton.JITFunction) and not value.fn.__module__.startswith("triton."):
                waiting.append(value)
            elif isinstance(value, bool | int | float | str | triton.language.constexpr):
                told[f"{one.fn.__module__}.{name}"] = repr(value)
    return [f"{place}: {code}" for place, code in sorted(told.items())]


class CompileCache(Generic[Row]):
    """Rows by fingerprint. `make` builds one from the fields that its dataclass was written with.

    Lines that cannot be read (the last one after a kill, or those of another version of the table) are passed over.
    """

    def __init__(self, path: Path, make: type[Row]):
        self.path = path
        self._rows: dict[str, Row] = {}
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        self._torn = bool(lines[-1])
        for line in lines:
            try:
                kept: Mapping[str, Any] = json.loads(line)
                self._rows[kept["key"]] = make(**kept["row"])
            except (ValueError, KeyError, TypeError):
                continue

    def get(self, key: str) -> Row | None:
        return self._rows.get(key)

    def keep(self, key: str, row: Row) -> None:
        """Appends the row; it is in the file when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"key": key, "row": asdict(row)})  # type: ignore[call-overload]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("\n" * self._torn + line + "\n")
        self._torn = False
        self._rows[key] = row
