"""Where a new head starts: the linear map from its inputs to the target's next feature, solved, not learned.

A head is a linear projection (`fc`) plus what attention and the MLP add to it. With the additions silent (their last
projections zero), `fc` alone can be solved for by least squares over the supervised positions: that takes seconds, and
gradient descent begins where it would otherwise arrive after much of a short run, with inputs of very different scale
(features and embeddings) weighed right. EAGLE-1 heads predict f_{i+1} from [e_{i+1}, f_i], EAGLE-3 heads from the states
they look at. S positions, I inputs (a constant one included where `fc` has a bias), H hidden.
"""

import dataclasses

import torch
from accelerate import Accelerator

from eagle.data.documents import Documents
from eagle.heads.eagle1 import DraftHead
from eagle.heads.eagle3 import Eagle3Head
from eagle.target.token_layers import TokenLayers
from eagle.train.batches import Order

POSITIONS = 100_000
"""Supervised positions that suffice (or 16 per input, where that is more)."""
HELD_OUT = 8
"""Every eighth document only judges the ridge."""
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Tried, as shares of the inputs' mean squares: small data want much."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """What the linear start is worth."""

    positions: int
    """Supervised positions read"""
    explained: float
    """Share of the held-out features' squares that it predicts (1 - residual / squares)"""

    def __str__(self) -> str:
        return f"least-squares map of {self.positions:,} positions ({100 * self.explained:.0f}% of held-out features' squares)"


@dataclasses.dataclass
class _Moments:
    """Sums over positions, float64: all that a least-squares fit and its error need."""

    inputs_II: torch.Tensor
    products_IH: torch.Tensor
    squares: torch.Tensor
    """Of the targets; scalar"""
    count: torch.Tensor
    """Positions; scalar"""

    @classmethod
    def zeros(cls, inputs: int, hidden: int, device: torch.device) -> "_Moments":
        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(new(inputs, inputs), new(inputs, hidden), new(), new())

    def add(self, inputs_SI: torch.Tensor, targets_SH: torch.Tensor) -> None:
        self.inputs_II += inputs_SI.T @ inputs_SI
        self.products_IH += inputs_SI.T @ targets_SH
        self.squares += targets_SH.double().square().sum()
        self.count += len(inputs_SI)

    def summed(self, accelerator: Accelerator) -> "_Moments":
        """Over all processes."""
        return _Moments(
            *(accelerator.reduce(getattr(self, field.name), reduction="sum") for field in dataclasses.fields(self))
        )

    def solve(self, ridge: float) -> torch.Tensor:
        """[I, H]: the map of the least squared error plus the ridge's penalty."""
        diagonal_I = self.inputs_II.diagonal()
        penalty_I = ridge * (diagonal_I + 1e-3 * diagonal_I.mean())
        return torch.linalg.solve(self.inputs_II + torch.diag(penalty_I), self.products_IH)

    def residual(self, map_IH: torch.Tensor) -> float:
        """Sum of the squared errors of a map."""
        quadratic = (map_IH * (self.inputs_II @ map_IH)).sum()
        return float(self.squares - 2 * (map_IH * self.products_IH).sum() + quadratic)


@torch.no_grad()
def start_linear(
    head: DraftHead, source: Documents, order: Order, *, tokens: TokenLayers, accelerator: Accelerator
) -> Fit | None:
    """Sets `fc` to the least-squares map and silences attention and MLP. None, and nothing changed, without enough positions.

    Every process calls this: each reads a share of the documents, all get the same weights (up to the order of sums).
    """
    device, hidden = accelerator.device, head.config.hidden_size
    wanted = max(POSITIONS, 16 * head.fc.in_features)
    fitted, judging = (_Moments.zeros(head.fc.in_features + (head.fc.bias is not None), hidden, device) for _ in "ab")
    chosen = _documents(source, order, wanted=wanted)
    for place in range(accelerator.process_index, len(chosen), accelerator.num_processes):
        (document,) = source.read([chosen[place]])
        index_S = document.loss_mask_T[2:].nonzero()[:, 0]  # index i counts where token i + 2 does
        states_SX = document.states[index_S.to(document.states.device)].to(device).float()
        targets_SH = document.features_TH[(index_S + 1).to(document.features_TH.device)].to(device).float()
        embeddings_SH = tokens.embed(document.input_ids_T[index_S + 1][None].to(device))[0].float()
        inputs_SI = _inputs(head, states_SX, embeddings_SH)
        (judging if place % HELD_OUT == HELD_OUT - 1 else fitted).add(inputs_SI, targets_SH)
    fitted, judging = fitted.summed(accelerator), judging.summed(accelerator)
    if not (fitted.count > 0 and judging.count > 0 and fitted.squares > 0 and judging.squares > 0):
        return None
    maps = [fitted.solve(ridge) for ridge in RIDGES]
    map_IH = min(maps, key=judging.residual)
    explained = 1 - judging.residual(map_IH) / float(judging.squares)
    if not explained > 0:  # also a NaN: training says which features are not finite
        return None
    _set(head, map_IH, scale=float((fitted.squares / fitted.count / hidden).sqrt()) * explained**0.5)
    return Fit(positions=int(fitted.count + judging.count), explained=explained)


def _documents(source: Documents, order: Order, *, wanted: int) -> list[int]:
    """The first epoch's first documents, until they hold enough supervised positions."""
    chosen: list[int] = []
    count = 0
    for step in range(order.steps_per_epoch):
        for number in order.step_documents(step):
            chosen.append(number)
            count += int(source.ids_and_mask(number)[1][2:].sum())
        if count >= wanted:
            break
    return chosen


def _inputs(head: DraftHead, states_SX: torch.Tensor, embeddings_SH: torch.Tensor) -> torch.Tensor:
    parts = [states_SX] if isinstance(head, Eagle3Head) else [embeddings_SH, states_SX]
    ones = [states_SX.new_ones(len(states_SX), 1)] if head.fc.bias is not None else []
    return torch.cat([*parts, *ones], dim=-1)


def _set(head: DraftHead, map_IH: torch.Tensor, *, scale: float) -> None:
    inputs = head.fc.in_features
    head.fc.weight.copy_(map_IH[:inputs].T)
    if head.fc.bias is not None:
        head.fc.bias.copy_(map_IH[inputs])
    for name, weight in head.named_parameters():
        if name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")):
            weight.zero_()
    if isinstance(head, Eagle3Head):
        head.norm.weight.fill_(scale)  # its LM head then sees predictions of their own size
