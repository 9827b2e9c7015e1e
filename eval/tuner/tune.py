"""`eagle tune`: which draft tree is the fastest for this head, on this machine, with this engine - or none at all.

1. The target answers held-out prompts. 2. The head drafts at every position of the answers, widely, and what any tree would
have had accepted is read off (eagle/eval/tuner/replay.py). 3. The cycle's parts are timed (eagle/eval/ledger/cost.py). 4.
Every tree is priced. 5. The best few decode the second half of the prompts in earnest, in turn with plain decoding and the
trees that were published, and the fastest is kept in tuned.json beside the head.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from eagle.config import Recipe
from eagle.decode.arguments import resolve
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode.make import DEPTHS, make_drafter
from eagle.decode_config import BUDGET, TOP_K, Coupled, Tree
from eagle.draft.by_head import HeadDrafter
from eagle.draft.tuned import shape_of
from eagle.draft.tuning import TreeSettings, TunedChoice, TunedTrees, dtype_name, machine_name, write_tuned
from eagle.environment import git_commit, versions
from eagle.errors import EagleError
from eagle.eval.batch_answer import answer_batch, bare_generation_config
from eagle.eval.ledger.cost import measure_draft, measure_target, states
from eagle.eval.settings import Setting, parse_settings
from eagle.eval.tuner.calibration import ConfidenceCounts
from eagle.eval.tuner.confirm import confirm, decoded
from eagle.eval.tuner.prompts import tuning_prompts
from eagle.eval.tuner.replay import Replay, joined, record
from eagle.eval.tuner.table import print_tuning
from eagle.eval.tuner.tree_search import (
    BUDGETS,
    NO_DRAFTING,
    TOP_KS,
    Forecast,
    Prices,
    budget_curve,
    different,
    forecast,
    search,
)
from eagle.eval.warm_up import warm_ups
from eagle.formats.checkpoint import head_hash, load_head
from eagle.progress import ProgressBar, console
from eagle.target.target import Target

ROWS = 8
"""Prompts that are answered, and recorded, side by side."""
SHORT, LONG = 4, 24
"""New tokens of the answers whose difference tells what a cycle costs outside the forwards."""
STATIC = TreeSettings(drafter="static")
CHAIN = TreeSettings(budget=5, top_k=1, depth=4)


def tune(recipe: Recipe, head: str | Path | None = None) -> TunedTrees:
    """Tunes for tune.batches and tune.sampling, writes tuned.json into the head's folder and prints what was found.

    Raises EagleError for a missing head, prompts that are too few, and settings out of range.
    """
    _check(recipe)
    if head is None and not recipe.head_dir.is_dir():
        raise EagleError(
            f"there is no head at {recipe.head_dir}; train it first (eagle train RECIPE) or give --head PATH"
        )
    loaded = load_head(recipe.head_dir if head is None else head)
    folder = loaded.folder
    assert folder is not None
    with _writing_explained(folder), TemporaryFile(dir=folder):
        pass  # now, not after ten minutes of measuring
    target = Target.from_config(recipe.target, recipe.data.chat_template)
    target.use_engine(recipe.decode.engine)
    prompts = tuning_prompts(recipe, target)
    if max(recipe.tune.batches) > len(prompts) // 2:
        raise EagleError(
            f"tune.batches is {list(recipe.tune.batches)}, but only half of the {len(prompts)} prompts confirm the choice; raise "
            "tune.count (or give more tune.prompts), or leave the larger sizes out"
        )
    decode = dataclasses.replace(recipe.decode, drafter=Tree().as_published(), rule=Coupled(), children="auto")
    drafter = make_drafter(target, decode, head=loaded)
    assert isinstance(drafter, HeadDrafter)
    decoder = SpeculativeDecoder(target, drafter, kernels=decode.kernels)
    choices: list[TunedChoice] = []
    found: list[dict[str, Any]] = []
    for setting in parse_settings(recipe.tune.sampling):
        replay, counts, answered = _recorded(decoder, drafter, prompts, setting, recipe, DEPTHS[loaded.version])
        for batch in sorted(set(recipe.tune.batches)):
            best, body = _of_batch(decoder, drafter, loaded.version, answered, replay, setting, batch, recipe)
            choices.append(TunedChoice(batch=batch, temperature=setting.sampling.temperature, tree=best))
            calibration = counts.fitted()
            body["calibration"] = {**dataclasses.asdict(calibration), "error": calibration.error}
            found.append(body)
            print_tuning(body)
    tuned = TunedTrees(
        hardware=machine_name(target.device),
        engine=target.engine,
        dtype=dtype_name(target.dtype),
        choices=tuple(choices),
        measured={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "target": target.identity(),
            "head_sha256": head_hash(folder),
            "versions": versions(),
            "commit": git_commit(),
            "prompts": len(prompts),
            "max_new_tokens": recipe.tune.max_new_tokens,
            "batches": found,
        },
    )
    with _writing_explained(folder):
        path = write_tuned(folder, tuned)
    console.print(
        f"tune: {path} holds the choice for {tuned.hardware}, engine {tuned.engine}, {tuned.dtype}: decoding with this head "
        "takes it wherever decode.drafter says nothing of its tree",
        markup=False,
        soft_wrap=True,
    )
    if recipe.decode.drafter != Tree():
        console.print(
            "tune: this recipe itself gives a tree, which goes before the tuned one: take decode.drafter's sizes out of it",
            markup=False,
            soft_wrap=True,
        )
    return tuned


@contextmanager
def _writing_explained(folder: Path) -> Iterator[None]:
    """Raises EagleError for a head's folder that cannot be written, such as a read-only installation's."""
    try:
        yield
    except OSError as error:
        raise EagleError(
            f"tuned.json cannot be written into {folder} ({error.strerror}); copy the head to a folder of your own and tune it "
            "there (--head)"
        ) from error


def _check(recipe: Recipe) -> None:
    if not isinstance(recipe.decode.drafter, Tree) or not isinstance(recipe.decode.rule, Coupled):
        raise EagleError(
            f'decode.drafter is "{recipe.decode.drafter.name}" and decode.rule "{recipe.decode.rule.name}"; what is '
            "tuned is eagle2's tree under the rule coupled: set them so"
        )
    for name, least in (("count", 2), ("max_new_tokens", 2), ("confirm", 1)):
        if getattr(recipe.tune, name) < least:
            raise EagleError(f"tune.{name} is {getattr(recipe.tune, name)}, expected {least} or more")
    if not recipe.tune.batches or min(recipe.tune.batches) < 1:
        raise EagleError(f"tune.batches is {list(recipe.tune.batches)}; expected sizes from 1 on, such as [1, 8]")


def _recorded(
    decoder: SpeculativeDecoder,
    drafter: HeadDrafter,
    prompts: Sequence[list[int]],
    setting: Setting,
    recipe: Recipe,
    depth: int,
) -> tuple[Replay, ConfidenceCounts, list[list[int]]]:
    """What trees of any size would have guessed of the target's own answers; and the prompts that were answered, in the
    recording's order (those that the target ends at once are left out)."""
    counts, replays = ConfidenceCounts(), []
    max_new_tokens = recipe.tune.max_new_tokens
    answered: list[list[int]] = []
    top_ks = [k for k in TOP_KS if k <= drafter.vocabulary.size]
    with ProgressBar(f"record {setting.label}", total=len(prompts), unit="prompts") as bar:
        for start in range(0, len(prompts), ROWS):
            chosen = prompts[start : start + ROWS]
            seeds = list(range(start, start + len(chosen)))
            texts = answer_batch(
                decoder.plain(), chosen, seeds=seeds, setting=setting, max_new_tokens=max_new_tokens
            ).tokens
            kept = [row for row, text in enumerate(texts) if len(text) > 1]
            answered += [chosen[row] for row in kept]
            if kept:
                ids, mask = _padded([chosen[row] for row in kept])
                with bare_generation_config(decoder.target):
                    call = resolve(
                        decoder.target,
                        ids,
                        mask,
                        max_new_tokens=max_new_tokens,
                        seed=[seeds[row] for row in kept],
                        **setting.arguments(),
                    )
                replays.append(
                    record(
                        decoder.target,
                        drafter,
                        call.rows,
                        [texts[row] for row in kept],
                        top_ks=top_ks,
                        depth=depth,
                        counts=counts,
                    )
                )
            bar.advance(len(chosen))
    if len(answered) < 2 * max(recipe.tune.batches):
        raise EagleError(
            f"the target ends its answer at once to all but {len(answered)} of the {len(prompts)} tuning prompts; name others in "
            "tune.prompts"
        )
    return joined(replays), counts, answered


