"""The engine "cudagraph": forwards of fixed shapes over a StaticCache, each captured once as a CUDA graph.

B rows, N nodes, C tree columns, S slots of the cache (all of its bucket), H hidden, W = ceil(columns / 64).

What runs where. On the device, inside the graph: positions, the slots to write, the mask (from lengths and ancestor bits,
over all S slots), the model. On the host: the tree's tokens, depths and bits go into one pinned buffer and over in one
transfer; the result is copied out of the graph's memory. Prompts run eagerly: their shapes come once.
There is a graph for each number of rows, of nodes (padded to a multiple of 8 with nodes that see only themselves and
are no node's ancestor), of columns already written (a draft's level) and each bucket.
"""

import copy
import logging
from collections.abc import Callable, Hashable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from eagle.errors import EagleError
from eagle.kernels.dispatch import wanted
from eagle.kernels.placement import fill
from eagle.kernels.tree_attention.reference import own_bits
from eagle.target.attention import TreeStep
from eagle.target.cache import Place
from eagle.target.cuda_graph import Capture, Recorder
from eagle.target.fixed_cache import STRIDE, BufferPool, StaticCache, fixed_count

LONGEST_CHUNK = 64
"""Causal chunks up to this many tokens (what a cycle commits) run in fixed shapes; longer ones are parts of a prompt."""


class StaticStep(TreeStep):
    """A TreeStep over all slots of a cache, whose tensors lie on the device: the host reads none of them."""

    starts_empty, sees_every_slot = False, False


Forward = Callable[[torch.Tensor, torch.Tensor, TreeStep, StaticCache, torch.Tensor | None], tuple[torch.Tensor, ...]]
"""forward(tokens_BN, positions_BN, step, cache, features_BNH or None) -> tensors [B, N, ...]."""


class StaticForward:
    """Runs one model's steps in fixed shapes. layers: the model's, for its caches.

    Raises EagleError for capture "cuda" without a CUDA device, and when a forward turns out not to be capturable.
    """

    def __init__(self, *, layers: int, device: torch.device, capture: Capture = "cuda"):
        self.recorder = Recorder(device, capture)
        self.pool = BufferPool(layers=layers, recorder=self.recorder)

    def new_cache(self, *, rows: int, capacity: int) -> StaticCache:
        """For `capacity` tokens and nodes a row, and for what a tree is padded with."""
        return StaticCache(self.pool, rows=rows, capacity=capacity + STRIDE)

    @staticmethod
    def takes(step: TreeStep) -> bool:
        """Whether the step's shape comes again: a tree's or a cycle's; not a prompt's."""
        return step.ancestors_BNW is not None or (
            bool(step.lengths_B.any()) and step.depths_BN.shape[1] <= LONGEST_CHUNK
        )

    @torch.inference_mode()
    def run(
        self,
        forward: Forward,
        tokens_BN: torch.Tensor,
        step: TreeStep,
        cache: StaticCache,
        *,
        features_BNH: torch.Tensor | None = None,
        variant: Hashable = None,
    ) -> tuple[torch.Tensor, ...]:
        """forward's results for the step's N nodes, behind what the step says; commits nothing.

        variant: what else than shapes tells this forward from others of the model.
        """
        rows, count = tokens_BN.shape
        nodes = fixed_count(count)
        cache.reserve(step.offset + nodes)
        key = (variant, rows, nodes, step.offset, wanted())
        if key not in cache.buffers.graphs:
            cache.buffers.graphs[key] = FixedStep(
                forward, self.recorder, rows=rows, nodes=nodes, offset=step.offset, features_like=features_BNH
            )
        results: tuple[torch.Tensor, ...] = cache.buffers.graphs[key](tokens_BN, step, cache, features_BNH)
        return tuple(result[:, :count].clone() for result in results)


