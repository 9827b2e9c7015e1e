"""The methods an evaluation compares, behind one call: prompt ids in, an `Answer` out, timed the same way.

Names: `hf` (Hugging Face generate), `hf-lookup` (its prompt lookup), `hf-assisted` (its assisted decoding, with
eval.draft_model), `plain` (our loop without drafting), and our drafters - eagle2, static, chain, ngram, model; tuned: with
the trees that eagle tune found; default: with nothing said of the tree - each also as DRAFTER@RULE, such as
`eagle2@rejection`, under another verification rule than the recipe's.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers.generation.streamers import BaseStreamer

from eagle.decode.decoder import SpeculativeDecoder
from eagle.decode_config import DRAFTERS, Chain, DecodeConfig, DrafterOptions, Plain, SmallModel, Tree
from eagle.draft.drafter import Drafter
from eagle.draft.tuned import TunedDrafter
from eagle.errors import EagleError
from eagle.eval.answers import Answer
from eagle.eval.batch_answer import bare_generation_config
from eagle.eval.checks.found import Check
from eagle.eval.meter import Meter
from eagle.eval.settings import Setting
from eagle.heads.eagle1 import DraftHead
from eagle.target.target import Target

HF, HF_LOOKUP, HF_ASSISTED, PLAIN, EAGLE2, CHAIN = "hf", "hf-lookup", "hf-assisted", "plain", "eagle2", "chain"
TUNED, DEFAULT, MODEL = "tuned", "default", SmallModel.name
HF_LOOKUP_TOKENS = 10
"""Candidates per step of Hugging Face's prompt lookup: the value its documentation uses."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One way to answer."""

    name: str
    run: Callable[[torch.Tensor, int, Setting, int], Answer]
    """(ids_1T int64 on the target's device, max_new_tokens, setting, seed) -> Answer."""
    greedy_check: Check
    sampled_check: Check
    decoder: SpeculativeDecoder | None = None
    """What answers; None: Hugging Face"""

    @property
    def drafter(self) -> str:
        """The name without its rule."""
        return self.name.partition("@")[0]

    def check(self, setting: Setting) -> Check:
        return self.greedy_check if setting.greedy else self.sampled_check

    def __call__(self, ids_1T: torch.Tensor, max_new_tokens: int, setting: Setting, seed: int) -> Answer:
        with Meter(ids_1T.device) as meter:
            answer = self.run(ids_1T, max_new_tokens, setting, seed)
        return dataclasses.replace(answer, use=meter.use)


class CommitClock(BaseStreamer):
    """Notes when new tokens arrive, and how many; the prompt, which is streamed first, is passed over.

    Tokens arrive on the CPU, so the device has finished them: no commit behind the first waits for it again.
    """

    def __init__(self, device: torch.device):
        self._device, self._prompt_came = device, False
        self._times: list[float] = []
        self._tokens: list[int] = []
        self.start = _now(device)

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_came:
            self._prompt_came = True
            return
        self._times.append(time.perf_counter() if self._times else _now(self._device))
        self._tokens.append(value.numel())

    def end(self) -> None:
        pass

    def times(self) -> dict[str, Any]:
        """`Answer`'s fields seconds, first_token_seconds, commit_tokens and commit_seconds, up to now.

        What comes together with the first token (of a decoder that drafts before it has said anything) is no commit: it has
        no time of its own.
        """
        end = _now(self._device)
        times = self._times or [end]
        return {
            "seconds": end - self.start,
            "first_token_seconds": times[0] - self.start,
            "commit_tokens": self._tokens[1:],
            "commit_seconds": [round(after - before, 7) for before, after in itertools.pairwise(times)],
        }


def make_methods(
    names: tuple[str, ...],
    target: Target,
    head: DraftHead | None,
    *,
    decode: DecodeConfig,
    chain_depth: int,
    draft_model: str | None = None,
) -> dict[str, Method]:
    """The methods by name, in that order; `plain` must be among them: the others are held against it.

    Raises EagleError for an unknown name, and where a method lacks what it needs (a head, a draft model).
    """
    if PLAIN not in names:
        raise EagleError(f"eval.methods is {list(names)}; {PLAIN} must be among them: the others are held against it")
    if len(set(names)) < len(names):
        raise EagleError(f"eval.methods is {list(names)}; expected every method once")
    if draft_model is None and isinstance(decode.drafter, SmallModel):
        draft_model = decode.drafter.model
    return {name: _make(name, target, head, decode, chain_depth, draft_model) for name in names}


