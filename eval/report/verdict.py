"""The verdict: what an evaluation says about its main method, in a sentence or three, never more than was measured."""

from collections.abc import Mapping
from typing import Any

from eagle.eval.methods import TUNED
from eagle.eval.results import LABELS, label_of, main_method
from eagle.eval.statistics import FEWEST


def verdict(result: Mapping[str, Any], setting: str) -> list[str]:
    """Sentences about one setting: the main ratio with its interval and its baseline, that of the tuned trees, tau, exactness."""
    body = result["settings"][setting]
    main = main_method(body)
    row = body["methods"][main]["overall"]
    if main == "plain":
        return [f"Only decoding without drafts was measured: {row['tokens_per_second']:.1f} tokens per second."]
    sentences = [_speed(body, main, baseline) for baseline in ("plain", "hf")]
    if TUNED in body["methods"] and main != TUNED:
        sentences.append(_speed(body, TUNED, "plain"))
    found = [sentence[0].upper() + sentence[1:] for sentence in sentences if sentence]
    if row["tau"] is not None:
        found.append(
            f"A verification yields {row['tau']:.2f} tokens on average (acceptance length tau of the {label_of(main)})."
        )
    return [*found, exactness_sentence(row)]


def _speed(body: Mapping[str, Any], main: str, baseline: str) -> str:
    ratio = body["methods"][main]["overall"][f"speedup_{baseline}"]
    if ratio is None:
        return ""
    against = LABELS[baseline] if baseline == "hf" else f"the {LABELS[baseline]}"
    of = f" of {ratio['units']} prompts" if ratio["unit"] == "prompt" and ratio["units"] < ratio["samples"] else ""
    how = f"median over {ratio['samples']} requests{of}, 95% interval {ratio['low']:.2f} to {ratio['high']:.2f}"
    if ratio["units"] < FEWEST:
        over = "the one request" if ratio["samples"] == 1 else f"{ratio['samples']} requests (median)"
        return f"{label_of(main)} is {ratio['median']:.2f}x as fast as {against} on {over}: too few to conclude from."
    if ratio["low"] <= 1 <= ratio["high"]:
        return f"{label_of(main)} shows no clear gain over {against}: {ratio['median']:.2f}x ({how}, which holds 1)."
    if ratio["high"] < 1:
        return f"{label_of(main)} is slower than {against}: {ratio['median']:.2f}x its speed ({how})."
    return f"{label_of(main)} is {ratio['median']:.2f}x as fast as {against} ({how})."


def exactness_sentence(row: Mapping[str, Any]) -> str:
    """What is known about a method's tokens."""
    counts = row["exact"]
    if counts is None:
        return {
            "distribution": "Its tokens are another draw from the target's distribution, as its rule promises.",
            "lossy": "Its rule is lossy: its text is not the target's.",
        }.get(row["check"], "Its tokens were not compared.")
    if counts["different"]:
        return f"It is NOT exact: {counts['different']} of {counts['requests']} answers differ; no speed-up is given."
    if counts["ties"]:
        return (
            f"{counts['equal']} of its {counts['requests']} answers equal plain decoding's token for token; "
            f"{counts['ties']} leave "
            "them at a numerical tie."
        )
    return f"All {counts['requests']} of its answers equal plain decoding's, token for token."
