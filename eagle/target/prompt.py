"""From chat messages to the ids that the target is asked with."""

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from eagle.errors import EagleError


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's answer, under the tokenizer's chat template.

    Raises EagleError when there is no template or it rejects the messages.
    """
    if not tokenizer.chat_template:
        raise EagleError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; set data.chat_template to a Jinja file "
            "(or, with eagle generate, continue the bare text with --raw)"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own: with odd messages it may fail in any way
        why = str(error) or type(error).__name__
        raise EagleError(f"the chat template rejects this conversation: {why}") from error
    # The template writes the special tokens itself, BOS included.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def utf8(text: str, where: str) -> str:
    """The text. Raises EagleError when it holds bytes that are no UTF-8, as Python keeps them of a command line or a pipe."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise EagleError(
            f"{where} is not UTF-8 text (at character {error.start}); convert it, for instance with iconv"
        ) from error
    return text


def read_utf8(read: Callable[[], str], where: str) -> str:
    """What `read` returns. Raises EagleError when that is not UTF-8 text."""
    try:
        return utf8(read(), where)
    except UnicodeDecodeError as error:
        raise EagleError(
            f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); convert it, for instance with iconv"
        ) from error


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a bare text, with the special tokens that the tokenizer puts in front."""
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids
