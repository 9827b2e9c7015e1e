"""A full results.json without a model: figures by the real functions from made-up answers, with texts that want escaping."""

import dataclasses
import random
from typing import Any

from eagle.eval.answers import Answer, Request
from eagle.eval.ledger.cost import TargetCost, Timing
from eagle.eval.ledger.diagnosis import Cycle, diagnose
from eagle.eval.meter import Use
from eagle.eval.schema import FORMAT
from eagle.eval.summarise import summarise
from eagle.sample.stats import DecodeStats

EVIL = '<script>alert("1")</script>&amp;'
SETTINGS = ("T=0", "T=1 top_p=0.9")
METHODS = ("hf", "plain", "eagle2", "chain")
CHECKS = {
    "T=0": {"hf": "none", "plain": "hf", "eagle2": "plain", "chain": "plain"},
    "T=1 top_p=0.9": {"hf": "none", "plain": "none", "eagle2": "plain", "chain": "distribution"},
}


def full_result(**changes: Any) -> dict[str, Any]:
    """Every section that a report can have; `changes` replace top-level fields (None: leave the field out)."""
    result = {
        "format": FORMAT,
        "created": "2026-01-02T03:04:05+00:00",
        "identity": {
            "hardware": {"cpu": "A"},
            "prompts_sha256": "p",
            "target": {},
            "eval": {},
            "decode": {},
            "head_sha256": "h",
        },
        "target": {"model": "some/target", "weights_sha256": "ab" * 32},
        "target_dtype": "float32",
        "head": {"path": "runs/head", "sha256": "cd" * 32, "config": {}},
        "training": {"supervised_tokens": 449000, "tau": TAUS},
        "recipe": {
            "eval": {"prompts": ["shipped:mt_bench"], "max_new_tokens": 64, "methods": list(METHODS)},
            "decode": {
                "drafter": {"kind": "eagle2", "budget": 8, "top_k": 4, "depth": 3},
                "engine": "eager",
                "kernels": "auto",
            },
        },
        "hardware": {"cpu": "A CPU", "cores": 2, "torch_threads": 2, "gpus": [], "system": "Linux x86_64"},
        "versions": {"python": "3.11.7", "eagle": "0.1.0", "torch": "2.13.0"},
        "commit": "0123456789abcdef",
        "peak_memory": {"rss_bytes": 2**30},
        "skipped": [],
        "suites": [],
        "processes": {"processes": 1, "requests_by_sharing": {"1": 12}, "note": None},
        "throughput": [curve()],
        "ledger": {"settings": [ledger_entry()], "definitions": {"predicted": "what is predicted"}},
        "trees": [recorded()],
        "tune": tuned(),
        **summarise(requests(), CHECKS),  # type: ignore[arg-type]
    }
    return {key: value for key, value in {**result, **changes}.items() if value is not None}


INDEPENDENT = {"units": 8, "unit": "prompt"}
TAUS = [
    {"step": 100, "decoded_tau": 1.21, "estimated_tau": None},
    {"step": 200, "decoded_tau": 1.43, "estimated_tau": 1.52},
]


def requests() -> list[Request]:
    dice = random.Random(0)
    found = []
    for setting in SETTINGS:
        for number in range(6):
            answers = {name: answer(name, dice) for name in METHODS}
            found.append(
                Request(
                    prompt=f"mt_bench/{number}",
                    turn=0,
                    category=("writing", EVIL)[number % 2],
                    setting=setting,
                    seed=number,
                    prompt_tokens=20,
                    order=list(METHODS),
                    answers=answers,
                )
            )
    return found


def answer(name: str, dice: random.Random) -> Answer:
    """Forty tokens; the tree is faster than the plain loop, the chain slower."""
    speed = {"hf": 36, "plain": 33, "eagle2": 24, "chain": 40}[name]
    seconds = 40 * speed * dice.uniform(0.97, 1.03) / 1e3
    stats = DecodeStats()
    deepest = {"eagle2": 3, "chain": 2}.get(name, 0)
    while name != "hf" and sum(stats.accepted) + len(stats.accepted) < 39:
        accepted = sum(dice.random() < 0.5 for _ in range(deepest))
        stats.count_step(path_length=accepted + 1, at_leaf=accepted == deepest)
    return Answer(
        tokens=list(range(40)),
        seconds=seconds,
        first_token_seconds=0.1,
        accepted=stats.accepted,
        attempts_per_depth=stats.attempts_per_depth,
        accepted_per_depth=stats.accepted_per_depth,
        prefill_seconds=0.09,
        draft_seconds=0.1 * seconds if deepest else 0.0,
        verify_seconds=0.7 * seconds,
        commit_tokens=[1] * 39,
        commit_seconds=[seconds / 40] * 39,
        use=Use(cpu_seconds=seconds, threads=2, peak_rss_bytes=2**29),
    )


def curve() -> dict[str, Any]:
    points = []
    for batch, ratio in ((1, 1.2), (2, 1.05), (4, 0.9)):
        speedup = {
            "median": ratio + 0.01,
            "low": ratio - 0.05,
            "high": ratio + 0.06,
            "pooled": ratio,
            "samples": 16 // batch,
            "units": 16 // batch,
            "unit": "group",
        }
        points.append(
            {
                "batch": batch,
                "plain_tokens_per_second": 20.0 * batch,
                "tokens_per_second": 20.0 * batch * ratio,
                "tau": 1.58,
                "tau_raw": 1.6,
                "different": 0,
                "speedup": speedup,
            }
        )
    points.append({**points[0], "batch": 8, "different": 3, "speedup": None})
    return {
        "setting": "T=0",
        "max_new_tokens": 48,
        "prompts": 16,
        "points": points,
        "crossing": None,
        "verdict": "v",
        "drafter": "eagle2",
    }


