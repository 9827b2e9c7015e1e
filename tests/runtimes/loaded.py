"""What a runtime's loader makes of a folder, and how such a head drafts a chain. Nothing of eagle/ is used.

T tokens, H hidden, X states, V vocabulary.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


@dataclasses.dataclass(kw_only=True)
class Loaded:
    """A head as one runtime runs it."""

    fuse: Callable[[torch.Tensor], torch.Tensor]
    """Target states [T, X] -> features [T, H]."""
    layer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """features [T, H], embeddings [T, H] -> recursive features [T, H], RoPE positions 0 .. T-1."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """[H] -> [V] over the target's tokens; -inf where the head cannot draft."""
    layers: list[int]
    """The target's layers whose states it takes, as the number of layers applied; []: its last feature."""
    skipped: list[str] = dataclasses.field(default_factory=list)
    """Tensors of the file that the runtime passes over."""
    unfilled: list[str] = dataclasses.field(default_factory=list)
    """Parameters that no tensor of the file fills: they would hold anything."""

    def chain(
        self, states_TX: torch.Tensor, tokens: list[int], embedding_VH: torch.Tensor, *, depth: int
    ) -> torch.Tensor:
        """[depth, V]: the logits of each depth behind the last token but depth - 1 of `tokens`, which are the tokens that
        follow the states' (t_1 ... ), the last depth - 1 of them drafted."""
        features_TH, rows = self.fuse(states_TX), []
        for _ in range(depth):
            embeddings_TH = embedding_VH[torch.tensor(tokens[: len(features_TH)])]
            last_H = self.layer(features_TH, embeddings_TH)[-1]
            rows.append(self.logits(last_H))
            features_TH = torch.cat([features_TH, last_H[None]])
        return torch.stack(rows)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    values = json.loads((folder / "config.json").read_text())
    state = {
        key: value.float() if value.is_floating_point() else value
        for key, value in load_file(folder / "model.safetensors").items()
    }
    return values, state


def scatter(logits_D: torch.Tensor, ids_D: torch.Tensor, size: int) -> torch.Tensor:
    """[D] at the target ids of the draft ids -> [V], -inf elsewhere."""
    logits_V = logits_D.new_full((size,), float("-inf"))
    logits_V[ids_D] = logits_D
    return logits_V
