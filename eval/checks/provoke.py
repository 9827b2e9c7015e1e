"""Four faults provoked on a real target and head, and what the diagnosis says of each.

    python -m eagle.eval.checks.provoke --target MODEL --head HEAD

untrained head: random weights; oversized tree: far more nodes than the target verifies for the price of one; huge batch:
many rows at once; slow host: a verification rule that sleeps. Beside them the head as it is. Every case is decoded plainly and
with drafts, in turn; exit code 1 when a fault is not named as what it is.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from eagle.config import DecodeConfig, TargetConfig
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Tree
from eagle.draft.tree import DraftTree
from eagle.environment import git_commit, hardware
from eagle.errors import EagleError
from eagle.eval.batch_answer import answer_batch
from eagle.eval.ledger.cost import Standing
from eagle.eval.ledger.diagnosis import NAMES, Cause, Cycle, Diagnosis, cycle_of, diagnose
from eagle.eval.runner import first_turn
from eagle.eval.settings import parse_setting
from eagle.eval.suites.prompt_set import load_prompts
from eagle.eval.warm_up import warm_ups
from eagle.formats.checkpoint import load_head
from eagle.heads.eagle1 import DraftHead
from eagle.progress import ProgressBar, console
from eagle.quiet import quieten
from eagle.sample.stats import DecodeStats
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target
from eagle.verify.coupled import Coupled, NodeView, Walk

SETTING = parse_setting("T=0")


class SlowRule(Coupled):
    """The coupled rule with a host that takes its time."""

    name = "coupled, slowly"

    seconds: float

    def __init__(self, seconds: float):
        object.__setattr__(self, "seconds", seconds)  # rules are frozen

    def walk(self, tree: DraftTree, row: int, view: NodeView) -> Walk:
        time.sleep(self.seconds)
        return super().walk(tree, row, view)


def random_head(head: DraftHead) -> DraftHead:
    """A head of the same shape that was never trained."""
    blank = type(head)(head.config)
    for name in ("d2t", "t2d"):
        if hasattr(head, name):
            getattr(blank, name).copy_(getattr(head, name))
    return blank.to(dtype=head.dtype).eval()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One provoked fault."""

    name: str
    expected: Cause | None
    """None: the head as it is; whatever is said of it"""
    decoder: SpeculativeDecoder
    batch: int = 1


def cases(
    target: Target, head: DraftHead, decode: DecodeConfig, *, large_batch: int, large_tree: DecodeConfig, slow: float
) -> list[Case]:
    """slow: seconds that the slow host sleeps per row and cycle."""

    def decoder(head: DraftHead = head, decode: DecodeConfig = decode, rule: Any = None) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_pretrained(target, head, decode=decode, rule=rule)

    return [
        Case(name="as it is", expected=None, decoder=decoder()),
        Case(name="untrained head", expected="acceptance", decoder=decoder(head=random_head(head))),
        Case(name="oversized tree", expected="compute", decoder=decoder(decode=large_tree)),
        Case(name="huge batch", expected="compute", decoder=decoder(), batch=large_batch),
        Case(name="slow host", expected="host", decoder=decoder(rule=SlowRule(slow))),
    ]


def measure(case: Case, prompts: Sequence[list[int]], *, max_new_tokens: int) -> Cycle:
    """Both loops answer the prompts in batches, in turn; a first round warms up.

    Raises EagleError where no answer goes beyond its first token: there is no cycle then.
    """
    drafted: list[DecodeStats] = []
    plain: list[DecodeStats] = []
    levels = int(Standing(case.decoder, prompts[:1], SETTING, room=1).propose().depths_BN.max())
    starts = range(0, len(prompts) - case.batch + 1, case.batch)
    groups = [prompts[start : start + case.batch] for start in starts]
    first = warm_ups(case.decoder.target, groups, few=4, max_new_tokens=max_new_tokens)
    rounds = [(*one, False) for one in first] + [(number, max_new_tokens, True) for number in range(len(groups))]
    for number, limit, counted in rounds:
        for decoder, found in ((case.decoder, drafted), (case.decoder.plain(), plain)):
            rows = groups[number]
            answer = answer_batch(decoder, rows, seeds=range(len(rows)), setting=SETTING, max_new_tokens=limit)
            if counted:
                found += answer.stats
    if not any(row.verify_steps for row in plain):
        raise EagleError(
            f"the target ends its answers to all {len(prompts)} prompts with their first token, so there is no cycle to "
            "diagnose; name others in --prompts"
        )
    return cycle_of(drafted, plain, batch=case.batch, levels=levels)


