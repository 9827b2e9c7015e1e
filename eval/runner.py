"""Running the requests of an evaluation: render, ask every method in turn, compare, log."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from eagle.errors import EagleError
from eagle.eval.answers import Answer, AnswerLog, Request
from eagle.eval.checks.exactness import divergence
from eagle.eval.methods import PLAIN, Method, rotated
from eagle.eval.settings import Setting
from eagle.eval.suites.prompt_set import Prompt
from eagle.eval.warm_up import capacities, captures, lengthened
from eagle.files import sha256_text
from eagle.progress import ProgressBar
from eagle.target.prompt import prompt_ids
from eagle.target.target import Target

WARM_UP_TOKENS = 16
SHORT_REPLY = "-"
"""Stands for a reply that is not known yet: hardly any is shorter."""


class Runner:
    """Asks every method every request, under every setting; `methods` must hold `plain`."""

    def __init__(
        self,
        target: Target,
        methods: Mapping[str, Method],
        settings: Sequence[Setting],
        *,
        max_new_tokens: int,
        seed: int = 0,
        processes: int = 1,
    ):
        """processes: how many share this machine, for the requests' record."""
        assert PLAIN in methods
        if target.tokenizer is None:
            raise EagleError(f"target {target.name} has no tokenizer; load it with one")
        self.target, self.tokenizer, self.max_new_tokens, self.seed = target, target.tokenizer, max_new_tokens, seed
        self.methods, self.settings, self.processes = dict(methods), list(settings), processes

    def warm_up(self, prompts: Sequence[Prompt], asked: Sequence[Prompt]) -> None:
        """Lets every method answer the first turns of `prompts` under every setting, uncounted: allocations, caches, compilation.

        asked: what will be answered. Where graphs are captured, our own methods also give whole answers to a prompt of every
        capacity that these need (warm_up.py).
        """
        first = [prompt_ids(self.tokenizer, first_turn(prompt)) for prompt in prompts]
        first = [ids for ids in first if self._fits(ids)]
        for ids, method, setting in itertools.product(first, self.methods.values(), self.settings):
            method(self._tensor(ids), min(WARM_UP_TOKENS, self.max_new_tokens), setting, 0)
        if first and captures(self.target):
            ours = [method for method in self.methods.values() if method.decoder is not None]
            for ids, method, setting in itertools.product(self._of_every_capacity(asked), ours, self.settings):
                method(self._tensor(ids), self.max_new_tokens, setting, 0)

    def _of_every_capacity(self, asked: Sequence[Prompt]) -> list[list[int]]:
        """A prompt for every capacity that a turn may need; of later turns, whose replies are not known, for all up to that
        of the longest replies."""
        first: dict[int, list[int]] = {}
        later: dict[int, list[int]] = {}
        for prompt in asked:
            for turn in range(len(prompt.turns)):
                ids = prompt_ids(self.tokenizer, _messages(prompt, [SHORT_REPLY] * turn, turn=turn))
                if not self._fits(ids):
                    break
                longest = len(ids) + turn * self.max_new_tokens
                if self.target.max_positions is not None:
                    longest = min(longest, self.target.max_positions - self.max_new_tokens)
                for slots in capacities(len(ids), longest, self.max_new_tokens):
                    known = later if turn else first
                    known[slots] = max(known.get(slots, ids), ids, key=len)
        made = [lengthened(ids, slots, self.max_new_tokens) for slots, ids in later.items() if slots not in first]
        return [*first.values(), *made]

    def answer(self, prompt: Prompt, log: AnswerLog, bar: ProgressBar) -> list[dict[str, Any]]:
        """Answers the turns that the log lacks. Returns what was passed over, with the reason."""
        return [passed for setting in self.settings for passed in self._answer(prompt, setting, log, bar)]

    def _answer(self, prompt: Prompt, setting: Setting, log: AnswerLog, bar: ProgressBar) -> list[dict[str, Any]]:
        replies: list[str] = []
        for turn in range(len(prompt.turns)):
            request = known(log, prompt, turn, setting)
            if request is None:
                ids = prompt_ids(self.tokenizer, _messages(prompt, replies, turn=turn))
                if not self._fits(ids):
                    bar.advance(len(prompt.turns) - turn)
                    limit = f"{len(ids)} + {self.max_new_tokens} tokens, the target takes {self.target.max_positions}"
                    return [{"prompt": prompt.id, "turn": turn, "setting": setting.label, "reason": limit}]
                asked = sum(request.setting == setting.label for request in log.requests.values())
                request = self._ask(prompt, turn, ids, setting, number=asked)
                log.append(request)
                bar.advance(1)
            replies.append(self.tokenizer.decode(request.answers[PLAIN].tokens, skip_special_tokens=True))
        return []

    def _ask(self, prompt: Prompt, turn: int, ids: list[int], setting: Setting, *, number: int) -> Request:
        """number: requests that were answered under this setting before."""
        order = rotated(self.methods, number)
        seed = request_seed(self.seed, prompt, turn, setting)
        answers: dict[str, Answer] = {
            name: self.methods[name](self._tensor(ids), self.max_new_tokens, setting, seed) for name in order
        }
        divergences = {}
        for name, method in self.methods.items():
            versus = method.check(setting)
            if versus not in answers:  # nothing to be equal to: see methods.Check
                continue
            found = divergence(
                self.target,
                prompt_ids=ids,
                tokens=answers[name].tokens,
                reference=answers[versus].tokens,
                versus=versus,
                sampling=setting.seeded(seed),
                alike=len(ids) if versus == PLAIN else 0,
            )
            if found is not None:
                divergences[name] = found
        return Request(
            prompt=prompt.id,
            turn=turn,
            category=prompt.category,
            setting=setting.label,
            seed=seed,
            prompt_tokens=len(ids),
            order=order,
            answers=answers,
            divergences=divergences,
            processes=self.processes,
            prompt_sha256=prompt.sha256,
        )

    def unanswered(self, prompts: Sequence[Prompt], log: AnswerLog) -> list[Prompt]:
        """Those of which the log lacks a turn under any setting, the ones that will be passed over among them."""
        return [
            prompt
            for prompt in prompts
            if any(known(log, *request) is None for request in every_request([prompt], self.settings))
        ]

    def _fits(self, ids: list[int]) -> bool:
        return fits(self.target, ids, self.max_new_tokens)

    def _tensor(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self.target.device)