def _padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts])
    return ids, torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts])


def _of_batch(
    decoder: SpeculativeDecoder,
    drafter: HeadDrafter,
    version: str,
    prompts: Sequence[list[int]],
    replay: Replay,
    setting: Setting,
    batch: int,
    recipe: Recipe,
) -> tuple[TreeSettings, dict[str, Any]]:
    """The best tree for one batch size, and all that was found on the way."""
    prices = _prices(decoder, drafter, prompts, setting, batch, replay)
    found = search(replay.half(0), prices)
    best = different(found, recipe.tune.confirm)
    default = TreeSettings(budget=BUDGET, top_k=TOP_K, depth=DEPTHS[version])
    known = [one for one in (default, CHAIN) if one.top_k in replay.top_ks and one.depth <= replay.depth]
    forecasts: dict[TreeSettings, Forecast] = {one.tree: one for one in best}
    forecasts |= {tree: forecast(tree, replay.half(0), prices) for tree in (NO_DRAFTING, *known)}
    candidates = [NO_DRAFTING, default, CHAIN, *(one.tree for one in best if one.tree not in (default, CHAIN))]
    if drafter.vocabulary.size >= STATIC_WIDEST:
        candidates.insert(2, STATIC)
    if drafter.vocabulary.size < TOP_K:
        candidates.remove(default)
    measured = confirm(
        decoder,
        drafter,
        prompts[1::2],
        candidates,
        setting=setting,
        batch=batch,
        max_new_tokens=recipe.tune.max_new_tokens,
    )
    fastest = max(measured, key=lambda one: one.tokens_per_second)
    rows = []
    for one in measured:
        expected = forecasts.get(one.tree)
        rows.append(
            {
                "tree": dataclasses.asdict(one.tree),
                "name": _name(one.tree, default),
                "forecast": None if expected is None else {**dataclasses.asdict(expected), "tree": None},
                "tau": one.tau,
                "tau_raw": one.tau_raw,
                "tokens_per_second": one.tokens_per_second,
                "speedup": dataclasses.asdict(one.speedup),
                "chosen": one is fastest,
            }
        )
    return fastest.tree, {
        "setting": setting.label,
        "batch": batch,
        "target": prices.target.as_dict(),
        "draft": prices.draft.as_dict(),
        "rest_ms": prices.rest_ms,
        "plain_rest_ms": prices.plain_rest_ms,
        "by_budget": budget_curve(found),
        "candidates": rows,
    }


