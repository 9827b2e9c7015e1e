"""Several processes, through accelerate: is the world as large as it was launched?"""

import os

from accelerate import Accelerator

from eagle.errors import EagleError


def check_world(accelerator: Accelerator) -> None:
    """Raises EagleError when accelerate runs each of several launched processes as if it were alone.

    It does so on machines without GPUs unless ACCELERATE_USE_CPU says that CPUs are meant, and with DeepSpeed there always.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise EagleError(
            f"{launched} processes were launched, but accelerate runs {accelerator.num_processes}, as if alone: it has no "
            "DeepSpeed over several processes without GPUs; use 1 process, or ACCELERATE_USE_CPU=true torchrun"
        )
