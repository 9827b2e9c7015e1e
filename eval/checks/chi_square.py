"""Do the lossless rules draw from the target's distribution, and is a broken one told apart?

    python -m eagle.eval.checks.chi_square --target MODEL --head HEAD

One prompt is continued by many rows; the joint counts of the tokens behind the first new one (which no draft decides) are
tested against the target's exact probabilities, which a top-k filter makes few enough to enumerate. V vocabulary.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from rich.table import Table

from eagle.config import DecodeConfig
from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval.checks.mutants import LOSSLESS, MUTANTS
from eagle.eval.statistics import ChiSquare, chi_square
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead
from eagle.progress import ProgressBar, console
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.prompt import text_ids
from eagle.target.target import Target

NEW_TOKENS = 4
MOST_KEPT = 8
"""Tokens kept (top_k) at most: MOST_KEPT ** NEW_TOKENS continuations are enumerated."""
LEVEL = 0.01
"""Family-wise error at which the table's verdict is given."""

Joint = dict[tuple[int, ...], float]


@torch.inference_mode()
def exact_joint(target: Target, ids_1T: torch.Tensor, sampling: Sampling, *, tokens: int) -> Joint:
    """Probability of every continuation of `tokens` tokens that the filters allow."""
    sampler = RowSampler(sampling=sampling)
    cells: Joint = {(): 1.0}
    for _ in range(tokens):
        prefixes = list(cells)
        grown: Joint = {}
        for start in range(0, len(prefixes), 64):
            block = prefixes[start : start + 64]
            prefix_BT = torch.tensor(block, dtype=torch.int64, device=ids_1T.device)
            ids_BT = torch.cat([ids_1T.expand(len(block), -1), prefix_BT], dim=1)
            features_BTH, _ = target.features(ids_BT)
            for prefix, p_V in zip(block, sampler.probabilities(target.logits(features_BTH[:, -1]).float()).cpu()):
                for token in p_V.nonzero().flatten().tolist():
                    grown[(*prefix, token)] = cells[prefix] * float(p_V[token])
        cells = grown
    return cells


def continuations(
    decoder: SpeculativeDecoder, ids_1T: torch.Tensor, sampling: Sampling, *, rows: int, batch: int, bar: ProgressBar
) -> list[tuple[int, ...]]:
    """NEW_TOKENS tokens of `rows` rows, each with a seed of its own."""
    found: list[tuple[int, ...]] = []
    for start in range(0, rows, batch):
        count = min(batch, rows - start)
        out = decoder.generate(
            ids_1T.expand(count, -1),
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=[sampling.seed + start + row for row in range(count)],
        )
        found += [tuple(row) for row in out.sequences[:, ids_1T.shape[1] :].tolist()]
        bar.advance(count)
    return found


def chi_squares(found: Sequence[tuple[int, ...]], exact: Joint) -> dict[str, ChiSquare]:
    """Chi-square tests of tokens 2-3 and 2-4, their joint distribution."""
    values = {}
    for last in (3, 4):
        expected: Joint = defaultdict(float)
        for cell, mass in exact.items():
            expected[cell[1:last]] += mass
        seen = Counter(tokens[1:last] for tokens in found)
        cells = [*expected, *(seen.keys() - expected.keys())]
        values[f"tokens 2-{last}"] = chi_square([seen[c] for c in cells], [expected[c] for c in cells])
    return values


def p_values(found: Sequence[tuple[int, ...]], exact: Joint) -> dict[str, float]:
    """The p-values of `chi_squares`."""
    return {name: test.p_value for name, test in chi_squares(found, exact).items()}


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjustment: the family-wise error of rejecting what lies below a level is at most that level."""
    adjusted, running = {}, 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        running = max(running, min(1.0, (len(values) - rank) * values[name]))
        adjusted[name] = running
    return adjusted


def measure(
    target: Target,
    head: DraftHead,
    ids_1T: torch.Tensor,
    sampling: Sampling,
    *,
    rows: int,
    batch: int = 128,
    variants: Sequence[str] | None = None,
) -> dict[str, dict[str, ChiSquare]]:
    """Tests of every variant (default: all of LOSSLESS and MUTANTS) on the target's exact joint distribution."""
    exact = exact_joint(target, ids_1T, sampling, tokens=NEW_TOKENS)
    names = [*LOSSLESS, *MUTANTS] if variants is None else variants
    result = {}
    shares = {name: MUTANTS[name].rows if name in MUTANTS else 1 for name in names}
    with ProgressBar("chi-square", total=rows * sum(shares.values()), unit="rows") as bar:
        for name in names:
            mutant = MUTANTS.get(name)
            decode: DecodeConfig = LOSSLESS[name] if mutant is None else mutant.decode
            decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode)
            with nullcontext() if mutant is None else mutant.broken():
                found = continuations(decoder, ids_1T, sampling, rows=rows * shares[name], batch=batch, bar=bar)
            result[name] = chi_squares(found, exact)
    return result


