"""Trees that decode the same prompts in earnest, in turn: which one is the fastest is measured, not forecast."""

import dataclasses
from collections.abc import Sequence

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuned import shape_of
from eagle.draft.tuning import TreeSettings
from eagle.eval.batch_answer import BatchAnswer, answer_batch
from eagle.eval.methods import rotated
from eagle.eval.settings import Setting
from eagle.eval.statistics import Estimate, paired_ratio
from eagle.eval.tuner.tree_search import NO_DRAFTING
from eagle.eval.warm_up import warm_ups
from eagle.progress import ProgressBar
from eagle.sample.stats import AcceptanceLength


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One candidate's real decoding of the second half of the prompts."""

    tree: TreeSettings
    tau: float | None
    """None: every answer ended with the prefill's token"""
    tau_raw: float | None
    tokens_per_second: float
    """All rows together, behind the prefills"""
    speedup: Estimate
    """Over plain decoding, per group of rows"""


def confirm(
    decoder: SpeculativeDecoder,
    drafter: HeadDrafter,
    prompts: Sequence[list[int]],
    candidates: Sequence[TreeSettings],
    *,
    setting: Setting,
    batch: int,
    max_new_tokens: int,
) -> list[Measured]:
    """Every candidate decodes the prompts in groups of `batch`, in turn; the first of them must be NO_DRAFTING."""
    assert candidates[0] == NO_DRAFTING
    groups = [prompts[start : start + batch] for start in range(0, len(prompts) - batch + 1, batch)]
    answers: dict[TreeSettings, list[BatchAnswer]] = {tree: [] for tree in candidates}
    plain = decoder.plain()
    label = f"confirm {setting.label}{f', batch {batch}' if batch > 1 else ''}"
    first = warm_ups(decoder.target, groups, few=8, max_new_tokens=max_new_tokens)
    rounds = [(*one, False) for one in first] + [(number, max_new_tokens, True) for number in range(len(groups))]
    with ProgressBar(label, total=len(groups) * len(answers), unit="answers") as bar:
        for number, limit, counted in rounds:
            for tree in _turn(candidates, number):
                if tree != NO_DRAFTING:
                    drafter.shape = shape_of(tree)
                one = plain if tree == NO_DRAFTING else decoder
                answer = decoded(one, groups[number], number * batch, setting, limit)
                if counted:
                    answers[tree].append(answer)
                    bar.advance(1)
    base = answers[NO_DRAFTING]
    return [_measured(tree, found, base) for tree, found in answers.items()]


def _turn(candidates: Sequence[TreeSettings], number: int) -> list[TreeSettings]:
    places = {str(place): tree for place, tree in enumerate(dict.fromkeys(candidates))}
    return [places[name] for name in rotated(places, number)]


def _measured(tree: TreeSettings, found: Sequence[BatchAnswer], base: Sequence[BatchAnswer]) -> Measured:
    def per_token(one: BatchAnswer) -> float:
        return one.seconds / max(1, one.new_tokens)

    ratio = paired_ratio(
        [per_token(one) for one in base],
        [per_token(one) for one in found],
        tokens=[max(1, one.new_tokens) for one in found],
        unit="group",
    )
    assert ratio is not None
    return Measured(
        tree=tree,
        **AcceptanceLength.of(answer for one in found for answer in one.answers).as_dict(),
        tokens_per_second=sum(one.new_tokens for one in found) / sum(one.seconds for one in found),
        speedup=ratio,
    )


def decoded(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], first: int, setting: Setting, limit: int
) -> BatchAnswer:
    seeds = range(first, first + len(prompts))
    return answer_batch(decoder, prompts, seeds=seeds, setting=setting, max_new_tokens=limit)
