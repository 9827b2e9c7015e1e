"""From the answers to the body of results.json: exactness first, then figures per method and category."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from eagle.eval.answers import Request
from eagle.eval.exactness import Exactness, exactness
from eagle.eval.figures import DEFINITIONS, figures


def summarise(requests: Sequence[Request], methods: Sequence[str], *, seed: int = 0) -> dict[str, Any]:
    """`requests` must all hold an answer of every method.

    A method whose tokens differ from plain decoding's (not at a tie) gets an error and no speed-up; when plain decoding
    itself differs from Hugging Face's, nobody gets a speed-up over Hugging Face.
    """
    exact = {name: exactness(requests, name) for name in methods if name != "hf"}
    errors = [_error(name, counts) for name, counts in exact.items() if not counts.exact]
    categories = list(dict.fromkeys(request.category for request in requests))

    def baselines(name: str) -> list[str]:
        proved = [] if name != "hf" and not exact[name].exact else ["plain"]
        return [*proved, "hf"] if proved and exact["plain"].exact and "hf" in methods else proved

    def row(chosen: Sequence[Request], name: str) -> dict[str, Any]:
        values = figures(chosen, name, baselines=baselines(name) if name != "hf" else [], seed=seed)
        counts = None if name == "hf" else _counts(exactness(chosen, name))
        return {**dataclasses.asdict(values), "exact": counts}

    return {
        "requests": len(requests),
        "prompts": len({request.prompt for request in requests}),
        "methods": {
            name: {
                "overall": row(requests, name),
                "categories": {c: row([r for r in requests if r.category == c], name) for c in categories},
            }
            for name in methods
        },
        "n_alpha": figures(requests, "chain", baselines=[]).acceptance if "chain" in methods else None,
        "divergences": [
            {"method": name, "prompt": request.prompt, "turn": request.turn, **found}
            for request in requests
            for name, found in request.divergences.items()
        ],
        "errors": errors,
        "definitions": DEFINITIONS,
    }


def _counts(value: Exactness) -> dict[str, int]:
    return dataclasses.asdict(value)


def _error(name: str, counts: Exactness) -> str:
    versus = "Hugging Face generate" if name == "plain" else "plain decoding"
    return (
        f"{name} is NOT exact: {counts.different} of {counts.requests} answers differ from {versus}'s where the "
        "target's best two logits are no tie; no speed-up over it is given"
    )