def verdict(result: Mapping[str, Mapping[str, ChiSquare]]) -> dict[str, dict[str, Any]]:
    """Holm over all tests of the lossless rules, and over those of the mutants: what is told apart at LEVEL.

    A variant whose tests had no degree of freedom is not tested: nothing is said of it, neither good nor bad.
    """
    lines: dict[str, dict[str, Any]] = {}
    for family in (LOSSLESS, MUTANTS):
        flat = {
            f"{name}|{test}": one.p_value for name in result if name in family for test, one in result[name].items()
        }
        adjusted = holm(flat)
        for name in result:
            if name in family:
                tests = result[name]
                low = min(adjusted[f"{name}|{test}"] for test in tests)
                degrees = {test: one.degrees for test, one in tests.items()}
                lines[name] = {
                    **{test: one.p_value for test, one in tests.items()},
                    "holm": low,
                    "told apart": low < LEVEL,
                    "lossless": family is LOSSLESS,
                    "degrees_of_freedom": degrees,
                    "tested": any(degrees.values()),
                }
    return lines


def not_tested(names: Sequence[str], remedy: str) -> str:
    """The sentence about variants whose tests had a single cell; "" of none."""
    if not names:
        return ""
    return (
        f"NOT TESTED: {'; '.join(names)}: what expects fewer than 5 rows is pooled, and every chi-square test was left with a "
        f"single cell; {remedy}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="path, hub id or .gguf file")
    parser.add_argument("--head", required=True, help="folder or hub id")
    parser.add_argument("--prompt", default="The most surprising thing about the sea is", help="text to continue")
    parser.add_argument(
        "--rows", type=int, default=1600, help="continuations per rule; with fewer, mild faults are not told apart"
    )
    parser.add_argument("--only", nargs="+", choices=[*LOSSLESS, *MUTANTS], help="these variants alone")
    parser.add_argument("--batch", type=int, default=128, help="rows decoded together")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=5, help="tokens kept: k^4 continuations are enumerated")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    _check(options)
    target = Target.from_pretrained(options.target)
    if target.tokenizer is None:
        raise EagleError(f"{options.target} has no tokenizer to read the prompt with; give a complete checkpoint")
    ids_1T = torch.tensor([text_ids(target.tokenizer, options.prompt)], device=target.device)
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, seed=options.seed)
    head = load_head(options.head)
    result = verdict(
        measure(target, head, ids_1T, sampling, rows=options.rows, batch=options.batch, variants=options.only)
    )
    headings = ("rule", "tokens 2-3", "tokens 2-4", "degrees of freedom", "Holm", "told apart from the target")
    table = Table(*headings, title="chi-square p-values")
    for name, line in result.items():
        said = "yes" if line["told apart"] else "no" if line["tested"] else "not tested"
        unexpected = line["tested"] and line["told apart"] == line["lossless"]
        table.add_row(
            name if line["lossless"] else f"mutant: {name}",
            *(f"{line[test]:.3g}" for test in ("tokens 2-3", "tokens 2-4")),
            degrees_text(line),
            f"{line['holm']:.3g}",
            said + ("  UNEXPECTED" if unexpected else ""),
        )
    console.print(table)
    untested = not_tested(
        [name for name, line in result.items() if not line["tested"]], "raise --rows or --temperature"
    )
    if untested:
        console.print(untested, markup=False, soft_wrap=True)
    print(json.dumps({"rows": options.rows, "level": LEVEL, "rules": result}))
    return 0 if all(line["tested"] and line["told apart"] != line["lossless"] for line in result.values()) else 1


def degrees_text(line: Mapping[str, Any]) -> str:
    """The degrees of freedom of a line's tests, in their order."""
    return ", ".join(map(str, line["degrees_of_freedom"].values()))


def _check(options: argparse.Namespace) -> None:
    """Raises EagleError for what cannot be measured: nothing to draw, or too much to enumerate."""
    for name in ("rows", "batch"):
        if getattr(options, name) < 1:
            raise EagleError(f"--{name} is {getattr(options, name)}, expected 1 or more")
    if not options.temperature > 0:
        raise EagleError(f"--temperature is {options.temperature}, expected above 0: greedily there is one outcome")
    if not 2 <= options.top_k <= MOST_KEPT:
        raise EagleError(
            f"--top-k is {options.top_k}, expected 2 to {MOST_KEPT}: all top_k^{NEW_TOKENS} continuations are enumerated"
        )
    if not options.prompt.strip():
        raise EagleError("--prompt is empty; give some text to continue")


if __name__ == "__main__":
    from eagle.exits import exit_code

    sys.exit(exit_code(main))
