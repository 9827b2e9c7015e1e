"""Unrolling a head over its own features: what it would draft from every index of a document, all at once.

B rows, T tokens, H hidden, X states, h query heads, k key heads, d head size. At step s index i takes (the prediction of
step s-1 at index i, e_{i+1+s}) at RoPE position i+s and predicts f_{i+1+s}; step 0 takes what the head makes of the
target's states. It attends to the step-0 keys j <= i, which come from true states, and to its own key of each step
1 .. s, of both those within the head's window (eagle/train/merged_attention.py). That is what a chain drafted after
token i+1 computes, when its tokens are the document's: training-time test of EAGLE-3 (arXiv 2503.01840, section 3.1) and
HASS (arXiv 2408.15766, section 3.2), which detaches the predictions it goes on from. One step is plain EAGLE-1 training.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from eagle.heads.eagle1 import DraftHead
from eagle.train.merged_attention import Backend, Span, document_spans, merged_attention, product_dtype

Between = Literal["flow", "detach"]
"""What gradients do between steps."""
Checkpointing = Literal["none", "steps"]
"""steps: keep only each step's inputs, keys and values; compute it a second time in the backward."""


def unroll(
    head: DraftHead,
    states_BTX: torch.Tensor,
    embeddings_BTH: torch.Tensor,
    *,
    steps: int,
    positions_BT: torch.Tensor | None = None,
    document_BT: torch.Tensor | None = None,
    between: Between = "flow",
    checkpointing: Checkpointing = "none",
    backend: Backend = "auto",
) -> list[torch.Tensor]:
    """The predictions of each step, [B, T, H]: index i of step s predicts f_{i+1+s}.

    Everything is by TOKEN index: states_BTX are the target's at token i, embeddings_BTH those of t_i. Indices whose token
    i+1+s lies past their document's end have values without meaning. positions_BT: token i's place in its document, by
    default 0 .. T-1. document_BT: int64, the document's number within its row (-1 in padding); None: one a row.
    """
    rows, tokens, _ = states_BTX.shape
    if positions_BT is None:
        positions_BT = torch.arange(tokens, device=states_BTX.device).expand(rows, -1)
    spans = None if document_BT is None else document_spans(document_BT)
    inputs_BTH = head.fuse(states_BTX)
    predictions: list[torch.Tensor] = []
    past: list[torch.Tensor] = []  # key, value of step 0, key, value of step 1, ...

    def step_of(
        inputs: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _step(head, inputs, embeddings, positions, past, spans=spans, backend=backend)

    for step in range(steps):
        arguments = (inputs_BTH, ahead(embeddings_BTH, 1 + step), positions_BT + step, *past)
        if checkpointing == "steps":
            out = checkpoint(step_of, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            out = step_of(*arguments)
        predicted_BTH, key, value = out
        past += [key, value]
        predictions.append(predicted_BTH)
        inputs_BTH = predicted_BTH.detach() if between == "detach" else predicted_BTH
    return predictions


def _step(
    head: DraftHead,
    inputs_BTH: torch.Tensor,
    embeddings_BTH: torch.Tensor,
    positions_BT: torch.Tensor,
    past: Sequence[torch.Tensor],
    *,
    spans: tuple[Span, ...] | None,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step's predictions and its own key and value: a function of its arguments alone, so that it can be repeated."""
    own: list[torch.Tensor] = []

    def attend(query_BhTd: torch.Tensor, key_BkTd: torch.Tensor, value_BkTd: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(query_BhTd)
        own.extend((key_BkTd.to(dtype), value_BkTd.to(dtype)))
        keys, values = [*past[::2], own[0]], [*past[1::2], own[1]]
        return merged_attention(query_BhTd, keys, values, spans=spans, window=head.window, backend=backend)

    predicted_BTH = head(inputs_BTH, embeddings_BTH, positions_BT=positions_BT, attend=attend)
    key, value = own
    return predicted_BTH, key, value


def ahead(values_BTH: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T, H] whose index i has the value of index i + count; zeros where the row has ended."""
    return functional.pad(values_BTH[:, count:], (0, 0, 0, min(count, values_BTH.shape[1])))
