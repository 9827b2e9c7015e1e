"""The ledger of speculative decoding: what each part of a cycle costs, what is predicted from it, and what was measured.

Speed-up over the plain loop, prefills left out = tau * (T_target(B) + T_host,plain) / (T_draft + T_target(n) + T_host), with
n = B * N and T_target(n) = alpha + n * beta(n). Costs come from timing the parts (eagle/eval/ledger/cost.py), right after the
evaluation and in the same process; tau, the drafter's commits and the host's work from the requests of every other prompt;
the prediction is held against the requests of the other half.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from eagle.config import Recipe
from eagle.eval.answers import Answer, Request
from eagle.eval.checks.exactness import exactness
from eagle.eval.ledger.cost import NODES, TargetCost, Timing, measure_proposals, measure_target
from eagle.eval.ledger.diagnosis import Cycle, diagnose
from eagle.eval.ledger.flops import target_flops
from eagle.eval.methods import CHAIN, PLAIN, Method
from eagle.eval.results import main_method
from eagle.eval.runner import first_turn
from eagle.eval.settings import Setting
from eagle.eval.statistics import falls_through_one, paired_ratio
from eagle.eval.suites.prompt import Prompt
from eagle.sample.stats import AcceptanceLength
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

CONTEXTS = 12
"""Prompts (with the first half of their answers) that costs are timed behind, at least the largest batch."""

DEFINITIONS = {
    "predicted": "tau * (target_ms(1 node a row) + host of a plain step) / (draft + target(n) + host), target timed "
    "apart, the rest from every other prompt; over the plain loop, prefills left out",
    "predicted_from_run": "the same with every part from the clocks of the fitted half",
    "measured": "of the other prompts: plain's seconds per token / the method's, behind the prefill; pooled (plain's seconds for "
    "as many tokens as the method's / the method's seconds), and the median over requests with its 95% interval over prompts",
    "error": "predicted / measured - 1",
    "alpha_ms, beta": "T(n) = alpha + n * beta(n); alpha: intercept of the least-squares line (of relative errors) through "
    "the points",
    "gain": "drafting pays where (draft + target(n) + host) / tau < target(B) + host of a plain step; leading factor: "
    "beta(n) / p < beta(B), with p = tau / N",
    "rejected": "nodes verified - accepted drafts - roots; flops: decoder's matrices and attention, the LM head apart",
    "crossing": "batch size from which on drafting does not pay, linear between the sizes around it; null: the curve does not "
    "fall through 1 for good, or that is not known",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What the requests of one half say of a method, per verify step; milliseconds."""

    tau: float
    tau_raw: float
    nodes: float
    draft_ms: float
    target_ms: float
    host_ms: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> "Fit":
        length = AcceptanceLength.of((len(answer.tokens), answer.accepted) for answer in answers)
        steps = max(1, length.steps)

        def per_step(seconds: float) -> float:
            return 1e3 * seconds / steps

        draft, verify = sum(a.draft_seconds for a in answers), sum(a.verify_seconds for a in answers)
        total = sum(a.seconds - a.prefill_seconds for a in answers)
        return cls(
            tau=length.tau or 1.0,
            tau_raw=length.raw or 1.0,
            nodes=sum(a.nodes for a in answers) / steps,
            draft_ms=per_step(draft),
            target_ms=per_step(verify),
            host_ms=per_step(total - draft - verify),
        )


def ledger_of(
    recipe: Recipe,
    target: Target,
    methods: Mapping[str, Method],
    settings: Sequence[Setting],
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    throughput: Sequence[Mapping[str, Any]],
) -> dict[str, Any] | None:
    """`ledger` as the recipe asks for it; None where eval.ledger is off."""
    if recipe.eval.ledger == "off":
        return None
    batches = recipe.eval.batches
    return ledger(target, methods, settings, requests, prompts, throughput=throughput, batches=batches)


def ledger(
    target: Target,
    methods: Mapping[str, Method],
    settings: Sequence[Setting],
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    *,
    throughput: Sequence[Mapping[str, Any]] = (),
    batches: Sequence[int] = (1,),
) -> dict[str, Any] | None:
    """The body of results.json's `ledger`; None where no method drafts.

    throughput: results.json's, the measured points of the curve against batch size. It times the target: up to minutes per
    sampling setting on a CPU, and more with every batch size.
    """
    entries = []
    for setting in settings:
        chosen = [request for request in requests if request.setting == setting.label]
        names = [name for name, method in methods.items() if _drafts(name, method, chosen)]
        if names:
            measured = _curve_of(methods[main_method(names)], setting, throughput)
            entries.append(
                _of_setting(
                    target,
                    methods,
                    setting,
                    chosen,
                    prompts,
                    names=names,
                    measured=measured,
                    batches=sorted(set(batches)),
                )
            )
    return {"settings": entries, "definitions": DEFINITIONS} if entries else None


