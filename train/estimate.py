"""Does the disk hold what a training run will write? P parameters of the head."""

import shutil
from pathlib import Path

from torch import nn

from eagle.data.layers import readable_size
from eagle.errors import EagleError
from eagle.train.checkpoints import PREFIX


def checkpoint_bytes(parameters: int) -> int:
    """A checkpoint: float32 weights and AdamW's two moments."""
    return 12 * parameters


def require_disk(directory: Path, head: nn.Module, *, keep: int) -> str:
    """What the run in `directory` will write, in words. Raises EagleError when it cannot fit.

    keep: checkpoints kept; one more lives while it is written, besides the final and the best head. Those that are there
    already take no new room.
    """
    parameters = sum(parameter.numel() for parameter in head.parameters())
    each = checkpoint_bytes(parameters)
    directory.mkdir(parents=True, exist_ok=True)
    existing = len(list(directory.glob(f"{PREFIX}*")))
    needed = each * max(1, keep + 1 - existing) + 2 * 4 * parameters
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise EagleError(
            f"the run needs {readable_size(needed)} for {keep} checkpoints of {readable_size(each)} (and one more while it is "
            f"written), the disk of {directory} has {readable_size(free)} free; free some space, lower "
            "train.keep_checkpoints, or set output_dir to another disk"
        )
    return (
        f"{parameters:,} parameters to train, {readable_size(each)} a checkpoint, {readable_size(needed)} in all; "
        f"{readable_size(free)} free in {directory}"
    )
