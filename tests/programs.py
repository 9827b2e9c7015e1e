"""Programs of one or several processes, as `python -m` and `torchrun` start them, forked from a server that has imported all.

An interpreter and its imports take seconds; a fork takes none. That the real launchers start the programs is tested once
(tests/train/test_strategies.py).
"""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["eagle.train.__main__", "eagle.data.features", "eagle.eval.__main__"])


class Program:
    """`main(arguments)` of a module in its own processes. When one fails, the others get a moment to end and are killed.

    environment: what a launcher sets beside torch.distributed's variables, which are set where there are several processes.
    """

    def __init__(
        self,
        main: str,
        arguments: Sequence[str | Path],
        *,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
    ):
        self._folder = Path(tempfile.mkdtemp())
        shared = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **(environment or {})}
        if processes > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
            shared |= {"LOCAL_WORLD_SIZE": str(processes)}
        self._processes = []
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            places = tuple(str(self._folder / f"{name}{rank}") for name in ("out", "err"))
            process = _FORKS.Process(target=_child, args=(main, [*map(str, arguments)], {**shared, **own}, places))
            process.start()
            self._processes.append(process)

    @property
    def running(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """kill -9, all of them."""
        for process in self._processes:
            process.kill()

    def wait(self, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """The exit code of the first that failed (0: none), and what all of them printed."""
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in self._processes):
            if any(process.exitcode for process in self._processes):
                deadline = min(deadline, time.monotonic() + 15.0)
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(0.01)
        codes = [process.exitcode or 0 for process in self._processes]
        out, err = (
            "".join(path.read_text() for path in sorted(self._folder.glob(f"{name}*"))) for name in ("out", "err")
        )
        shutil.rmtree(self._folder)
        failed = next((code for code in codes if code not in (0, -signal.SIGKILL)), None)
        return subprocess.CompletedProcess([], failed if failed is not None else min(codes), out, err)


def run_program(main: str, arguments: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Starts a Program and waits for its end."""
    return Program(main, arguments, **options).wait()


def _child(main: str, arguments: list[str], environment: dict[str, str], places: tuple[str, str]) -> None:
    os.environ.update(environment)
    for number, path in enumerate(places, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    module, _, function = main.partition(":")
    sys.exit(getattr(import_module(module), function or "main")(arguments))