def _drafts(name: str, method: Method, requests: Sequence[Request]) -> bool:
    """Whether a method is in the ledger: ours, with drafts in both halves (answers that end with the prefill's token have no
    verify step), and saying what plain decoding says (or another draw of it)."""
    if name == PLAIN or method.decoder is None or method.decoder.drafter is None or not requests:
        return False
    if not method.decoder.rule.lossless:
        return False
    drafted = all(any(request.answers[name].nodes for request in half) for half in halves(requests))
    return drafted and exactness(requests, name).exact


def _of_setting(
    target: Target,
    methods: Mapping[str, Method],
    setting: Setting,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    *,
    names: Sequence[str],
    measured: Mapping[str, Any] | None,
    batches: Sequence[int],
) -> dict[str, Any]:
    fitted, held_out = halves(requests)
    main = main_method(names)
    decoder = methods[main].decoder
    assert decoder is not None
    contexts = _contexts(target, requests, prompts, count=max(CONTEXTS, *batches))
    sizes = {name: max(1, round(Fit.of([r.answers[name] for r in fitted]).nodes)) for name in names}
    grid = sorted({*(n for n in NODES if n <= 2 * max(16, sizes[main])), *sizes.values()})
    costs = measure_target(decoder, contexts, setting=setting, batches=[1], nodes=grid)
    larger = [batch for batch in batches if batch > 1]
    main_sizes = sorted({1, max(1, sizes[main] // 2), sizes[main]})
    costs |= measure_target(decoder, contexts, setting=setting, batches=larger, nodes=main_sizes)
    entries = [
        _entry(target, methods[name], name, fitted, held_out, costs[1], contexts=contexts, setting=setting)
        for name in names
    ]
    body = {
        "setting": setting.label,
        "main": main,
        "device": target.device.type,
        "engine": target.engine,
        "held_out": held_out != fitted,
        "prefix_tokens": sum(map(len, contexts)) / len(contexts),
        "target": [costs[batch].as_dict() for batch in sorted(costs)],
        "methods": entries,
        "curve": None,
        "crossing": None,
    }
    if larger:
        entry = next(one for one in entries if one["method"] == main)
        proposals = measure_proposals(decoder, contexts, setting=setting, batches=sorted({1, *batches}))
        timings = {batch: one[0] for batch, one in proposals.items()}
        body |= _curve(entry, costs, timings, measured, target=target, drafter=methods[main].drafter)
    return body


def _curve_of(main: Method, setting: Setting, throughput: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What was measured against batch size under a setting, where that decoder has the drafter and the tree of `main`.

    The method chain has a depth of its own (eval.chain_depth).
    """
    for one in throughput:
        if one["setting"] == setting.label and one["drafter"] == main.name != CHAIN:
            return dict(one)
    return None


def halves(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Requests of every other prompt, and of the rest; all of them twice where there is one prompt only."""
    order = {prompt: place for place, prompt in enumerate(dict.fromkeys(request.prompt for request in requests))}
    if len(order) < 2:
        return list(requests), list(requests)
    parts: tuple[list[Request], list[Request]] = ([], [])
    for request in requests:
        parts[order[request.prompt] % 2].append(request)
    return parts


def _contexts(target: Target, requests: Sequence[Request], prompts: Sequence[Prompt], *, count: int) -> list[list[int]]:
    """Ids of prompts, spread evenly over all tasks, with the first half of plain decoding's answers: where cycles are on
    average."""
    found = {prompt.id: prompt for prompt in prompts}
    first = [request for request in requests if request.turn == 0]
    assert first
    count = min(count, len(first))
    first = [first[place * len(first) // count] for place in range(count)]
    return [
        [
            *prompt_ids(target.tokenizer, first_turn(found[request.prompt])),
            *request.answers[PLAIN].tokens[: len(request.answers[PLAIN].tokens) // 2],
        ]
        for request in first
    ]


def _entry(
    target: Target,
    method: Method,
    name: str,
    fitted: Sequence[Request],
    held_out: Sequence[Request],
    cost: TargetCost,
    *,
    contexts: Sequence[Sequence[int]],
    setting: Setting,
) -> dict[str, Any]:
    """One method's cycle, its prediction and its measurement, at one row."""
    assert method.decoder is not None
    fit = Fit.of([request.answers[name] for request in fitted])
    plain = Fit.of([request.answers[PLAIN] for request in fitted])
    timing, _, levels = measure_proposals(method.decoder, contexts, setting=setting, batches=[1])[1]
    cycle = Cycle(
        batch=1,
        nodes=fit.nodes,
        levels=max(1, levels),
        tau=fit.tau,
        draft_ms=fit.draft_ms,
        target_ms=cost.at(fit.nodes),
        host_ms=fit.host_ms,
        one_ms=cost.at(1),
        plain_host_ms=plain.host_ms + plain.draft_ms,
        **cost.cheapest_above(fit.nodes),
    )
    predicted = cycle.speedup
    from_run = dataclasses.replace(cycle, target_ms=fit.target_ms, one_ms=plain.target_ms).speedup
    measured = paired_ratio(
        [_decode_ms(request.answers[PLAIN]) for request in held_out],
        [_decode_ms(request.answers[name]) for request in held_out],
        tokens=[_decoded(request.answers[name]) for request in held_out],
        units=[request.prompt for request in held_out],
        unit="prompt",
    )
    assert measured is not None
    return {
        "method": name,
        **dataclasses.asdict(cycle),
        "tau_raw": fit.tau_raw,
        "cycle_ms": cycle.cycle_ms,
        "plain_ms": cycle.plain_ms,
        "propose": dataclasses.asdict(timing),
        "predicted": predicted,
        "predicted_from_run": from_run,
        "measured": dataclasses.asdict(measured),
        "error": predicted / measured.pooled - 1,
        "error_from_run": from_run / measured.pooled - 1,
        "gain": _gain(cycle, cost),
        "rejected": _rejected(target, name, [*fitted, *held_out] if fitted != held_out else fitted),
        "diagnosis": diagnose(cycle, drafter=method.drafter).as_dict(),
    }


def _decoded(answer: Answer) -> int:
    """Tokens behind the one that the prefill yields, 1 where there is none."""
    return max(1, len(answer.tokens) - 1)


def _decode_ms(answer: Answer) -> float:
    """Milliseconds per token behind the prefill and the token that it yields."""
    return 1e3 * (answer.seconds - answer.prefill_seconds) / _decoded(answer)


def _gain(cycle: Cycle, cost: TargetCost) -> dict[str, Any]:
    """The condition for a gain, whole and by its leading factor."""
    share = cycle.tau / cycle.nodes
    beta_n = (cycle.target_ms - cost.alpha) / (cycle.batch * cycle.nodes)
    beta_b = (cycle.one_ms - cost.alpha) / cycle.batch
    return {
        "ms_per_token": cycle.cycle_ms / cycle.tau,
        "target_one_ms": cycle.one_ms,
        "plain_ms": cycle.plain_ms,
        "holds": cycle.cycle_ms / cycle.tau < cycle.plain_ms,
        "breakeven_tau": cycle.breakeven_tau,
        "p": share,
        "beta_n_over_p_ms": beta_n / share,
        "beta_b_ms": beta_b,
        "leading_holds": beta_n / share < beta_b,
    }


def _rejected(target: Target, name: str, requests: Sequence[Request]) -> dict[str, Any]:
    """Nodes that were verified for nothing, and what they cost."""
    flops = target_flops(target)
    answers = [request.answers[name] for request in requests]
    verified = sum(answer.nodes for answer in answers)
    kept = sum(len(answer.accepted) + sum(answer.accepted) for answer in answers)
    prefix = sum(r.prompt_tokens + len(r.answers[name].tokens) / 2 for r in requests) / len(requests)
    node = flops.per_node(prefix)
    return {
        "nodes_verified": verified,
        "nodes_accepted": kept,
        "nodes_rejected": verified - kept,
        "share": (verified - kept) / max(1, verified),
        "flops_per_node": node,
        "flops_of_logits": flops.logits,
        "flops_verified": verified * node,
        "flops_rejected": (verified - kept) * node,
    }


def _curve(
    entry: Mapping[str, Any],
    costs: Mapping[int, TargetCost],
    proposals: Mapping[int, Timing],
    measured: Mapping[str, Any] | None,
    *,
    target: Target,
    drafter: str,
) -> dict[str, Any]:
    """Speed-up against batch size, predicted and measured, and where each falls through 1.

    What is not timed per batch size: the drafter's commits are taken as at one row; the host's work grows with the rows on a
    CPU, where it goes row by row, and not on a device.
    """
    found = {} if measured is None else {p["batch"]: p["speedup"] for p in measured["points"]}
    points: list[dict[str, Any]] = []
    cycles: list[Cycle] = []
    for batch, cost in sorted(costs.items()):
        rows = batch if target.device.type == "cpu" else 1
        cycle = Cycle(
            batch=batch,
            nodes=entry["nodes"],
            levels=entry["levels"],
            tau=entry["tau"],
            draft_ms=proposals[batch].median + max(0.0, entry["draft_ms"] - proposals[1].median),
            target_ms=cost.at(entry["nodes"]),
            host_ms=rows * entry["host_ms"],
            one_ms=cost.at(1),
            plain_host_ms=rows * entry["plain_host_ms"],
            **cost.cheapest_above(entry["nodes"]),
        )
        ratio = found.get(batch)
        cycles.append(cycle)
        points.append(
            {
                "batch": batch,
                "predicted": cycle.speedup,
                "measured": None if ratio is None else ratio["pooled"],
                "diagnosis": diagnose(cycle, alone=cycles[0], drafter=drafter).as_dict(),
                "cycle": dataclasses.asdict(cycle),
            }
        )
    return {
        "curve": points,
        "crossing": {
            name: falls_through_one([(point["batch"], point[name]) for point in points])
            for name in ("predicted", "measured")
        },
    }
