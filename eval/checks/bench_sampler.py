"""What drawing one token costs, by method: `python -m eagle.eval.checks.bench_sampler [--vocab V] [--rounds N]`.

Decoding draws ONCE from every distribution. Methods: softmax + torch.multinomial; softmax, cumulated, and a binary search;
an alias table; Gumbel-max (argmax of logits + noise) with torch's noise and with eagle/sample/noise.py's counter-based noise,
which makes a row's text a function of its own seed, and is drawn once for drafting and verification together.
Each method must first pass a chi-square test; ratios are printed only when all do. Ends with one JSON line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from eagle.environment import git_commit, hardware
from eagle.eval.checks.alias_table import build_alias, draw_alias
from eagle.eval.statistics import chi_square_p_value
from eagle.sample.sampling import RowSampler, Sampling

Method = Callable[[torch.Tensor, int], int]
"""(logits float32 [V], number of the draw) -> token."""

BASELINE, ALIAS = "softmax + multinomial", "alias table"
LEVEL = 1e-4
"""A method whose chi-square p-value is below this draws wrongly."""
CHECK_VOCAB, CHECK_DRAWS = 50, 4000


def multinomial(logits_V: torch.Tensor, number: int) -> int:
    return int(torch.multinomial(logits_V.softmax(-1), 1))


def cumulated(logits_V: torch.Tensor, number: int) -> int:
    cdf_V = logits_V.softmax(-1).cumsum(-1)
    return min(int(torch.searchsorted(cdf_V, torch.rand(1) * cdf_V[-1], right=True)), len(cdf_V) - 1)


def alias_table(logits_V: torch.Tensor, number: int) -> int:
    return draw_alias(*build_alias(logits_V.softmax(-1)))


def gumbel_torch(logits_V: torch.Tensor, number: int) -> int:
    return int((logits_V - torch.empty_like(logits_V).exponential_().log_()).argmax())


def gumbel_counter(logits_V: torch.Tensor, number: int) -> int:
    return RowSampler(sampling=Sampling(temperature=1.0, seed=1)).choose(logits_V, number)


def gumbel_shared(logits_V: torch.Tensor, number: int) -> int:
    """Verification's share: drafting has drawn the noise already."""
    return _DRAFTED.choose(logits_V, number)


_DRAFTED = RowSampler(sampling=Sampling(temperature=1.0, seed=1))

METHODS: dict[str, Method] = {
    BASELINE: multinomial,
    "CDF search": cumulated,
    ALIAS: alias_table,
    "Gumbel-max, torch's noise": gumbel_torch,
    "Gumbel-max, counter-based noise": gumbel_counter,
    "Gumbel-max, noise shared with drafting": gumbel_shared,
}


def check(methods: dict[str, Method]) -> dict[str, float]:
    """Chi-square p-value of every method on one small distribution."""
    torch.manual_seed(0)
    logits_V = torch.randn(CHECK_VOCAB) * 2
    expected_V = logits_V.double().softmax(-1).tolist()
    values = {}
    for name, method in methods.items():
        draws = torch.tensor([method(logits_V, number) for number in range(CHECK_DRAWS)])
        values[name] = chi_square_p_value(draws.bincount(minlength=CHECK_VOCAB).tolist(), expected_V)
    return values


def microseconds(methods: dict[str, Method], *, vocab: int, rounds: int) -> dict[str, list[float]]:
    """Times of one draw from a new distribution, the methods interleaved; the first three rounds warm up."""
    torch.manual_seed(1)
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(-3, rounds):
        logits_V = torch.randn(vocab) * 3
        _DRAFTED.forget_before(sys.maxsize)
        _DRAFTED.noise(CHECK_DRAWS + 3 + number, vocab)
        for name, method in methods.items():
            start = time.perf_counter()
            method(logits_V, CHECK_DRAWS + 3 + number)
            if number >= 0:
                times[name].append(1e6 * (time.perf_counter() - start))
    return times


def alias_parts(*, vocab: int, rounds: int) -> tuple[float, float]:
    """Median microseconds of building an alias table and of one draw from it."""
    build, draw = [], []
    for _ in range(rounds):
        probabilities_V = (torch.randn(vocab) * 3).softmax(-1)
        start = time.perf_counter()
        table = build_alias(probabilities_V)
        built = time.perf_counter()
        draw_alias(*table)
        build.append(1e6 * (built - start))
        draw.append(1e6 * (time.perf_counter() - built))
    return float(np.median(build)), float(np.median(draw))


def main(arguments: Sequence[str], methods: dict[str, Method] = METHODS) -> int:
    """Prints the table; returns the exit code: 1 when a method draws wrongly."""
    parser = argparse.ArgumentParser(prog="python -m eagle.eval.checks.bench_sampler", description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152, help="tokens of a distribution (default: SmolLM2's 49152)")
    parser.add_argument("--rounds", type=int, default=100, help="draws timed per method (default: 100)")
    options = parser.parse_args(arguments)
    machine, commit = hardware(), git_commit()
    print(f"{machine['cpu']}, {machine['torch_threads']} torch threads, commit {commit}; V = {options.vocab}, float32")
    p_values = check(methods)
    right = min(p_values.values()) >= LEVEL
    times = microseconds(methods, vocab=options.vocab, rounds=options.rounds)
    quantiles = {name: [float(x) for x in np.quantile(each, [0.5, 0.1, 0.9])] for name, each in times.items()}
    print(f"{'one draw per distribution':<40} {'median us':>10} {'10% - 90%':>19} {'chi-square p':>13} {'ratio':>7}")
    for name, (median, low, high) in quantiles.items():
        ratio = f"{median / quantiles[BASELINE][0]:.2f}" if right else "-"
        print(f"{name:<40} {median:>10.1f} {f'{low:.1f} - {high:.1f}':>19} {p_values[name]:>13.3g} {ratio:>7}")
    build, draw = alias_parts(vocab=options.vocab, rounds=options.rounds)
    if right:
        print(
            f"The alias table loses: its O(V) construction ({build:.0f} us) is paid for a single draw ({draw:.0f} us), "
            "because decoding never draws twice from one distribution."
        )
    else:
        wrong = [name for name, value in p_values.items() if value < LEVEL]
        print(f"No ratios: {', '.join(wrong)} did not pass the chi-square test.")
    result = {
        "benchmark": "sampler",
        "hardware": machine,
        "commit": commit,
        "vocab": options.vocab,
        "rounds": options.rounds,
        "correct": right,
        "p_values": p_values,
        "median_p10_p90_us": {name: [round(x, 2) for x in each] for name, each in quantiles.items()},
        "alias_build_us": round(build, 2),
        "alias_draw_us": round(draw, 2),
    }
    print(json.dumps(result))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
