"""`eagle eval RECIPE --decoding`: one prompt set under several ways of decoding, texts side by side, with latency and memory.

Every way is decoded plainly; those that can be drafted for are decoded once more with the recipe's drafter, where its head
(or its draft model) is there. First turns only, one request at a time, the order of the ways rotating from prompt to prompt.
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle.config import Recipe
from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import Ngram, SmallModel
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.experiment import Experiment, Job
from eagle.eval.line_log import Record
from eagle.eval.methods import CommitClock
from eagle.eval.quality.decoding_report import markdown, print_decoding
from eagle.eval.quality.likelihood import negative_log_likelihood
from eagle.eval.suites.prompt import Prompt
from eagle.eval.which_head import drafting_head
from eagle.files import sha256_text
from eagle.progress import ProgressBar
from eagle.sample.stats import AcceptanceLength

_BEAM = {"do_sample": False, "num_beams": 4}
_SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to decode."""

    about: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Of `SpeculativeDecoder.generate`."""

    @property
    def searches(self) -> bool:
        return "num_beams" in self.keywords


WAYS: dict[str, Way] = {
    "greedy": Way(about="the likeliest token, each time", keywords={"do_sample": False}),
    "beam-4": Way(about="beam search, 4 hypotheses", keywords=_BEAM),
    "beam-4-pruned": Way(
        about="the same; hypotheses of at most a tenth of the best one's probability are dropped (prune_relative 0.1), and those "
        "whose last token has at most a fiftieth of the best one's (prune_local 0.02)",
        keywords={**_BEAM, "prune_relative": 0.1, "prune_local": 0.02},
    ),
    "top-k": Way(about="sampled at T=1 among the 50 likeliest tokens", keywords={**_SAMPLED, "top_k": 50}),
    "top-p": Way(about="sampled at T=1 among the likeliest tokens of mass 0.9", keywords={**_SAMPLED, "top_p": 0.9}),
    "min-p": Way(
        about="sampled at T=1 among tokens of at least a tenth of the best one's probability",
        keywords={**_SAMPLED, "min_p": 0.1},
    ),
    "hybrid": Way(
        about="the first 4 tokens sampled as top-k, then beam search with 4 hypotheses",
        keywords={**_SAMPLED, "top_k": 50, "num_beams": 4, "sample_first": 4},
    ),
}
DRAFTED = "+draft"
"""Behind a way's name: the same, with drafting."""

DEFINITIONS = {
    "TTFT": "time from the call to the first token that is final, in ms. A search can change its mind until its end, so its TTFT "
    "is its whole time",
    "ms per token": "wall time of the whole call, the prompt's forward included, over the new tokens of the answer",
    "KV": "memory in use for the target's keys and values at its fullest, in MiB: tokens held times bytes per token over all "
    "layers. Plain and drafted: prompt and answer (a verification's tree nodes, freed behind it, are not counted). Search: live "
    "hypotheses times their length, since every hypothesis carries its own copy of the prompt's",
    "NLL per token": "negative log-likelihood of the answer under the target at temperature 1 without filters, nats per token: "
    "lower is likelier, not better",
    "distinct-2": "share of the answer's pairs of neighbouring tokens that are different pairs: low means that it repeats itself",
    "drafted": "wall time per token with the recipe's drafter, and tau (pooled; tau_raw in decoding.json: before EOS and the "
    "length limit cut). Under the rule coupled the text is the plain one; the line below the table counts how many were",
}
_QUANTITIES = ("tokens", "first_token_ms", "ms_per_token", "kv_mib", "nll_per_token", "distinct_2")


def compare_decoding(recipe: Recipe, head: str | Path | None = None) -> dict[str, Any]:
    """Answers every prompt every way; writes eval/decoding.json and decoding.md, prints the table and some texts.

    A killed comparison continues. Raises EagleError when all prompts are too long, or --head is not read.
    """
    limit = recipe.eval.max_new_tokens
    experiment = Experiment.of("decoding", recipe, max_new_tokens=limit)
    target = experiment.target
    target.use_engine(recipe.decode.engine)
    decoders = {"": SpeculativeDecoder(target, kernels=recipe.decode.kernels)}
    head_path = _head_of(recipe, head)
    if head_path is not None or isinstance(recipe.decode.drafter, Ngram | SmallModel):
        decoders[DRAFTED] = SpeculativeDecoder.from_pretrained(target, head_path, decode=recipe.decode)
    ways = [name + suffix for suffix in decoders for name, way in WAYS.items() if not (suffix and way.searches)]

    def job(prompt: Prompt, name: str) -> Job:
        seed = int(sha256_text(f"{recipe.eval.seed} {prompt.id}")[:15], 16)

        def run(bar: ProgressBar) -> dict[str, Any]:
            found = _answer(decoders, name, experiment.ids[prompt.id], seed=seed, limit=limit)
            bar.advance(1)
            return found

        return Job(key=f"{prompt.id} {name}", about={"prompt": prompt.id, "way": name, "seed": seed}, run=run)

    records = experiment.run(
        [job(prompt, name) for prompt, name in experiment.in_turns(ways)],
        experiment.identity(head_path, {name: dict(way.keywords) for name, way in WAYS.items()}),
        before=experiment.warm_up(
            ways, lambda prompt, name, tokens: _answer(decoders, name, experiment.ids[prompt.id], seed=0, limit=tokens)
        ),
    )
    result = {**_result(recipe, head_path, experiment.prompts, ways, records), "skipped": experiment.skipped}
    return experiment.keep(result, show=print_decoding, page=markdown, more=", decoding.md all texts")


