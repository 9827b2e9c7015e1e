"""Chat templates are functions of the messages: the date that one reads is pinned, what is random in one is refused.

transformers lets a template call `strftime_now`, so that a rendering changes at midnight. A macro of that name, put in front
of the template, hides it and answers with target.date (at midnight) for every format. What is rendered through the tokenizer
agrees therefore, whoever renders it and when: preparation, extraction, training, evaluation, generate and chat.
"""

import datetime
import functools
import re
from collections.abc import Iterator

from jinja2 import Environment, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from eagle.errors import EagleError
from eagle.progress import console

_DIRECTIVES = "aAbBcdDeFGgHhIjklmMnpPrRStTuUVwWxXyYZz"
_PIN = re.compile(r"\{# the date is pinned: (\d{4}-\d\d-\d\d) #\}[^\n]*\n")


def pin_date(tokenizer: PreTrainedTokenizerBase, date: str, *, name: str) -> None:
    """Pins the date (YYYY-MM-DD) in those of the tokenizer's templates that read it, and says so once.

    Raises EagleError for a template that gives another text at every call.
    """
    template = tokenizer.chat_template
    if isinstance(template, dict):
        tokenizer.chat_template = {key: _pinned(text, date, name=name) for key, text in template.items()}
    elif template:
        tokenizer.chat_template = _pinned(template, date, name=name)


def pinned_date(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The date that `pin_date` pinned; None: no template of the tokenizer reads one."""
    template = tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [str(template)]
    return next((found[1] for text in texts if (found := _PIN.match(text))), None)


def unpinned(template: object) -> str:
    """The template (or templates by name) as text, as it was before `pin_date`."""
    if isinstance(template, dict):
        return str({key: _PIN.sub("", text, count=1) for key, text in template.items()})
    return _PIN.sub("", str(template), count=1)


def _pinned(template: str, date: str, *, name: str) -> str:
    names = list(_names(template))
    random = [called for before, called in names if called == "lipsum" or (before, called) == ("|", "random")]
    if random:
        raise EagleError(
            f"the chat template of {name} calls {random[0]}, which gives another text at every call, so that no two renderings "
            "agree; set data.chat_template to a Jinja file without it"
        )
    if not any(called == "strftime_now" for _, called in names):
        return template
    _say_once(f"{name}: its chat template reads today's date; it is pinned to {date} (target.date)")
    # The newline behind the macro is eaten (trim_blocks), so that the template still begins at the beginning of a line.
    return f"{{# the date is pinned: {date} #}}{_macro(datetime.date.fromisoformat(date))}\n{_PIN.sub('', template, count=1)}"


def _names(template: str) -> Iterator[tuple[str, str]]:
    """The names in the template's code, each with the operator before it, if any."""
    before = ""
    try:
        for _, kind, text in Environment().lex(template):
            if kind == "name":
                yield before, text
            if kind != "whitespace":
                before = text if kind == "operator" else ""
    except TemplateSyntaxError:
        return  # rendering says what is wrong, and where


def _macro(date: datetime.date) -> str:
    """`strftime_now` as a Jinja macro. "%%" is set aside first, so that its second half begins no directive."""
    moment = datetime.datetime.combine(date, datetime.time())
    plain = [(f"%{letter}", moment.strftime(f"%{letter}")) for letter in _DIRECTIVES]
    bare = [(f"%-{letter}", moment.strftime(f"%{letter}").lstrip("0") or "0") for letter in "dmHIMSjyUW"]
    steps = "".join(f'|replace("{directive}", "{_escaped(text)}")' for directive, text in [*plain, *bare])
    return (
        '{% macro strftime_now(format) %}{% for part in format.split("%%") %}{% if not loop.first %}%{% endif %}'
        f"{{{{ part{steps} }}}}{{% endfor %}}{{% endmacro %}}"
    )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


@functools.cache
def _say_once(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
