"""Rows of many shapes -> conversations of one shape, each with its origin, or the reason why not.

Recognised: `messages` or `conversations` (role/content or from/value), Alpaca and Dolly (instruction, input or context,
output or response), a plain `prompt` (with or without a response), and evaluation prompts (`turns`: user turns only).
What is repaired on the way (merged turns, a dropped greeting, an answer left empty) is written in `notes`, so that it
can be counted; nothing is relabelled silently.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle.data import loss_flags
from eagle.data.sources import Rejected, RowError, SourceRow, read_rows, resolve
from eagle.files import sha256_text

Message = dict[str, Any]

ROLES = {
    "user": ("user", "human", "prompter", "instruction"),
    "assistant": ("assistant", "gpt", "chatgpt", "gpt4", "gpt-4", "bing", "bard", "claude", "model", "ai", "bot"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
CALL_ROLES = ("function_call", "tool_call")
"""ShareGPT's name for an assistant turn that is a tool call in JSON."""
_ROLE_OF = {alias: role for role, aliases in ROLES.items() for alias in aliases}
_KNOWN_ROLES = ", ".join([*_ROLE_OF, *CALL_ROLES])
_ID_KEYS = ("id", "question_id", "conversation_id", "prompt_id", "uuid")
_SYSTEM_KEYS = ("system", "system_prompt")
_ANSWER_KEYS = ("output", "response", "completion", "answer")
_EXPECTED = "expected messages, conversations, instruction/output, prompt or turns"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as a chat template takes them: perhaps a system turn, then a user turn, then as the data has it."""

    id: str
    """The row's own id, else a hash of its messages (so that equal rows fall into the same split)."""
    messages: tuple[Message, ...]
    """{"role": user | assistant | system | tool, "content": str}, perhaps tool_calls, reasoning_content, name."""
    origin: str
    """file:line (row number for Parquet and hub data sets)."""
    source: str
    """What the row itself says it comes from, else the file's name."""
    finished: bool = True
    """False: the last answer was cut by a length limit, so no end-of-turn token follows it."""
    tools: tuple[Any, ...] | None = None
    """Tool descriptions for the chat template."""
    not_learnt: frozenset[int] = frozenset()
    """Positions of the assistant's messages that the row's loss flags leave out of the loss."""
    notes: tuple[str, ...] = ()
    """Repairs made while reading."""

    @property
    def is_prompt(self) -> bool:
        """Whether it ends in a turn that the assistant has still to answer."""
        return self.messages[-1]["role"] != "assistant"

    @property
    def prompt(self) -> str:
        """The texts before the first answer, case and punctuation aside: who asks the same has the same."""
        roles = [message["role"] for message in self.messages]
        asked = self.messages[: roles.index("assistant") if "assistant" in roles else len(roles)]
        text = "\n".join(message["content"] for message in asked)
        return same_words(text) or text

    @property
    def user_turns(self) -> tuple[str, ...]:
        """The texts of the user's turns."""
        return tuple(message["content"] for message in self.messages if message["role"] == "user")


