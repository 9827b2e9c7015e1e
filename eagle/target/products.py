"""Products: what multiplies by the weights of linear layers on a CPU, chosen by timing and remembered.

packed: oneDNN, from a copy of the weight in its blocked layout; a row's result is the same bits whatever stands beside it.
torch: PyTorch's own (MKL's). Which is faster, and by how much, differs between processors (a factor of two and more either
way for two to eight rows), so it is timed where it is to run: every shape of weight, 1 to 16 rows, about a second, once per
machine, thread count and PyTorch.

One product serves all numbers of rows, so that verifying a token among others gives the bits that it has alone
(eagle/eval/checks/bitwise.py). Rows: the tokens of one forward.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from eagle.target.machine_file import remembered

Product = Literal["packed", "torch"]

LAYOUT_ROWS = 8
"""The number of rows that oneDNN chooses its blocked layout for: between the single token and the tree."""
TIMED_ROWS = (1, 2, 4, 8, 16)
WORTH_A_SECOND = 0.9
"""A shape takes torch's product only where the sum of all is at most this share of what it was."""
LEAST_SHARE = 0.01
"""What one more row costs at least, as a share of one alone."""
SMALL_BYTES = 2**18
"""Weights up to this size lie in a core's cache: what they cost is the call, and no choice between products is worth its bits."""
TIMED_BYTES = 2**28
"""Weights of one shape that are timed, at most."""


class PackedLinear(nn.Module):
    """nn.Linear by either product. float32 on a CPU, inference only. weight [out, in]: dropped where it is
    packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.weight, self.bias = weight.detach(), bias
        self.out_features, self.in_features = weight.shape
        self.product: Product = "packed"
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, LAYOUT_ROWS)
        self.twin = False
        """Whether one row is sent as two: alone it would be summed in another order."""
        self.row_share = LEAST_SHARE
        """What a row more costs, as a share of a row alone."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if inputs.ndim == 1:
            row: torch.Tensor = self(inputs[None])
            return row[0]
        if self.product == "torch":
            return functional.linear(inputs, self.weight, self.bias)
        if self.twin and inputs.numel() == self.in_features:
            pair = inputs.reshape(1, -1).expand(2, -1)
            return self.packed(pair)[:1].reshape(*inputs.shape[:-1], self.out_features)
        return self.packed(inputs)

    def packed(self, inputs: torch.Tensor) -> torch.Tensor:
        """oneDNN's product."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return out

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def extra_bytes(self) -> int:
        """Of the copy."""
        return 4 * self.out_features * self.in_features if self.product == "packed" else 0


class JointLinear(nn.Module):
    """One product for layers that are called one after the other on the same tensor (q, k and v; gate and up)."""

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        biases = [layer.bias.data for layer in layers if layer.bias is not None]
        self.linear = PackedLinear(
            torch.cat([layer.weight.data for layer in layers]), torch.cat(biases) if biases else None
        )
        self._widths = [layer.out_features for layer in layers]
        self._inputs: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, inputs: torch.Tensor) -> torch.Tensor:
        """What the layer `index` makes of `inputs`. Kept until the last layer has asked, for this very tensor alone."""
        if self._inputs is not inputs:
            self._inputs, self._outputs = inputs, self.linear(inputs).split(self._widths, dim=-1)
        out = self._outputs[index]
        if index == len(self._widths) - 1:
            self._inputs, self._outputs = None, ()
        return out


class JointPart(nn.Module):
    """One of a JointLinear's layers, in its place in the model."""

    def __init__(self, joint: JointLinear, index: int):
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], a view."""
        return self.joint.part(self.index, inputs)


def choose(layers: Iterable[PackedLinear], given: Mapping[str, Product] | None = None) -> None:
    """Gives each layer its product, by what this machine's file says of its shape, and measures what it does not yet know.

    given: `facts`' products of an earlier run that is to be gone on with; shapes that it does not name are decided anew.
    """
    shapes: dict[tuple[int, int], list[PackedLinear]] = {}
    for layer in layers:
        shapes.setdefault(layer.shape, []).append(layer)
    by_key = {_key(shape): same for shape, same in shapes.items()}
    known = remembered("products", map(_key, shapes), lambda key: measure(by_key[key]))
    decided = decide({shape: (known[_key(shape)], len(same)) for shape, same in shapes.items()})
    for shape in shapes:
        product = (given or {}).get(_key(shape), decided[shape])
        for layer in shapes[shape]:
            layer.product, layer.twin = product, bool(known[_key(shape)]["twin"])
            layer.row_share = share_of(known[_key(shape)][product])
            if product == "packed":
                layer.weight = layer.weight.new_empty(0)  # a joint layer's is a copy of its own


def decide(costs: dict[tuple[int, int], tuple[dict[str, Any], int]]) -> dict[tuple[int, int], Product]:
    """The product of every shape. costs: what was measured of it, and how many layers have it.

    All are packed; a shape is taken out where that alone makes the sum of all a tenth smaller, since it gives up the
    equality of bits.
    """
    sums = {
        shape: {kind: count * sum(facts[kind]) for kind in ("packed", "torch")}
        for shape, (facts, count) in costs.items()
    }
    total = sum(each["packed"] for each in sums.values())
    return {
        shape: "torch" if each["torch"] - each["packed"] < (WORTH_A_SECOND - 1) * total else "packed"
        for shape, each in sums.items()
    }


def share_of(times: Sequence[float]) -> float:
    """What one more row costs, as a share of one alone. times: for TIMED_ROWS; of small weights none: the call is all."""
    if not times:
        return LEAST_SHARE
    few = TIMED_ROWS.index(8)
    return max(LEAST_SHARE, (times[few] / times[0] - 1) / (TIMED_ROWS[few] - 1))


def facts(layers: Iterable[PackedLinear]) -> dict[str, Any]:
    """What runs here, for manifests and results: the product of every shape, and the memory that copies take."""
    layers = list(layers)
    return {
        "products": {_key(layer.shape): layer.product for layer in layers},
        "packed_bytes": sum(layer.extra_bytes for layer in layers),
    }


@torch.inference_mode()
def measure(layers: Sequence[PackedLinear]) -> dict[str, Any]:
    """Milliseconds a layer by product for TIMED_ROWS; and of the packed one, whether a row alone has other bits than among
    others (twin). layers: of one shape; all of them, as far as time allows, for
    weights that were just read would be in the cache."""
    inner = layers[0].in_features
    layers = layers[: max(1, TIMED_BYTES // layers[0].weight.nbytes)]
    inputs = torch.randn(4 * max(TIMED_ROWS), inner, generator=torch.Generator().manual_seed(0))
    alone, among = layers[0].packed(inputs[:1]), layers[0].packed(inputs)[:1]
    found: dict[str, Any] = {"twin": not torch.equal(alone, among)}
    ways: dict[str, Callable[[PackedLinear, torch.Tensor], torch.Tensor]] = {
        "packed": lambda layer, rows: layer.packed(rows),
        "torch": lambda layer, rows: functional.linear(rows, layer.weight, layer.bias),
    }
    for kind in ways:
        found[kind] = []
    for rows in TIMED_ROWS if layers[0].weight.nbytes > SMALL_BYTES else ():
        some = inputs[: max(rows, 2 if found["twin"] else rows)]
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(3):  # the sides in turn: a busy moment meets both
            for kind, run in ways.items():
                start = time.perf_counter()
                for layer in layers:
                    run(layer, some)
                best[kind] = min(best[kind], 1e3 * (time.perf_counter() - start) / len(layers))
        for kind in ways:
            found[kind].append(round(best[kind], 5))
    return found


def _key(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"
