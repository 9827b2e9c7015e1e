"""Four faults provoked on a real target and head, and what the diagnosis says of each.

    python -m eagle.eval.checks.provoke --target MODEL --head HEAD

untrained head: random weights; oversized tree: far more nodes than the target verifies for the price of one; huge batch:
many rows at once; slow host: a verification rule that sleeps. Beside them the head as it is. Every case is decoded plainly and
with drafts, in turn; exit code 1 when a fault is not named as what it is.
"""

import dataclasses
import time
from collections.abc import Sequence

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.eval.batch_answer import answer_batch
from eagle.eval.ledger.cost import Standing
from eagle.eval.ledger.diagnosis import Cause, Cycle, cycle_of
from eagle.eval.settings import parse_setting
from eagle.eval.warm_up import warm_ups
from eagle.heads.eagle1 import DraftHead
from eagle.sample.stats import DecodeStats
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
