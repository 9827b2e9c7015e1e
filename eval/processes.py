"""Several processes that share an evaluation: who they are, who waits for whom, and which prompts are whose.

    accelerate launch --num_processes 4 -m eagle.eval --config RECIPE
    torchrun --nproc_per_node 2 -m eagle.eval --config RECIPE

A prompt is answered whole, by every method, in one process: figures that compare methods compare within one process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from eagle.config import TargetConfig
from eagle.eval.suites.prompt import Prompt

PATIENCE = timedelta(days=7)
"""How long a process that has answered its share waits for the others."""
CHARACTERS_PER_TURN = 4000
"""A prompt of so many characters costs about another answer."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those of the evaluation."""

    index: int = 0
    count: int = 1
    on_machine: int = 1
    """Those that share this machine, this one included"""
    state: Any = None
    """accelerate's, of several processes"""

    @property
    def first(self) -> bool:
        return self.index == 0

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.state is not None:
            self.state.wait_for_everyone()

    def leave(self) -> None:
        """Ends the processes' connection: nobody waits for this one any more."""
        if self.state is not None:
            self.state.end_training()

    def on_own_device(self, config: TargetConfig) -> TargetConfig:
        """Of several processes each has its own GPU, as far as there are."""
        if self.state is None:
            return config
        from eagle.data.devices import own_device

        return own_device(config, self.state)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """The first process does the block before the others; all have done it when it ends."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()
        self.wait()


def join_processes() -> Processes:
    """The processes that `accelerate launch` or torchrun started; alone: without accelerate.

    Raises EagleError when accelerate runs each of several launched processes as if it were alone.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes()
    from accelerate.utils import InitProcessGroupKwargs

    from eagle.launch import check_world, make_accelerator

    state = make_accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    check_world(state)
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", count))
    return Processes(index=state.process_index, count=state.num_processes, on_machine=on_machine, state=state)


def cost(prompt: Prompt) -> float:
    """What answering it costs, roughly, in answers: later turns read all that was said before."""
    read = sum((len(prompt.turns) - i) * len(turn) for i, turn in enumerate(prompt.turns))
    return len(prompt.turns) + read / CHARACTERS_PER_TURN


def share(prompts: Sequence[Prompt], *, index: int, count: int) -> list[Prompt]:
    """The prompts of process `index` of `count`, in their order: the dearest first, each to whom has least to do so far.

    Every prompt is exactly one process's, and the same prompts are always shared out alike.
    """
    loads = [0.0] * count
    mine: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: (-cost(prompts[i]), i)):
        process = min(range(count), key=lambda k: (loads[k], k))
        loads[process] += cost(prompts[i])
        if process == index:
            mine.append(i)
    return [prompts[i] for i in sorted(mine)]