def same_words(text: str) -> str:
    """The text's words alone: equal for texts that differ in case, punctuation or blanks."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def read_conversations(sources: str | Iterable[str], *, split: str = "train") -> Iterator[Conversation | Rejected]:
    """Streams the conversations of one or several sources (see eagle.data.sources) in order.

    A row that cannot be used comes as Rejected; EagleError is raised for a source that is missing, unreadable or empty.
    """
    for name in [sources] if isinstance(sources, str) else sources:
        for source in resolve(name, split=split):
            for row in read_rows(source):
                yield row if isinstance(row, Rejected) else read_conversation(row)


def read_conversation(row: SourceRow) -> Conversation | Rejected:
    """Interprets one row."""
    try:
        return _interpret(row)
    except RowError as error:
        return Rejected(row.origin, *error.args)
    except Exception as error:  # whatever is odd about a row, it is one row
        return Rejected(row.origin, "cannot be read", f"{type(error).__name__}: {error!s:.80}")


def _interpret(row: SourceRow) -> Conversation:
    value, notes = row.value, list[str]()
    if not isinstance(value, Mapping):
        raise RowError("not an object", f"got {_kind(value)}, {_EXPECTED}")
    _check_encodable(value, "the row")
    turns = value.get("turns")
    if turns is not None and all(value.get(key) is None for key in ("messages", "conversations")):
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
            raise RowError("turns is not a list of texts", f"got {_kind(turns)}")
        messages = [{"role": "user", "content": _text(turn, notes)} for turn in turns]
        _check_texts(messages)
    else:
        messages = _tidy([_message(turn, position, notes) for position, turn in enumerate(_turns(value), 1)], notes)
    not_learnt = frozenset([k for k, message in enumerate(messages) if message.pop("learnt", True) is False])
    source = value.get("source") or value.get("category")
    return Conversation(
        id=_identity(value, messages),
        messages=tuple(messages),
        origin=row.origin,
        source=source if isinstance(source, str) else Path(row.origin.rsplit(":", 1)[0]).name,
        finished=value.get("finished") is not False,
        tools=_tools(value.get("tools")),
        not_learnt=not_learnt,
        notes=tuple(dict.fromkeys(notes)),
    )


def _check_encodable(value: Any, name: str) -> None:
    """Refuses a value with a text anywhere in it, as a key too, that cannot be written as UTF-8."""
    todo: list[tuple[str, Any]] = [(name, value)]
    while todo:
        place, item = todo.pop()
        if isinstance(item, Mapping):
            todo += [(f"a key of {place}", key) for key in item]
            todo += [(f"{key} of {place}", part) for key, part in item.items()]
        elif isinstance(item, (list, tuple)):
            todo += [(f"{number} of {place}", part) for number, part in enumerate(item, 1)]
        elif isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError as error:
                shown = place.encode("utf-8", "backslashreplace").decode("utf-8")
                raise RowError("half a surrogate pair", f"character {error.start} of {shown}") from None


def _turns(value: Mapping[str, Any]) -> list[Any]:
    """The row's turns in one shape: a list of mappings, a top-level system text first."""
    key = next((key for key in ("messages", "conversations", "conversation") if value.get(key) is not None), None)
    if key is None and isinstance(value.get("prompt"), list):
        key = "prompt"
    if key is not None:
        turns = value[key]
        if not isinstance(turns, list):
            raise RowError(f"{key} is not a list", f"got {_kind(turns)}")
        if not turns:
            raise RowError("no turns", f"{key} is empty")
    elif value.get("instruction") is not None or value.get("prompt") is not None:
        turns = _single(value)
    else:
        empty = [key for key in ("messages", "conversations") if key in value]
        detail = f"{empty[0]} is null" if empty else f"keys {', '.join(map(str, value)) or 'none'}; {_EXPECTED}"
        raise RowError("no turns" if empty else "no conversation in the row", detail)
    turns = loss_flags.spread_over(value.get("loss_mask"), turns)
    system = next((value[key] for key in _SYSTEM_KEYS if isinstance(value.get(key), str) and value[key].strip()), None)
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


def _single(value: Mapping[str, Any]) -> list[Message]:
    """Alpaca, Dolly and plain prompt rows: one question and perhaps its answer."""
    question = value["instruction"] if value.get("instruction") is not None else value["prompt"]
    context = next((value[key] for key in ("input", "context") if value.get(key)), None)
    if context is not None:
        if not isinstance(question, str) or not isinstance(context, str):
            raise RowError("text is not a string", f"got {_kind(question)} and {_kind(context)}")
        question = f"{question}\n\n{context}"
    turns = [{"role": "user", "content": question}]
    answer = next((value[key] for key in _ANSWER_KEYS if value.get(key) is not None), None)
    return turns if answer is None else [*turns, {"role": "assistant", "content": answer}]


def _message(turn: Any, position: int, notes: list[str]) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError("a turn is not an object", f"turn {position} is {_kind(turn)}")
    name = turn.get("role") if turn.get("role") is not None else turn.get("from")
    if not isinstance(name, str):
        raise RowError("a turn has no role", f"turn {position} has keys {', '.join(map(str, turn)) or 'none'}")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    learnt = loss_flags.of_turn(turn, position)
    unless_learnt = {"learnt": False} if learnt is False else {}
    if name.strip().lower() in CALL_ROLES:
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(content, position)], **unless_learnt}
    role = _ROLE_OF.get(name.strip().lower())
    if role is None:
        raise RowError(f"unknown role {name!r}", f"turn {position}; known roles: {_KNOWN_ROLES}")
    message: Message = {"role": role, "content": "" if content is None else _text(content, notes)}
    if role != "assistant" and learnt:
        notes.append(loss_flags.NOT_FOLLOWED)
    if role == "assistant":
        message.update(unless_learnt)
        reasoning = next((turn[key] for key in ("reasoning_content", "thinking") if turn.get(key)), None)
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        if calls := turn.get("tool_calls"):
            if not isinstance(calls, list):
                raise RowError("tool_calls is not a list", f"turn {position}: got {_kind(calls)}")
            message["tool_calls"] = list(calls)
    message.update({key: turn[key] for key in ("name", "tool_call_id") if role == "tool" and turn.get(key)})
    return message


def _text(content: Any, notes: list[str]) -> str:
    """A turn's text: a string, a number, or a list of text parts."""
    if isinstance(content, (int, float)) and not isinstance(content, bool) and math.isfinite(content):
        notes.append("a number was taken as text")
        content = str(content)
    if isinstance(content, list):
        parts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, Mapping) else None
            text = part if isinstance(part, str) else None
            if isinstance(part, Mapping) and kind == "text":
                text = part.get("text") if part.get("text") is not None else part.get("value")
            if not isinstance(text, str):
                raise RowError("content that is not text", f"a part of type {kind if kind else _kind(part)}")
            parts.append(text)
        content = "".join(parts)
    if not isinstance(content, str):
        raise RowError("content that is not text", f"got {_kind(content)}")
    return content


def _tool_call(content: Any, position: int) -> Message:
    try:
        call = json.loads(content) if isinstance(content, str) else content
        _check_encodable(call, f"the tool call in turn {position}")  # JSON in JSON has escapes of its own
        return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise RowError("a tool call that is not JSON with name and arguments", f"turn {position}") from None


def _tools(tools: Any) -> tuple[Any, ...] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError("tools is not valid JSON", f"{error!s:.80}") from None
        _check_encodable(tools, "tools")
    if tools and not isinstance(tools, list):
        raise RowError("tools is not a list", f"got {_kind(tools)}")
    return tuple(tools) if tools else None


def _tidy(messages: list[Message], notes: list[str]) -> list[Message]:
    """Brings turns into the order that servers see, noting each repair, or refuses the row."""
    system: list[Message] = []
    while messages and messages[0]["role"] == "system":
        if not any(turn["content"] == messages[0]["content"] for turn in system):
            system.append(messages[0])
        messages = messages[1:]
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no user turn", f"roles {', '.join(m['role'] for m in [*system, *messages]) or 'none'}")
    tidy: list[Message] = []
    for position, message in enumerate(messages, len(system) + 1):
        role, before = message["role"], tidy[-1]["role"] if tidy else None
        blank = not message["content"].strip() and not message.get("tool_calls")
        if role == "system":
            raise RowError("system turn inside the conversation", f"turn {position}; only the first may be one")
        if before is None and role == "assistant":
            notes.append("an assistant turn before the first user turn was dropped")
            continue
        if role == "assistant" and blank and not message.get("reasoning_content"):
            notes.append("cut before an empty assistant turn")
            break
        if role == before and role in ("user", "assistant") and not (tidy[-1].keys() | message.keys()) & {"tool_calls"}:
            if message.get("learnt") != tidy[-1].get("learnt"):
                raise RowError(
                    "assistant turns in a row with different loss flags", f"turn {position} and the one before"
                )
            notes.append(f"{role} turns in a row were merged")
            tidy[-1] = {**tidy[-1], **message, "content": f"{tidy[-1]['content']}\n{message['content']}"}
        else:
            tidy.append(message)
    _check_texts(tidy)
    merged = [{"role": "system", "content": "\n".join(turn["content"] for turn in system)}] if system else []
    return [turn for turn in merged if turn["content"].strip()] + tidy


def _check_texts(messages: Sequence[Message]) -> None:
    for message in messages:
        if message["role"] == "user" and not message["content"].strip():
            raise RowError("empty user turn")


def _identity(value: Mapping[str, Any], messages: Sequence[Message]) -> str:
    given = next((value[key] for key in _ID_KEYS if isinstance(value.get(key), (str, int)) and value[key] != ""), None)
    if given is not None:
        return str(given)
    return sha256_text(json.dumps(messages, sort_keys=True, ensure_ascii=False, default=str))[:16]


def _kind(value: Any) -> str:
    names = {str: "text", dict: "an object", list: "a list", bool: "true/false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