STATIC_WIDEST = 4
"""Children of a node of EAGLE-1's static tree, at most."""


def _name(tree: TreeSettings, default: TreeSettings) -> str:
    names = {default: "published", STATIC: "EAGLE-1 static", CHAIN: "chain of 4", NO_DRAFTING: "no drafting"}
    return names.get(tree, str(tree))


def _prices(
    decoder: SpeculativeDecoder,
    drafter: HeadDrafter,
    prompts: Sequence[list[int]],
    setting: Setting,
    batch: int,
    replay: Replay,
) -> Prices:
    """Times the parts, and a few real cycles for what lies outside them."""
    drafter.shape = shape_of(TreeSettings(budget=BUDGETS[-1], top_k=max(replay.top_ks), depth=DEPTHS["eagle1"]))
    target = measure_target(decoder, prompts, setting=setting, batches=[batch])[batch]
    widths = [k for k in (1, 2, 4, 10) if k in replay.top_ks]
    shapes = [(k, depth) for k in widths for depth in sorted({1, 2, 4, replay.depth})]
    draft = measure_draft(decoder, prompts, setting=setting, batch=batch, shapes=shapes, budget=BUDGETS[-1])
    sample = TreeSettings(budget=8, top_k=min(4, max(replay.top_ks)), depth=3)
    drafter.shape = shape_of(sample)
    rest = _outside(decoder, prompts, setting, batch) - draft.at(sample.top_k, sample.depth)
    plain_rest = _outside(decoder.plain(), prompts, setting, batch)
    return Prices(batch=batch, target=target, draft=draft, rest_ms=max(0.0, rest), plain_rest_ms=max(0.0, plain_rest))


def _outside(decoder: SpeculativeDecoder, prompts: Sequence[list[int]], setting: Setting, batch: int) -> float:
    """Milliseconds of a cycle outside the target's forwards: drafting, commits, the host's work.

    It is what the cycles of a longer answer take beyond those of a shorter one: what the drafter makes of the prompt, once an
    answer, is in both.
    """
    groups = list(states(prompts, batch))
    for number, limit in warm_ups(decoder.target, groups, few=SHORT, max_new_tokens=LONG):
        decoded(decoder, groups[number], 0, setting, limit)
    steps, spent = 0, 0.0
    for rows in groups:
        for sign, limit in ((-1, SHORT), (1, LONG)):
            stats = decoded(decoder, rows, 0, setting, limit).stats
            steps += sign * sum(row.verify_steps for row in stats)
            spent += sign * sum(row.draft_ms + row.host_ms for row in stats)
    return spent / max(1, steps)
