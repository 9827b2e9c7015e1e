"""The head of the report: what an evaluation says about its main method, never more than was measured, and what was measured."""

from collections import Counter
from collections.abc import Mapping

from eagle.config import KIND
from eagle.eval.methods import TUNED
from eagle.eval.report.parts import LABELS, exact_text, label_of, number, times
from eagle.eval.results import MethodFigures, Results, SettingResult
from eagle.eval.statistics import FEWEST, Estimate


def verdict(body: SettingResult) -> list[str]:
    """Sentences about one setting: the main ratio with its interval and its baseline, that of the tuned trees, tau, exactness."""
    row, main = body.main_figures, label_of(body.main)
    if body.main == "plain":
        return [f"Only decoding without drafts was measured: {row.tokens_per_second:.1f} tokens per second."]
    plain = f"the {LABELS['plain']}"
    sentences = [_speed(main, row.speedup_plain, plain), _speed(main, row.speedup_hf, LABELS["hf"])]
    if TUNED in body.methods and body.main != TUNED:
        sentences.append(_speed(label_of(TUNED), body.methods[TUNED].overall.speedup_plain, plain))
    found = [sentence[0].upper() + sentence[1:] for sentence in sentences if sentence]
    if row.tau is not None:
        found.append(f"A verification yields {row.tau:.2f} tokens on average (acceptance length tau of the {main}).")
    return [*found, exactness_sentence(row)]


def _speed(method: str, ratio: Estimate | None, against: str) -> str:
    if ratio is None:
        return ""
    of = f" of {ratio.units} prompts" if ratio.unit == "prompt" and ratio.units < ratio.samples else ""
    how = f"median over {ratio.samples} requests{of}, 95% interval {ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.units < FEWEST:
        over = "the one request" if ratio.samples == 1 else f"{ratio.samples} requests (median)"
        return f"{method} is {ratio.median:.2f}x as fast as {against} on {over}: too few to conclude from."
    if ratio.low <= 1 <= ratio.high:
        return f"{method} shows no clear gain over {against}: {ratio.median:.2f}x ({how}, which holds 1)."
    if ratio.high < 1:
        return f"{method} is slower than {against}: {ratio.median:.2f}x its speed ({how})."
    return f"{method} is {ratio.median:.2f}x as fast as {against} ({how})."


def exactness_sentence(row: MethodFigures) -> str:
    """What is known about a method's tokens."""
    counts = row.exact
    if counts is None:
        return {
            "distribution": "Its tokens are another draw from the target's distribution, as its rule promises.",
            "lossy": "Its rule is lossy: its text is not the target's.",
        }.get(row.check, "Its tokens were not compared.")
    if counts.different:
        return f"It is NOT exact: {counts.different} of {counts.requests} answers differ; no speed-up is given."
    if counts.ties:
        return (
            f"{counts.equal} of its {counts.requests} answers equal plain decoding's token for token; {counts.ties} leave "
            "them at a numerical tie."
        )
    return f"All {counts.requests} of its answers equal plain decoding's, token for token."


def tiles(body: SettingResult) -> list[tuple[str, str, str]]:
    """(what, figure, beneath it) of the main method."""
    row = body.main_figures
    found = []
    for baseline, ratio in (("plain", row.speedup_plain), ("hf", row.speedup_hf)):
        if ratio is not None:
            beneath = f"95% interval {ratio.low:.2f} to {ratio.high:.2f}"
            if ratio.units < FEWEST:
                beneath = f"of {ratio.units} {ratio.unit}{'s' * (ratio.units > 1)}: too few for an interval"
            found.append((f"speed-up over {LABELS[baseline]}", times(ratio.median), beneath))
    if row.tau is not None:
        found.append(("acceptance length (tau)", number(row.tau), f"over {row.verify_steps:,} verify steps"))
    found.append(
        ("tokens per second", number(row.tokens_per_second, 1), f"{row.new_tokens:,} tokens, prefill included")
    )
    if row.exact is not None:
        against = "Hugging Face's" if row.check == "hf" else "plain decoding's"
        found.append(("exact answers", exact_text(row), f"tokens equal {against}"))
    return found


def facts(result: Results) -> list[tuple[str, str]]:
    """(name, value) of what was measured and on what."""
    asked, drafter = result.asked.eval, result.asked.decode.drafter
    sizes = ", ".join(f"{key} {value}" for key, value in drafter.items() if key != KIND and value is not None)
    found = [
        ("target", f"{result.target.model} ({result.target_dtype})"),
        ("target weights, sha256", result.target.weights_sha256 or "unknown"),
        ("head", f"{result.head.path}, {result.head.sha256}"),
        (
            "prompts",
            f"{result.prompts:,} of {', '.join(asked.prompts)}; at most {asked.max_new_tokens} tokens each",
        ),
        ("methods", ", ".join(map(label_of, asked.methods))),
        ("sampling", ", ".join(result.settings)),
        (
            "trees",
            f"{drafter[KIND]}: {sizes}" if sizes else "as published (the method tuned: as eagle tune found them)",
        ),
        ("engine, kernels", ", ".join(filter(None, (runs_on(result), result.asked.decode.kernels)))),
        ("CPU", str(result.hardware)),
        ("GPU", result.hardware.gpu or "none"),
        ("versions", versions_of(result.versions)),
        ("commit", f"{result.commit or '(installed package)'}, {result.created}"),
    ]
    for suite in result.suites:
        tasks = ", ".join(f"{task} {count}" for task, count in suite.tasks.items())
        note = f". {suite.note}" if suite.note else ""
        found.append((f"suite {suite.title or suite.source}", f"prompts by task: {tasks}{note}"))
    if result.processes.note:
        found.append(("processes", result.processes.note))
    found.append(("peak resident memory", f"{result.peak_memory['rss_bytes'] / 2**20:,.0f} MiB"))
    if result.training is not None and result.training.supervised_tokens is not None:
        found.append(("head trained on", f"{result.training.supervised_tokens:,} supervised tokens"))
    if result.skipped:
        found.append(("passed over", f"{len(result.skipped)} requests (see the notes)"))
    return found


def target_name(result: Results) -> str:
    """The target as readers call it: the last part of its path or hub id."""
    name = result.target.model or "the target"
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def versions_of(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def runs_on(result: Results) -> str:
    """The engine and what multiplies by the weights, in words."""
    products = Counter(result.runs.products.values())
    counted = ", ".join(f"{count} shapes of weights {name}" for name, count in sorted(products.items()))
    return result.runs.engine + (f" ({counted})" if counted else "")
