"""Conversation -> token ids with a loss mask, by the boundaries of the chat template's own output.

Nothing is searched for in the text. For each assistant turn k the template renders messages[:k] with its generation
prompt (what a server feeds the target before that answer) and messages[:k+1] (what stands there after it): the answer
is the difference. Where every such rendering is a prefix of the whole conversation's, one sample carries all turns.
Thinking templates rewrite earlier turns, so theirs are not prefixes: then each assistant turn becomes a sample of its
own, with its history as a server would render it at that moment.

Supervised are the answer's tokens up to and including the token that ends the turn; a newline that the template puts
after it is not, for the model never generates it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle.data.chat_template import RenderError, apply, common_prefix, frame_of
from eagle.data.conversations import Conversation, Message
from eagle.data.sources import Rejected
from eagle.errors import EagleError

VERSION, THINKING_VERSION = 1, 2
"""Raised whenever the same conversation would give other ids or another mask: prepared data is then rebuilt. The second
is of the chat templates whose `Frame.thinks`."""

REWRITTEN = "the chat template rewrites earlier turns: one sample per assistant turn"
NOT_RENDERED = "the chat template leaves the reasoning out"
ADDED = "the chat template adds text to the answers that the data does not have"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One training document."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True where the token is the assistant's (same length)."""
    turns: int
    """Assistant turns with at least one supervised token."""
    cut: bool
    """Whether max_len shortened it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation's samples: one, or one per assistant turn when the template rewrites history."""

    samples: tuple[Sample, ...]
    turns_beyond: int
    """Assistant turns of which nothing was left within max_len."""
    turns_not_learnt: int
    """Assistant turns that loss flags leave out."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Span:
    """Characters [start, end) of a text are what the assistant wrote; its end-of-turn token begins in [end, until)."""

    start: int
    end: int
    until: int


class Renderer:
    """Renders conversations under one tokenizer, chat template and max_len.

    Raises EagleError for a tokenizer that gives no character offsets, has no chat template, or whose template fails on
    the plainest conversation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_len: int, vocab_size: int | None = None):
        """vocab_size: rows of the target's embedding; None: unknown."""
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise EagleError(
                f"the tokenizer of {name} is a slow (Python) one, which gives no character offsets; expected a fast "
                "one: give a target whose folder has a tokenizer.json (convert_slow_tokenizer in transformers makes it)"
            )
        if not tokenizer.chat_template:
            raise EagleError(f"the tokenizer of {name} has no chat template; set data.chat_template to a Jinja file")
        if max_len < 2:
            raise EagleError(f"data.max_len is {max_len}, expected at least 2 tokens")
        self.tokenizer, self.max_len, self._vocab_size = tokenizer, max_len, vocab_size
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._end_ids = special | set(tokenizer.all_special_ids)
        try:
            self._frame = frame_of(tokenizer)
        except RenderError as error:
            raise EagleError(
                f"the chat template of {name} fails on a user turn and its answer ({error.args[1]}); "
                "set data.chat_template to a Jinja file that renders them"
            ) from error
        before = self._frame.before
        said = not self._end_ids & set(tokenizer(before, add_special_tokens=False)["input_ids"])
        self._tag = before.split()[0] if before.strip() and said else ""
        """The first of the words that the template puts before an answer, "<think>" say; "": there are none, or they hold
        special tokens, which no answer's text has."""

    @property
    def version(self) -> int:
        """Of what this renders: VERSION or THINKING_VERSION."""
        return THINKING_VERSION if self._frame.thinks else VERSION

    def render(self, conversation: Conversation) -> Rendered | Rejected:
        """The samples of a conversation; trailing turns that the assistant has not answered are left out."""
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        if not messages:
            return Rejected(conversation.origin, "no assistant turn", "only a prompt; answer it: eagle data regenerate")
        try:
            return self._render(messages, conversation)
        except RenderError as error:
            return Rejected(conversation.origin, *error.args)

    def _render(self, messages: list[Message], conversation: Conversation) -> Rendered:
        template = functools.partial(apply, self.tokenizer, tools=conversation.tools)
        ends = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        turns = {
            k: self._turn(messages[: k + 1], template, finished=conversation.finished or k != ends[-1]) for k in ends
        }
        learnt = {k: turn for k, turn in turns.items() if k not in conversation.not_learnt}
        if not learnt:
            raise RenderError("no assistant turn to learn from", "the loss flags leave every answer out")
        notes = list(conversation.notes)
        if len(messages) < len(conversation.messages):
            notes.append("trailing turns without an answer were left out")
        for k, (text, span) in learnt.items():
            answer, reasoning = text[span.start : span.end], messages[k].get("reasoning_content")
            if reasoning and reasoning.strip() not in answer:
                notes.append(NOT_RENDERED)
            added = self._frame.before.strip()
            if added and answer.startswith(self._frame.before) and not messages[k]["content"].startswith(added):
                notes.append(ADDED)
        whole = turns[ends[-1]][0]
        if all(whole.startswith(text) for k, (text, _) in turns.items() if k != ends[-1]):
            samples = [self._sample(whole, [span for _, span in learnt.values()])]
        else:
            notes.append(REWRITTEN)
            samples = [self._sample(text, [span]) for text, span in learnt.values()]
        kept = [sample for sample in samples if sample.turns]
        if not kept:
            raise RenderError("no supervised token", f"the first answer starts after max_len = {self.max_len} tokens")
        return Rendered(
            samples=tuple(kept),
            turns_beyond=len(learnt) - sum(sample.turns for sample in kept),
            turns_not_learnt=len(turns) - len(learnt),
            notes=tuple(dict.fromkeys(notes)),
        )

    def _turn(self, messages: list[Message], template: Any, *, finished: bool) -> tuple[str, _Span]:
        """The text up to the end of an assistant turn, and where in it the answer is."""
        prompt = template(messages[:-1], generation_prompt=True)
        text = template(messages, generation_prompt=False)
        if messages[-1].get("tool_calls"):
            bare = {key: value for key, value in messages[-1].items() if key != "tool_calls"}
            if text == template([*messages[:-1], bare], generation_prompt=False):
                raise RenderError("the chat template does not render tool calls", f"turn {len(messages)}")
        if not text.startswith(prompt):
            text = self._continue_prompt(prompt, text, messages[-1])
        elif self._said_as_it_is(text.removeprefix(prompt), messages[-1], finished=finished):
            text = prompt + messages[-1]["content"] + self._frame.after
        end = len(text) - len(self._frame.after)
        if not text.endswith(self._frame.after) or end <= len(prompt):
            end = self._last_end_token(text, len(prompt))
        if end <= len(prompt):
            raise RenderError("an assistant turn renders to nothing", f"turn {len(messages)}")
        if not finished:
            text = text[:end]
        return text, _Span(len(prompt), end, until=len(text))

    def _said_as_it_is(self, rendered: str, message: Message, *, finished: bool) -> bool:
        """Whether the content is what the target said behind its prompt, although the template puts its own words between.

        So it is where a length limit cut the answer, perhaps inside its thought, which the template takes for an answer
        without one; and where the content itself begins as those words do. rendered: what stands behind the prompt.
        """
        content, before = message["content"], self._frame.before
        if not self._tag or message.get("tool_calls") or message.get("reasoning_content"):
            return False
        return not finished or (
            content.lstrip().startswith(self._tag)
            and rendered.startswith(before)
            and rendered.removeprefix(before).startswith(content.strip())
        )

    def _continue_prompt(self, prompt: str, text: str, message: Message) -> str:
        """The generated text behind a generation prompt that opens the answer itself (`<think>` of DeepSeek-R1).

        Such a template drops the reasoning from what it renders; what the target generated stands in the message, behind
        what the prompt opened (as `eagle data regenerate` writes it).
        """
        same, opening, content = common_prefix(prompt, text), self._frame.opened, message["content"]
        if not opening or not prompt.endswith(opening):
            opening = prompt[same:]
        if message.get("reasoning_content"):
            closing = opening.strip().replace("<", "</", 1)
            content = f"{opening.strip()}\n{message['reasoning_content']}\n{closing}\n\n{content}"
        if opening and content.startswith(opening):
            return prompt + content.removeprefix(opening) + self._frame.after
        if opening.strip() and content.lstrip().startswith(opening.strip()):
            answer = content.lstrip().removeprefix(opening.strip())
            if opening[-1:].isspace():
                answer = answer.lstrip()
            return prompt + answer.rstrip() + self._frame.after
        raise RenderError(
            "the rendered answer does not continue the generation prompt",
            f"the generation prompt ends in {prompt[same:][-40:]!r}, the rendered answer begins {text[same:][:40]!r}; "
            "answers made by this target (eagle data regenerate) or another data.chat_template would do",
        )

    def _sample(self, text: str, spans: Sequence[_Span]) -> Sample:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoded["input_ids"]
        mask, turns, i = [False] * len(ids), 0, 0
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        for span in spans:
            # A token that begins in the prompt is never the model's own, even if it reaches into the answer.
            while i < len(ids) and offsets[i][0] < span.start:
                i += 1
            first = i
            while i < len(ids) and offsets[i][0] < span.end and i < self.max_len:
                mask[i] = True
                i += 1
            turns += i > first and first < self.max_len
            self._mark_end_of_turn(ids, offsets, mask, i, until=span.until)
        cut = len(ids) > self.max_len
        self._check_ids(ids[: self.max_len])
        return Sample(input_ids=tuple(ids[: self.max_len]), loss_mask=tuple(mask[: self.max_len]), turns=turns, cut=cut)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if self._vocab_size is not None and max(ids, default=0) >= self._vocab_size:
            beyond = next(token for token in ids if token >= self._vocab_size)
            raise RenderError(
                "a token beyond the target's vocabulary",
                f"{self.tokenizer.convert_ids_to_tokens(beyond)!r} is token {beyond}, the target has embeddings of "
                f"{self._vocab_size}",
            )

    def _mark_end_of_turn(
        self, ids: list[int], offsets: list[tuple[int, int]], mask: list[bool], i: int, *, until: int
    ) -> None:
        """Supervises from token i through the first special token before character `until`, if there is one."""
        for j in range(i, len(ids)):
            if offsets[j][0] >= until:
                return
            if ids[j] in self._end_ids:
                mask[i : j + 1] = [True] * (j + 1 - i)
                return

    def _last_end_token(self, text: str, start: int) -> int:
        """Where the last special token behind `start` begins; the text's end if there is none."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = [a for i, (a, _) in zip(encoded["input_ids"], encoded["offset_mapping"]) if i in self._end_ids]
        return max((place for place in places if place > start), default=len(text))
