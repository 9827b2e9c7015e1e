"""What a chat template writes around an assistant's answer.

Found by rendering two answers that share no letter: where the renderings agree, the template speaks, not the message.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_QUESTION = {"role": "user", "content": "a"}
_PROBES = ("qzxv", "wkjy")


class RenderError(Exception):
    """Carries (reason, detail) of a conversation that cannot be rendered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """The template's own text around an answer to a plain question."""

    opened: str
    """How the generation prompt begins the answer itself, such as the "<think>\\n" of DeepSeek-R1: the target goes on from
    there and does not say it. Mostly "": the answer begins where the prompt ends."""
    before: str
    """Between the generation prompt and the answer, such as Qwen3's empty thought; "" where `opened` is not."""
    after: str
    """Behind the answer."""

    @property
    def thinks(self) -> bool:
        """Whether the template puts words of its own at an answer's beginning, as those for thoughts do."""
        return bool(self.opened or self.before.strip())


def apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    generation_prompt: bool,
    tools: Sequence[Any] | None = None,
) -> str:
    """The messages as the tokenizer's chat template writes them. Raises RenderError with the template's words."""
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=None if tools is None else list(tools),
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except Exception as error:  # a template is a program of its own: with odd messages it may fail in any way
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RenderError("the chat template fails", first) from error
    return text


def frame_of(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """The frame of the tokenizer's chat template. Raises RenderError where it renders no question and answer."""
    prompt = apply(tokenizer, [_QUESTION], generation_prompt=True)
    texts = [
        apply(tokenizer, [_QUESTION, {"role": "assistant", "content": probe}], generation_prompt=False)
        for probe in _PROBES
    ]
    after = texts[0][len(texts[0]) - common_prefix(texts[0][::-1], texts[1][::-1]) :]
    before = texts[0][: common_prefix(*texts)]
    if before.startswith(prompt):
        return Frame(opened="", before=before.removeprefix(prompt), after=after)
    return Frame(opened=prompt[common_prefix(prompt, before) :], before="", after=after)


def common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