def provoke(
    found: Sequence[Case], prompts: Sequence[list[int]], *, rows: int, max_new_tokens: int
) -> list[tuple[Case, Cycle, Diagnosis]]:
    """Measures and diagnoses every case. rows: prompts a case of one row decodes; the others take one batch."""
    results: list[tuple[Case, Cycle, Diagnosis]] = []
    with ProgressBar("provoke", total=len(found), unit="cases") as bar:
        for case in found:
            count = max(rows, case.batch)
            chosen = [list(prompts[i % len(prompts)]) for i in range(count)]
            cycle = measure(case, chosen, max_new_tokens=max_new_tokens)
            alone = results[0][1] if results and case.batch > 1 else None
            results.append((case, cycle, diagnose(cycle, alone=alone)))
            bar.advance(1)
    return results


def _table(results: Sequence[tuple[Case, Cycle, Diagnosis]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in (
        "case",
        "batch",
        "nodes",
        "tau",
        "draft ms",
        "target ms",
        "one node",
        "host ms",
        "speed-up",
        "named",
    ):
        table.add_column(heading, justify="left" if heading in ("case", "named") else "right")
    number: Callable[[float], str] = "{:.1f}".format
    for case, cycle, found in results:
        times = (cycle.draft_ms, cycle.target_ms, cycle.one_ms, cycle.host_ms)
        table.add_row(
            *(case.name, str(cycle.batch), f"{cycle.nodes:.0f}", f"{cycle.tau:.2f}", *map(number, times)),
            *(f"{found.speedup:.2f}x", found.name),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eagle.eval.checks.provoke", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", required=True, help="folder, hub id, .gguf file or package:NAME/FILE.gguf")
    parser.add_argument("--head", required=True, help="the draft head's folder or hub id")
    parser.add_argument("--engine", default="auto", choices=["auto", "eager", "compiled", "cudagraph"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--tree", type=int, nargs=3, default=(16, 4, 3), metavar=("BUDGET", "TOP_K", "DEPTH"))
    parser.add_argument(
        "--large-tree",
        type=int,
        nargs=3,
        default=(200, 16, 3),
        metavar=("BUDGET", "TOP_K", "DEPTH"),
        help="the oversized one",
    )
    parser.add_argument("--large-batch", type=int, default=32, help="rows of the huge batch (default: 32)")
    parser.add_argument(
        "--slow", type=float, default=0.25, help="seconds the slow host sleeps per cycle (default: 0.25)"
    )
    parser.add_argument("--prompts", nargs="+", default=["shipped:spec_bench_open"], help="as eval.prompts")
    parser.add_argument("--rows", type=int, default=4, help="prompts of every case but the huge batch (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    quieten()
    try:
        _check(options)
        target = Target.from_config(TargetConfig(model=options.target, dtype=options.dtype))
        head = load_head(options.head)
        sizes = ("budget", "top_k", "depth")
        decode = DecodeConfig(engine=options.engine, drafter=Tree(**dict(zip(sizes, options.tree))))
        large_tree = DecodeConfig(engine=options.engine, drafter=Tree(**dict(zip(sizes, options.large_tree))))
        loaded = load_prompts(options.prompts, max(options.rows, options.large_batch))
        ids = sorted((prompt_ids(target.tokenizer, first_turn(prompt)) for prompt in loaded), key=len)
        found = cases(target, head, decode, large_batch=options.large_batch, large_tree=large_tree, slow=options.slow)
        results = provoke(found, ids, rows=options.rows, max_new_tokens=options.max_new_tokens)
    except EagleError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(_table(results))
    for case, _, diagnosis in results:
        wrong = (
            ""
            if case.expected is None or case.expected == diagnosis.cause
            else f"EXPECTED {NAMES[case.expected]}, got "
        )
        console.print(f"{case.name}: {wrong}{diagnosis}", markup=False, soft_wrap=True)
    print(json.dumps(_record(results)))
    return 0 if all(case.expected in (None, found.cause) for case, _, found in results) else 1


def _check(options: argparse.Namespace) -> None:
    """Raises EagleError for numbers with which there is nothing to measure."""
    for name, least in (("rows", 1), ("large_batch", 1), ("max_new_tokens", 2), ("slow", 0)):
        if getattr(options, name) < least:
            raise EagleError(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected {least} or more")


def _record(results: Sequence[tuple[Case, Cycle, Diagnosis]]) -> dict[str, Any]:
    return {
        "benchmark": "provoke",
        "cases": [
            {
                "case": case.name,
                "expected": case.expected,
                "cycle": dataclasses.asdict(cycle),
                "diagnosis": diagnosis.as_dict(),
            }
            for case, cycle, diagnosis in results
        ],
        "hardware": hardware(),
        "commit": git_commit(),
    }


if __name__ == "__main__":
    sys.exit(main())
