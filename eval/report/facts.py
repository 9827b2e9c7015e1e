"""The head of the report: what was measured, on what, and the few numbers to take away."""

from collections.abc import Mapping
from typing import Any

from eagle.config import KIND
from eagle.eval.report.parts import number
from eagle.eval.results import LABELS, exact_text, label_of, main_method, runs_on
from eagle.eval.statistics import FEWEST

Result = Mapping[str, Any]


def tiles(result: Result, setting: str) -> list[tuple[str, str, str]]:
    """(what, figure, beneath it) of the main method."""
    body = result["settings"][setting]
    main = main_method(body)
    row = body["methods"][main]["overall"]
    found = []
    for baseline in ("plain", "hf"):
        ratio = row[f"speedup_{baseline}"]
        if ratio is not None:
            beneath = f"95% interval {ratio['low']:.2f} to {ratio['high']:.2f}"
            if ratio["units"] < FEWEST:
                beneath = f"of {ratio['units']} {ratio['unit']}{'s' * (ratio['units'] > 1)}: too few for an interval"
            found.append((f"speed-up over {LABELS[baseline]}", f"{ratio['median']:.2f}x", beneath))
    if row["tau"] is not None:
        found.append(("acceptance length (tau)", number(row["tau"]), f"over {row['verify_steps']:,} verify steps"))
    found.append(
        ("tokens per second", number(row["tokens_per_second"], 1), f"{row['new_tokens']:,} tokens, prefill included")
    )
    if row["exact"] is not None:
        against = "Hugging Face's" if row["check"] == "hf" else "plain decoding's"
        found.append(("exact answers", exact_text(row), f"tokens equal {against}"))
    return found


def facts(result: Result) -> list[tuple[str, str]]:
    """(name, value) of what was measured and on what."""
    target, head, hardware, recipe = result["target"], result["head"], result["hardware"], result["recipe"]
    evaluation, decode = recipe["eval"], recipe["decode"]
    drafter = decode["drafter"]
    sizes = {key: value for key, value in drafter.items() if key != KIND and value is not None}
    found = [
        ("target", f"{target.get('model')} ({result['target_dtype']})"),
        ("target weights", short(target.get("weights_sha256"))),
        ("head", f"{head['path']}, {short(head['sha256'])}"),
        (
            "prompts",
            f"{result['prompts']:,} of {', '.join(evaluation['prompts'])}; at most "
            f"{evaluation['max_new_tokens']} tokens each",
        ),
        ("methods", ", ".join(label_of(name) for name in evaluation["methods"])),
        ("sampling", ", ".join(result["settings"])),
        (
            "trees",
            f"{drafter[KIND]}: " + ", ".join(f"{key} {value}" for key, value in sizes.items())
            if sizes
            else "as published (the method tuned: as eagle tune found them)",
        ),
        ("engine, kernels", ", ".join(filter(None, (runs_on(result).removeprefix("engine "), decode.get("kernels"))))),
        (
            "CPU",
            f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['torch_threads']} threads, {hardware['system']}",
        ),
        ("GPU", ", ".join(hardware["gpus"]) or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in result["versions"].items())),
        ("commit", str(result["commit"] or "(installed package)")),
        ("measured", str(result["created"])),
    ]
    for suite in result.get("suites") or []:
        tasks = ", ".join(f"{task} {count}" for task, count in suite["tasks"].items())
        note = f". {suite['note']}" if suite["note"] else ""
        found.append((f"suite {suite['title'] or suite['source']}", f"prompts by task: {tasks}{note}"))
    if (result.get("processes") or {}).get("note"):
        found.append(("processes", result["processes"]["note"]))
    memory = (result.get("peak_memory") or {}).get("rss_bytes")
    if memory:
        found.append(("peak resident memory", f"{memory / 2**20:,.0f} MiB"))
    training = result.get("training") or {}
    if "supervised_tokens" in training:
        found.append(("head trained on", f"{training['supervised_tokens']:,} supervised tokens"))
    skipped = result.get("skipped") or []
    if skipped:
        found.append(("passed over", f"{len(skipped)} requests (see the notes)"))
    return found


def exact_rows(result: Result) -> list[str]:
    """One line per setting and method that says how exact it is."""
    return [
        f"{label_of(name)}, {setting}: {exact_text(method['overall'])}"
        for setting, body in result["settings"].items()
        for name, method in body["methods"].items()
        if exact_text(method["overall"])
    ]


def short(digest: str | None) -> str:
    """The first characters of a hash."""
    return "sha256 unknown" if not digest else f"sha256 {digest[:12]}…"