def _make(
    name: str,
    target: Target,
    head: DraftHead | None,
    decode: DecodeConfig,
    chain_depth: int,
    draft_model: str | None,
) -> Method:
    if name == HF:
        return Method(name=name, run=_hugging_face(target), greedy_check="none", sampled_check="none")
    if name == HF_LOOKUP:
        run = _hugging_face(target, prompt_lookup_num_tokens=HF_LOOKUP_TOKENS)
        return Method(name=name, run=run, greedy_check="hf", sampled_check="distribution")
    if name == HF_ASSISTED:
        if draft_model is None:
            raise EagleError("method hf-assisted needs a small model with the target's tokenizer: set eval.draft_model")
        assistant = Target.from_pretrained(draft_model, device=str(target.device))
        run = _hugging_face(target, assistant_model=assistant.model)
        return Method(name=name, run=run, greedy_check="hf", sampled_check="distribution")
    if name == PLAIN:
        decoder = SpeculativeDecoder(target, kernels=decode.kernels)
        return Method(name=name, run=_ours(decoder), greedy_check="hf", sampled_check="none", decoder=decoder)
    drafter, _, rule_name = name.partition("@")
    known = [TUNED, DEFAULT, *(each for each in DRAFTERS if each != Plain.name)]
    if drafter not in known:
        raise EagleError(
            f'eval.methods holds "{name}"; known are {HF}, {HF_LOOKUP}, {HF_ASSISTED}, {PLAIN}, {", ".join(known)}, and the '
            "last ones with a rule behind an @, such as eagle2@rejection"
        )
    if rule_name:
        changes: dict[str, Any] = {"rule": decode.kind_of_rule(rule_name), "children": "auto"}
    else:
        changes = {}
    # eagle2 takes the recipe's tree or the published one; tuned takes what eagle tune left beside the head, default what a
    # decoder takes that was told nothing.
    if drafter in (TUNED, DEFAULT):
        options: DrafterOptions = Tree()
    elif drafter == CHAIN:
        options = Chain(depth=chain_depth)
    elif drafter == MODEL and draft_model is not None:
        options = dataclasses.replace(cast(SmallModel, decode.kind(MODEL)), model=draft_model)
    else:
        options = decode.kind(drafter)
        options = options.as_published() if isinstance(options, Tree) else options
    decode = dataclasses.replace(decode, drafter=options, **changes)
    rule = decode.rule
    decoder = SpeculativeDecoder.from_pretrained(target, head if options.reads_head else None, decode=decode)
    if drafter == TUNED and not _is_tuned(decoder.drafter):
        raise EagleError(
            f"method {name}: beside the head lie no trees that were tuned on this machine for engine {target.engine} and "
            f"{target.dtype} (and the rule coupled); run eagle tune RECIPE first"
        )
    if not rule.lossless:
        return Method(name=name, run=_ours(decoder), greedy_check="lossy", sampled_check="lossy", decoder=decoder)
    sampled: Check = "plain" if rule.name == "coupled" else "distribution"
    return Method(name=name, run=_ours(decoder), greedy_check="plain", sampled_check=sampled, decoder=decoder)


def _is_tuned(drafter: Drafter | None) -> bool:
    return isinstance(drafter, TunedDrafter) and drafter.tuned.source == "tuned"


def rotated(methods: Mapping[str, Any], turn: int) -> list[str]:
    """The order in which request number `turn` runs the methods: each method comes first equally often."""
    names = list(methods)
    shift = turn % len(names)
    return names[shift:] + names[:shift]


def _ours(decoder: SpeculativeDecoder) -> Callable[[torch.Tensor, int, Setting, int], Answer]:
    def answer(ids_1T: torch.Tensor, max_new_tokens: int, setting: Setting, seed: int) -> Answer:
        with bare_generation_config(decoder.target):
            clock = CommitClock(ids_1T.device)
            out = decoder.generate(
                ids_1T, max_new_tokens=max_new_tokens, seed=[seed], streamer=clock, **setting.arguments()
            )
            times = clock.times()
        assert out.stats is not None
        (stats,) = out.stats
        return Answer(
            tokens=out.sequences[0, ids_1T.shape[1] :].tolist(),
            **times,
            accepted=stats.accepted,
            attempts_per_depth=stats.attempts_per_depth,
            accepted_per_depth=stats.accepted_per_depth,
            nodes=stats.nodes,
            tree=stats.tree,
            prefill_seconds=stats.prefill_ms / 1e3,
            draft_seconds=stats.draft_ms / 1e3,
            verify_seconds=stats.verify_ms / 1e3,
        )

    return answer


def _hugging_face(target: Target, **how: Any) -> Callable[[torch.Tensor, int, Setting, int], Answer]:
    """Hugging Face's own loop on the same loaded weights; `how`: keywords that choose one of its assisted modes."""

    def answer(ids_1T: torch.Tensor, max_new_tokens: int, setting: Setting, seed: int) -> Answer:
        how_to_sample = setting.arguments()
        with bare_generation_config(target), torch.inference_mode(), torch.random.fork_rng():
            torch.manual_seed(seed)
            clock = CommitClock(ids_1T.device)
            sequences = target.model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=max_new_tokens,
                streamer=clock,
                **how_to_sample,
                **how,
            )
            times = clock.times()
        return Answer(tokens=sequences[0, ids_1T.shape[1] :].tolist(), **times)

    return answer


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
