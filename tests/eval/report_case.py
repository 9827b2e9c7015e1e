"""One golden results.json, golden.json: every section that a report can have, with texts that want escaping.

Two settings, six requests of hf, plain, eagle2 and chain each, of two categories; a curve whose last point is not exact; a
ledger; one recorded answer; two tuned trees.
"""

import copy
import functools
import json
from pathlib import Path
from typing import Any

from eagle.eval.report.page import render
from eagle.eval.results import Results, parse
from tests.eval.page import Element, read_page

EVIL = '<script>alert("1")</script>&amp;'
OVERALL = "settings/T=0/methods/eagle2/overall"
"""Where the main method's figures are."""


@functools.cache
def _golden() -> str:
    return Path(__file__).with_name("golden.json").read_text(encoding="utf-8")


def full_result(**changes: Any) -> dict[str, Any]:
    """`changes` replace top-level fields (None: leave the field out)."""
    return {key: value for key, value in (json.loads(_golden()) | changes).items() if value is not None}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The golden result with other values at places such as OVERALL + "/tau"; ...: without what is there."""
    values = full_result()
    for path, value in changes.items():
        *above, last = path.split("/")
        place = functools.reduce(lambda part, key: part[int(key) if isinstance(part, list) else key], above, values)
        if value is ...:
            del place[last]
        elif isinstance(place.get(last), dict) and isinstance(value, dict):
            place[last].update(value)
        else:
            place[last] = copy.deepcopy(value)
    return values


def read_results(values: dict[str, Any]) -> Results:
    return parse(Results, values)


def page_of(values: dict[str, Any]) -> Element:
    return read_page(render(read_results(values)))