def every_request(prompts: Sequence[Prompt], settings: Sequence[Setting]) -> Iterator[tuple[Prompt, int, Setting]]:
    """(prompt, turn, setting), by prompt, setting and turn."""
    for prompt, setting in itertools.product(prompts, settings):
        for turn in range(len(prompt.turns)):
            yield prompt, turn, setting


def known(log: AnswerLog, prompt: Prompt, turn: int, setting: Setting) -> Request | None:
    """The request as the log has it; None where it lacks it, or asked another question under the same id."""
    found = log.requests.get((prompt.id, turn, setting.label))
    return found if found is not None and found.prompt_sha256 == prompt.sha256 else None


def request_seed(seed: int, prompt: Prompt, turn: int, setting: Setting) -> int:
    """The row's seed: a function of the request alone, whatever else is evaluated."""
    return int(sha256_text(f"{seed} {prompt.id} {turn} {setting.label}")[:15], 16)


def fits(target: Target, ids: list[int], max_new_tokens: int) -> bool:
    """Whether prompt and answer lie within the target's positions."""
    return target.max_positions is None or len(ids) + max_new_tokens <= target.max_positions


def first_turn(prompt: Prompt) -> list[dict[str, str]]:
    """The messages of the prompt's first request."""
    return _messages(prompt, [], turn=0)


def _messages(prompt: Prompt, replies: list[str], *, turn: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for question, reply in zip(prompt.turns, replies, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "user", "content": prompt.turns[turn]}]