def _head_of(recipe: Recipe, head: str | Path | None) -> str | Path | None:
    """The head that drafts, None where none does: here a recipe's own head may be missing."""
    if recipe.decode.drafter.reads_head and head is None and not recipe.head_dir.is_dir():
        return None
    return drafting_head(recipe, head)


def _answer(
    decoders: Mapping[str, SpeculativeDecoder], job: str, ids: list[int], *, seed: int, limit: int
) -> dict[str, Any]:
    name = job.removesuffix(DRAFTED)
    way, decoder = WAYS[name], decoders[job.removeprefix(name)]
    target, ids_1T = decoder.target, torch.tensor([ids], device=decoder.target.device)
    assert target.tokenizer is not None
    with bare_generation_config(target):
        clock = None if way.searches else CommitClock(target.device)
        start = time.perf_counter()
        out = decoder.generate(ids_1T, max_new_tokens=limit, seed=[seed], streamer=clock, **way.keywords)
        seconds = time.perf_counter() - start
    assert out.stats is not None
    (stats,) = out.stats
    tokens = out.sequences[0, len(ids) : len(ids) + stats.new_tokens].tolist()
    held = len(ids) + len(tokens) - 1 if stats.beams is None else stats.beams.kv_tokens
    return {
        "text": target.tokenizer.decode(tokens, skip_special_tokens=True),
        "prompt_tokens": len(ids),
        "tokens": len(tokens),
        "finish_reason": stats.finish_reason,
        "seconds": seconds,
        "first_token_ms": 1e3 * (seconds if clock is None else clock.times()["first_token_seconds"]),
        "ms_per_token": 1e3 * seconds / max(len(tokens), 1),
        "kv_mib": held * stats.kv_bytes_per_token / 2**20,
        "nll_per_token": negative_log_likelihood(target, ids, tokens) / max(len(tokens), 1),
        "distinct_2": _distinct(tokens),
        "accepted": stats.accepted if stats.attempts_per_depth else [],
    }


def _distinct(tokens: Sequence[int]) -> float:
    pairs = list(itertools.pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def _result(
    recipe: Recipe, head: str | Path | None, prompts: Sequence[Prompt], jobs: Sequence[str], records: Sequence[Record]
) -> dict[str, Any]:
    of: dict[str, dict[str, Record]] = {job: {} for job in jobs}
    for record in records:
        of[record["way"]][record["prompt"]] = record
    ways = {}
    for name in WAYS:
        found = list(of[name].values())
        ways[name] = {quantity: statistics.median(one[quantity] for one in found) for quantity in _QUANTITIES}
        drafted = of.get(name + DRAFTED)
        if drafted:
            same = sum(one["text"] == of[name][prompt]["text"] for prompt, one in drafted.items())
            ways[name]["drafted"] = {
                "first_token_ms": statistics.median(one["first_token_ms"] for one in drafted.values()),
                "ms_per_token": statistics.median(one["ms_per_token"] for one in drafted.values()),
                **AcceptanceLength.of((one["tokens"], one["accepted"]) for one in drafted.values()).as_dict(),
                "same_text": same,
                "answers": len(drafted),
            }
    texts = [
        {"prompt": prompt.id, "question": prompt.turns[0], "answers": {name: of[name][prompt.id] for name in WAYS}}
        for prompt in prompts
    ]
    return {
        "prompts": len(prompts),
        "max_new_tokens": recipe.eval.max_new_tokens,
        "target": recipe.target.model,
        "head": None if head is None else str(head),
        "lossless": recipe.decode.rule.name == "coupled",
        "about": {name: way.about for name, way in WAYS.items()},
        "ways": ways,
        "definitions": DEFINITIONS,
        "texts": texts,
    }
