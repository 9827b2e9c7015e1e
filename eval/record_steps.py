"""Real decode steps for the report: one prompt through the decoder, with every tree and every walk noted down.

The rule is wrapped: what it sees and says is recorded, what it does is unchanged, so the answer is the one that was measured.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.methods import Method
from eagle.eval.results import main_method
from eagle.eval.runner import first_turn, fits, request_seed
from eagle.eval.settings import Setting
from eagle.eval.suites.prompt_set import Prompt
from eagle.target.prompt import prompt_ids
from eagle.verify.coupled import NodeView, Rule, Walk

MOST_TOKENS = 96
"""Of a recorded answer."""
MOST_SETTINGS = 2
"""Sampling settings that an answer is recorded under."""
SHOWN_STEPS = 5
"""Steps whose trees are kept whole."""
BINS = 10
"""Equal widths of confidence in which acceptance is counted."""
CONTEXT = 12
"""Tokens before a token with which its text is found: its piece may depend on them."""


Steps = list[tuple[DraftTree, Walk]]


def recording_rule(rule: Rule) -> tuple[Rule, Steps]:
    """The same rule, and what it will have walked."""
    steps: Steps = []

    def walk(self: Rule, tree: DraftTree, row: int, view: NodeView) -> Walk:
        steps.append((tree, type(rule).walk(self, tree, row, view)))
        return steps[-1][1]

    made: Rule = type("Recorder", (type(rule),), {"walk": walk})(**vars(rule))
    return made, steps


def record_steps(
    decoder: SpeculativeDecoder,
    ids: Sequence[int],
    *,
    setting: Setting,
    seed: int,
    max_new_tokens: int,
    question: str,
    method: str,
    shown: int = SHOWN_STEPS,
) -> dict[str, Any]:
    """One answer, how each of its tokens came, and `shown` of its verify steps with their trees (results.schema.json: trees).

    decoder: one that drafts. ids: the prompt's token ids; question: what it asks, for the reader.
    """
    tokenizer = decoder.target.tokenizer
    if tokenizer is None:
        raise EagleError(f"target {decoder.target.name} has no tokenizer; load it with one")
    recorder, steps = recording_rule(decoder.rule)
    # Kernels walk without the rule; where they do not run the tokens are the same.
    kernels = "auto" if decoder.kernels == "triton" else decoder.kernels
    recording = SpeculativeDecoder(decoder.target, decoder.drafter, recorder, kernels=kernels)
    ids_1T = torch.tensor([list(ids)], device=decoder.target.device)
    with bare_generation_config(decoder.target):
        stream = recording.pieces(ids_1T, max_new_tokens=max_new_tokens, seed=[seed], **setting.arguments())
        blocks = list(stream.blocks())  # the prefill's token, then what each verify step brought
    answer = stream.tokens
    starts = list(itertools.accumulate(len(block) for block in blocks))
    kept = _choose([len(walk.path) for _, walk in steps], shown)
    return {
        "method": method,
        "rule": recorder.name,
        "setting": setting.label,
        "question": question,
        "seed": seed,
        "verify_steps": len(steps),
        "accepted": [len(walk.path) - 1 for _, walk in steps],
        "tokens": [
            {
                "text": piece.text,
                "origin": piece.origin,
                "step": number - 1 if number else None,
            }
            for number, block in enumerate(blocks)
            for piece in block
        ],
        "steps": [_step(tokenizer, [*ids, *answer[: starts[number]]], number, *steps[number]) for number in kept],
        "calibration": calibration(steps),
    }


def record_trees(
    methods: Mapping[str, Method],
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[dict[str, Any]]:
    """The main method's answer to the first prompt that fits, under the first settings; nothing where no method drafts."""
    name = main_method(methods)
    decoder = methods[name].decoder
    if decoder is None or decoder.drafter is None:
        return []
    limit = min(max_new_tokens, MOST_TOKENS)
    found = []
    for setting in settings[:MOST_SETTINGS]:
        answers = (
            record_answer(decoder, prompt, setting=setting, seed=seed, max_new_tokens=limit, method=name)
            for prompt in prompts
        )
        found.append(next((answer for answer in answers if answer is not None), None))
    return [answer for answer in found if answer is not None]


