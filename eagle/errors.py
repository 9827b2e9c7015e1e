"""The one exception a user can cause, and the check of values that are one of a few."""

from typing import Literal, get_args, get_origin, get_type_hints


class EagleError(ValueError):
    """A mistake the user can mend: the message says what was got, what was expected and, behind a semicolon, the remedy.

    found, remedy: the message's two parts, where somebody says them apart. code: for callers that know better what to say of
    one kind of mistake.

    The command line prints the message alone and exits with code 2; any other exception is a defect of ours and keeps
    its traceback.
    """

    def __init__(self, found: str, *, remedy: str = "", code: str = ""):
        super().__init__(f"{found}; {remedy}" if remedy else found)
        self.found, self.remedy, self.code = found, remedy, code


def check_choices(section: object, name: str) -> None:
    """Raises EagleError for a value that a section (a dataclass, `name` in the recipe) does not know, however it was made."""
    for field, hint in get_type_hints(type(section)).items():
        if get_origin(hint) is Literal and (value := getattr(section, field)) not in get_args(hint):
            raise EagleError(f"{name}.{field} is {value!r}, expected one of {', '.join(map(str, get_args(hint)))}")
