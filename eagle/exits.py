"""How a command ends: its exit code, and what a user reads of an error. Shared by `eagle` and `python -m eagle...`."""

import errno
import os
import sys
from collections.abc import Callable

from eagle.errors import EagleError

EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
_LESS_MEMORY = """\
These need less, and what is saved stays:
  eagle train: half of train.batch_size with twice train.gradient_accumulation; train.gradient_checkpointing true
  eagle features: a smaller features.batch_tokens (a store that was begun with another one has to be deleted)
  train.features online, eagle data report: a smaller features.batch_tokens
  eagle data regenerate: a smaller data.regenerate.batch_size or features.batch_tokens
  eagle eval, eagle tune: smaller sizes in eval.batches or tune.batches
  any decoding: a smaller tree (decode.drafter.budget), fewer beams, shorter answers
Other programs on the same GPU take memory too: nvidia-smi shows them"""
"""What to do about a GPU without memory left: settings that a resumed run may change, but for the one that says so."""


def exit_code(command: Callable[[], int]) -> int:
    """Runs `command`; returns its exit code, or that of its error once the error has been printed.

    Anything but a user's mistake keeps its traceback: it is our defect. Of several processes each prints its own error,
    all but the first with their number.
    """
    try:
        return command()
    except EagleError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        if not _process():
            print("\neagle: interrupted; what is saved stays: run the same command again to resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`eagle generate ... | head`); Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _fail(_explain(error))
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return _fail(f"{str(error).split(' Of the allocated')[0]}\n{_LESS_MEMORY}")


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU had no memory left. Torch is not imported for that: who never imported it cannot have raised this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _process() -> int:
    """This process's number in an `accelerate launch` or torchrun, 0 in a plain start."""
    number = os.environ.get("RANK", "0")
    return int(number) if number.isdigit() else 0


def _fail(message: str) -> int:
    who = f"process {_process()}: " if _process() else ""
    print(f"eagle: error: {who}{message}", file=sys.stderr)
    return EXIT_USER_ERROR


def _explain(error: OSError) -> str:
    remedies = {
        errno.ENOSPC: "free some space (or choose another output_dir) and run again: what is complete is kept",
        errno.EDQUOT: "the disk quota is used up; free some space and run again: what is complete is kept",
        errno.EACCES: "you may not read or write there; choose another path or mend its permissions",
        errno.EPERM: "you may not do that there; choose another path or mend its permissions",
        errno.EROFS: "that file system is read-only; choose another output_dir",
        errno.ENOENT: "check the path",
        errno.EISDIR: "that is a folder; give a file",
        errno.ENOTDIR: "a part of that path is a file, not a folder; choose another path",
    }
    remedy = remedies.get(error.errno or 0)
    where = f": {error.filename}" if error.filename else ""
    text = f"{error.strerror or error}{where}"
    return f"{text}; {remedy}" if remedy else text
