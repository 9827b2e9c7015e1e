"""From the answers to the body of results.json: exactness first, then figures per method and category."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle.eval.answers import Request
from eagle.eval.checks.exactness import exactness
from eagle.eval.checks.found import Check, Exactness
from eagle.eval.figures import DEFINITIONS, figures, record, request_taus
from eagle.eval.methods import CHAIN, HF, PLAIN
from eagle.eval.results import Divergence, Method, MethodFigures, SettingResult, Summary


def summarise(
    requests: Sequence[Request], checks: Mapping[str, Mapping[str, Check]], *, seed: int = 0
) -> dict[str, Any]:
    """`Summary` as results.json has it. `checks`: per setting, what each method's tokens are held against; `requests` all hold
    an answer of every method."""
    of = {setting: [request for request in requests if request.setting == setting] for setting in checks}
    return dataclasses.asdict(
        Summary(
            prompts=len({request.prompt for request in requests}),
            settings={
                setting: summarise_setting(of[setting], methods, seed=seed) for setting, methods in checks.items()
            },
            record={
                setting: {
                    name: record(of[setting], name, baselines=[each for each in (HF, PLAIN) if each in methods])
                    for name in methods
                }
                for setting, methods in checks.items()
                if of[setting]
            },
            definitions=DEFINITIONS,
        )
    )


def summarise_setting(requests: Sequence[Request], checks: Mapping[str, Check], *, seed: int) -> SettingResult:
    """One setting's figures.

    A method whose tokens differ from those it must equal (not at a tie) gets an error and no speed-up; when plain decoding
    itself differs from Hugging Face's, nobody gets a speed-up over Hugging Face.
    """
    exact = {name: exactness(requests, name) for name, check in checks.items() if check in checks}
    failed = {name for name, counts in exact.items() if not counts.exact}
    categories = list(dict.fromkeys(request.category for request in requests))

    def baselines(name: str) -> list[str]:
        if name in failed:
            return []
        return [each for each in (PLAIN, HF) if each in checks and not (each == HF and PLAIN in failed)]

    def row(chosen: Sequence[Request], name: str) -> MethodFigures:
        values = figures(chosen, name, baselines=baselines(name) if name != HF else [], seed=seed)
        return MethodFigures(
            **vars(values), check=checks[name], exact=exactness(chosen, name) if name in exact else None
        )

    return SettingResult(
        requests=len(requests),
        methods={
            name: Method(
                overall=row(requests, name),
                categories={c: row([r for r in requests if r.category == c], name) for c in categories},
                trees=sorted({r.answers[name].tree for r in requests} - {""}),
                request_tau=request_taus([r.answers[name] for r in requests]),
                request_tau_raw=request_taus([r.answers[name] for r in requests], raw=True),
            )
            for name in checks
        },
        n_alpha=figures(requests, CHAIN, baselines=[]).acceptance if CHAIN in checks else None,
        divergences=[
            Divergence(method=name, prompt=request.prompt, turn=request.turn, **found)
            for request in requests
            for name, found in request.divergences.items()
        ],
        errors=[_error(name, counts, checks[name]) for name, counts in exact.items() if name in failed],
    )


def _error(name: str, counts: Exactness, check: Check) -> str:
    versus = "Hugging Face generate" if check == HF else "plain decoding"
    return (
        f"{name} is NOT exact: {counts.different} of {counts.requests} answers differ from {versus}'s where the "
        "target's best two scores are no tie; no speed-up over it is given"
    )