def record_answer(
    decoder: SpeculativeDecoder, prompt: Prompt, *, setting: Setting, seed: int, max_new_tokens: int, method: str
) -> dict[str, Any] | None:
    """`record_steps` of a prompt's first turn; None where it is longer than the target's positions."""
    ids = prompt_ids(decoder.target.tokenizer, first_turn(prompt))
    if not fits(decoder.target, ids, max_new_tokens):
        return None
    return record_steps(
        decoder,
        ids,
        setting=setting,
        seed=request_seed(seed, prompt, 0, setting),
        max_new_tokens=max_new_tokens,
        question=prompt.turns[0],
        method=method,
    )


def _choose(path_lengths: Sequence[int], shown: int) -> list[int]:
    """The steps to show, ascending: the ones that accepted most, and the first that accepted nothing."""
    by_length = sorted(range(len(path_lengths)), key=lambda number: (-path_lengths[number], number))
    misses = [number for number in range(len(path_lengths)) if path_lengths[number] == 1]
    chosen = misses[:1] + [number for number in by_length if number not in misses[:1]]
    return sorted(chosen[:shown])


def _step(
    tokenizer: PreTrainedTokenizerBase, before: list[int], number: int, tree: DraftTree, walk: Walk
) -> dict[str, Any]:
    """before: every token up to the root, the root included."""
    tokens, parents = tree.tokens_BN[0].tolist(), tree.parents_BN[0].tolist()
    log_confidence = tree.log_confidence_BN[0].tolist()
    paths: dict[int, list[int]] = {}
    nodes = []
    accepted = set(walk.path)
    shown = tree.below_root[0].nonzero().flatten().tolist()
    number_of = {node: place for place, node in enumerate(shown)}
    for node in shown:
        token, parent = tokens[node], parents[node]
        paths[node] = [] if parent < 0 else [*paths[parent], token]
        above = before[:-1] if parent < 0 else [*before, *paths[parent]]
        nodes.append(
            {
                "text": node_text(tokenizer, above, token),
                "token": token,
                "parent": number_of.get(parent, -1),
                "depth": int(tree.depths_BN[0, node]),
                "confidence": math.exp(log_confidence[node]),
                "accepted": node in accepted,
            }
        )
    last = [*before, *walk.tokens[:-1]]
    emitted = {
        "text": node_text(tokenizer, last, walk.tokens[-1]),
        "token": walk.tokens[-1],
        "parent": number_of[walk.path[-1]],
        "origin": "bonus" if walk.at_leaf else "correction",
    }
    return {"step": number, "nodes": nodes, "emitted": emitted}


def node_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], token: int) -> str:
    """What a token adds to the text; the vocabulary's own name of it where that is nothing whole (part of a character)."""
    context = list(before[-CONTEXT:])
    stem = tokenizer.decode(context)
    whole = tokenizer.decode([*context, token])
    added = whole[len(stem) :] if whole.startswith(stem) else ""
    if added and "\ufffd" not in added:
        return added
    name = tokenizer.convert_ids_to_tokens(token)
    return name if isinstance(name, str) else f"<{token}>"


def calibration(steps: Sequence[tuple[DraftTree, Walk]]) -> list[dict[str, Any]]:
    """Per bin of path confidence: drafted nodes, their mean confidence, and the share of them that was accepted."""
    counts = [{"nodes": 0, "confidence": 0.0, "accepted": 0} for _ in range(BINS)]
    for tree, walk in steps:
        accepted, below_root = set(walk.path), tree.below_root[0].tolist()
        for node, log_confidence in enumerate(tree.log_confidence_BN[0].tolist()):
            if node == 0 or not below_root[node]:
                continue
            confidence = math.exp(log_confidence)
            tally = counts[min(BINS - 1, int(confidence * BINS))]
            tally["nodes"] += 1
            tally["confidence"] += confidence
            tally["accepted"] += node in accepted
    return [
        {
            "low": number / BINS,
            "high": (number + 1) / BINS,
            "nodes": tally["nodes"],
            "confidence": tally["confidence"] / tally["nodes"],
            "accepted": tally["accepted"] / tally["nodes"],
        }
        for number, tally in enumerate(counts)
        if tally["nodes"]
    ]
