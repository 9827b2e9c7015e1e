"""The module that accelerate wraps: it runs a function of the head inside the wrapped model's forward.

Strategies that spread the parameters (FSDP, ZeRO-3) have them whole only there, and DDP wants one forward per backward; a
training step calls the head several times and its logits by chunks.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from eagle.heads.eagle1 import DraftHead

Result = TypeVar("Result")


class HeadCall(torch.nn.Module):
    """forward(work) -> work(head)."""

    def __init__(self, head: DraftHead):
        super().__init__()
        self.head = head

    def forward(self, work: Callable[[DraftHead], Result]) -> Result:
        return work(self.head)
