"""The one exception a user can cause."""


class EagleError(ValueError):
    """A mistake the user can mend: the message says what was got, what was expected and the remedy.

    The command line prints the message alone and exits with code 2; any other exception is a defect of ours and keeps
    its traceback.
    """