class FixedStep:
    """A forward over `nodes` nodes of each row, at tree columns offset ...: its inputs' buffers and its graph."""

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        *,
        rows: int,
        nodes: int,
        offset: int,
        features_like: torch.Tensor | None = None,
    ):
        columns = offset + nodes
        words = -(-columns // 64)
        self._forward, self._nodes, self._offset = forward, nodes, offset
        self._inputs = recorder.inputs(
            lengths_B=(rows,),
            tokens_BN=(rows, nodes),
            depths_BN=(rows, nodes),
            column_depths_BC=(rows, columns),
            ancestors_BNW=(rows, nodes, words),
        )
        self._features_BNH: torch.Tensor | None = None
        if features_like is not None:
            self._features_BNH = features_like.new_zeros(rows, nodes, features_like.shape[-1])
        self._own_bits_NW = own_bits(nodes, words, start=offset)
        self._captured = recorder.captured(self.work)

    def __call__(
        self, tokens_BN: torch.Tensor, step: TreeStep, cache: StaticCache, features_BNH: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        if all(one.device.type == "cpu" for one in (tokens_BN, step.depths_BN, step.ancestors_BNW) if one is not None):
            self._inputs.wait()
            self._fill(self._inputs.host, tokens_BN, step)
            self._inputs.send()
        else:  # a tree that lies on the device is not read back
            self._fill(self._inputs.device, tokens_BN, step)
        if self._features_BNH is not None and features_BNH is not None:
            self._features_BNH[:, : features_BNH.shape[1]] = features_BNH
        return self._captured(cache)

    def _fill(self, into: dict[str, torch.Tensor], tokens_BN: torch.Tensor, step: TreeStep) -> None:
        """The step's inputs; fillers stand at the first node's depth, where a position surely exists."""
        count = tokens_BN.shape[1]
        fill(into["lengths_B"], step.lengths_B)
        fill(into["tokens_BN"][:, :count], tokens_BN)
        into["tokens_BN"][:, count:].zero_()
        fill(into["depths_BN"][:, :count], step.depths_BN)
        fill(into["depths_BN"][:, count:], step.depths_BN[:, :1])
        fill(into["column_depths_BC"][:, : self._offset + count], step.column_depths_BC)
        fill(into["column_depths_BC"][:, self._offset + count :], step.depths_BN[:, :1])
        bits_BNW = into["ancestors_BNW"]
        if step.ancestors_BNW is None:  # a causal chunk is a chain: node i has ancestors 0 .. i
            fill(bits_BNW, self._own_bits_NW.cumsum(0))
        else:
            fill(bits_BNW, self._own_bits_NW)
            words = min(step.ancestors_BNW.shape[-1], bits_BNW.shape[-1])
            bits_BNW[:, :count].zero_()
            fill(bits_BNW[:, :count, :words], step.ancestors_BNW[..., :words])

    def work(self, cache: StaticCache) -> tuple[torch.Tensor, ...]:
        """What is captured: everything on the device, nothing read by the host."""
        at = self._inputs.device
        first_B1 = at["lengths_B"][:, None]
        column_N = torch.arange(self._offset, self._offset + self._nodes, device=first_B1.device)
        step = StaticStep(
            lengths_B=at["lengths_B"],
            depths_BN=at["depths_BN"],
            ancestors_BNW=at["ancestors_BNW"],
            column_depths_BC=at["column_depths_BC"],
            offset=self._offset,
            slots=cache.capacity,
        )
        with cache.writing(Place(end=cache.capacity, slot_BN=first_B1 + column_N)):
            return self._forward(at["tokens_BN"], first_B1 + at["depths_BN"], step, cache, self._features_BNH)


def check_capturable(
    model: nn.Module, forward_of: Callable[[nn.Module], Forward], *, name: str, layers: int, device: torch.device
) -> None:
    """Raises EagleError when the model is spread over devices, or its forward depends on what the data are.

    forward_of: the forward of a copy of the model. It is traced on tensors without contents: nothing is computed.
    """
    devices = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    if len(devices) > 1:
        raise EagleError(
            f'engine "cudagraph" got the target {name} on the devices {", ".join(devices)}, expected one: a graph replays on '
            'one; load it on one (target.device cuda:0), or use engine "eager"'
        )
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.inference_mode():
        with FakeCopyMode(fake):
            forward = forward_of(copy.deepcopy(model))
        static = StaticForward(layers=layers, device=device, capture="none")
        step = FixedStep(forward, static.recorder, rows=1, nodes=STRIDE, offset=0)
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.disabled = True  # it prints what is caught here
        try:
            step.work(static.new_cache(rows=1, capacity=STRIDE))
        except RuntimeError as error:
            reason = getattr(error, "func", None) or str(error).splitlines()[0]
            raise EagleError(
                f'engine "cudagraph" got the target {name} ({type(model).__name__}), whose forward needs the host or shapes that '
                f"depend on data ({reason}), expected neither; give a mixture of experts the experts implementation "
                'batched_mm (model.set_experts_implementation("batched_mm")), or use engine "eager"'
            ) from error
        finally:
            log.disabled = False