def ledger_entry() -> dict[str, Any]:
    def timing(ms: float) -> Timing:
        return Timing(median=ms, low=0.95 * ms, high=1.1 * ms, samples=36)

    costs = [TargetCost(batch=b, points={n: timing(30 + 1.5 * n * b) for n in (1, 2, 4, 8)}) for b in (1, 2)]
    cycle = Cycle(
        batch=1,
        nodes=8,
        levels=3,
        tau=1.58,
        draft_ms=4.1,
        target_ms=costs[0].at(8),
        host_ms=1.1,
        one_ms=costs[0].at(1),
        plain_host_ms=0.6,
    )
    entry = {
        "method": "eagle2",
        **dataclasses.asdict(cycle),
        "tau_raw": 1.6,
        "cycle_ms": cycle.cycle_ms,
        "plain_ms": cycle.plain_ms,
        "predicted": 1.07,
        "predicted_from_run": 1.05,
        "measured": {"median": 1.02, "low": 0.98, "high": 1.06, "pooled": 1.03, **INDEPENDENT, "samples": 6},
        "error": 0.039,
        "error_from_run": 0.019,
        "gain": {"holds": True, "breakeven_tau": cycle.breakeven_tau},
        "rejected": {
            "nodes_verified": 8120,
            "nodes_accepted": 1602,
            "nodes_rejected": 6518,
            "share": 0.803,
            "flops_rejected": 1.37e12,
        },
        "diagnosis": diagnose(cycle).as_dict(),
    }
    points = [
        {"batch": b, "predicted": p, "measured": m, "diagnosis": entry["diagnosis"], "cycle": {}}
        for b, p, m in ((1, 1.1, 1.2), (2, 0.9, None))
    ]
    return {
        "setting": "T=0",
        "main": "eagle2",
        "device": "cpu",
        "engine": "eager",
        "prefix_tokens": 40.0,
        "held_out": True,
        "target": [cost.as_dict() for cost in costs],
        "methods": [entry],
        "curve": points,
        "crossing": {"predicted": 1.5, "measured": None},
    }


def recorded() -> dict[str, Any]:
    def node(text: str, parent: int, depth: int, confidence: float, accepted: bool) -> dict[str, Any]:
        return {
            "text": text,
            "token": 1,
            "parent": parent,
            "depth": depth,
            "confidence": confidence,
            "accepted": accepted,
        }

    nodes = [
        node(" sat", -1, 0, 1.0, True),
        node(" on", 0, 1, 0.6, True),
        node(EVIL, 0, 1, 0.2, False),
        node("\n", 1, 2, 0.25, True),
        node(" 漢字漢字漢字漢字", 1, 2, 0.1, False),
    ]
    emitted = {"text": " mat", "token": 2, "parent": 3, "origin": "bonus"}
    tokens = [
        ("The", "plain", None),
        (" on", "drafted", 0),
        ("\n", "drafted", 0),
        (EVIL, "bonus", 0),
        (" mat", "correction", 1),
    ]
    return {
        "method": "eagle2",
        "rule": "coupled",
        "setting": "T=0",
        "question": f"What {EVIL}?",
        "seed": 3,
        "verify_steps": 2,
        "accepted": [2, 0],
        "tokens": [{"text": text, "origin": origin, "step": step} for text, origin, step in tokens],
        "steps": [{"step": 0, "nodes": nodes, "emitted": emitted}],
        "calibration": [
            {"low": 0.1, "high": 0.2, "nodes": 1, "confidence": 0.1, "accepted": 0.0},
            {"low": 0.6, "high": 0.7, "nodes": 4, "confidence": 0.6, "accepted": 0.75},
        ],
    }


def tuned() -> dict[str, Any]:
    def tree(name: str, tau: float, rate: float, ratio: tuple[float, float, float], **more: Any) -> dict[str, Any]:
        median, low, high = ratio
        speedup = {"median": median, "low": low, "high": high, "pooled": median, **INDEPENDENT, "samples": 8}
        return {
            "tree": {},
            "name": name,
            "tau": tau,
            "tau_raw": tau,
            "tokens_per_second": rate,
            "speedup": speedup,
            **more,
        }

    candidates = [
        tree("no drafting", 1.0, 30.0, (1.0, 1.0, 1.0), forecast={"speedup": 1.0}, chosen=False),
        tree("8 nodes", 1.58, 33.0, (1.1, 1.02, 1.15), forecast=None, chosen=True),
    ]
    calibration = {
        "confidence": [0.05, 0.6],
        "accepted": [0.04, 0.7],
        "calibrated": [0.04, 0.7],
        "nodes": [900, 100],
        "error": 0.02,
    }
    batches = [{"setting": "T=0", "batch": 1, "candidates": candidates, "calibration": calibration}]
    return {
        "hardware": "A CPU, 2 threads",
        "engine": "eager",
        "dtype": "float32",
        "choices": [],
        "measured": {"batches": batches},
    }
