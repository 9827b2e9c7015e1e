"""A head's weights and its optimiser's moments whole, by parameter name, however the strategy has spread them.

That is what checkpoints hold, so a run goes on under another strategy than the one that wrote them: one process, DDP,
FSDP (version 2), DeepSpeed ZeRO-1 to 3. What returns or takes whole tensors is a collective: all processes call it, in the
same order.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state per parameter, besides its count of steps."""


Result = TypeVar("Result")


class HeadCall(torch.nn.Module):
    """The module that accelerate wraps: forward(work) -> work(head), inside the wrapped model's forward.

    Strategies that spread the parameters (FSDP, ZeRO-3) have them whole only there, and DDP wants one forward per backward;
    a training step calls the head several times and its logits by chunks.
    """

    def __init__(self, head: DraftHead):
        super().__init__()
        self.head = head

    def forward(self, work: Callable[[DraftHead], Result]) -> Result:
        return work(self.head)


def bare(accelerator: Accelerator, model: torch.nn.Module) -> DraftHead:
    """The head inside what accelerate made of it; its parameters may be spread."""
    call = accelerator.unwrap_model(model)
    head = call.head if isinstance(call, HeadCall) else call
    assert isinstance(head, DraftHead)
    return head


def is_spread(accelerator: Accelerator) -> bool:
    """Whether a process holds only a part of the weights."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.state.deepspeed_plugin.zero_stage == 3)
    return bool(accelerator.distributed_type == DistributedType.FSDP)


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The head's state dict, whole, on the CPU of every process (a collective).

    A head that is whole on the CPU already shares its memory with it: read it before the next optimiser step.
    """
    head = bare(accelerator, model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED and is_spread(accelerator):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(head.parameters())):
            return {name: value.detach().cpu().clone() for name, value in head.state_dict().items()}
    return {name: _whole(value).detach().cpu() for name, value in head.state_dict().items()}


def whole_head(accelerator: Accelerator, model: torch.nn.Module) -> DraftHead:
    """A head that a process can run on its own, without the others: the one in training where it is whole, else a copy in
    its mode (a collective)."""
    head = bare(accelerator, model)
    return copied_head(accelerator, model).train(head.training) if is_spread(accelerator) else head


def copied_head(accelerator: Accelerator, model: torch.nn.Module) -> DraftHead:
    """A copy of the head in training, whole, on the accelerator's device, in eval mode (a collective)."""
    head = bare(accelerator, model)
    whole = type(head)(copy.deepcopy(head.config))
    whole.load_state_dict(full_weights(accelerator, model))
    return whole.to(accelerator.device).eval().requires_grad_(False)


def full_optimizer_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """`NAME/exp_avg`, `NAME/exp_avg_sq` and `NAME/step` of every parameter NAME that has been stepped, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    inner = _inner(optimizer)
    steps = [float(values["step"]) for values in inner.state.values() if "step" in values]
    for name, parameter in bare(accelerator, model).named_parameters():
        if deepspeed:
            from deepspeed.utils import safe_get_full_optimizer_state

            values = {key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS} if steps else {}
            step = max(steps, default=0.0)
        else:
            values = {key: _whole(inner.state[parameter][key]) for key in MOMENTS if parameter in inner.state}
            step = float(inner.state[parameter]["step"]) if values else 0.0
        for key, value in values.items():
            assert value is not None
            state[f"{name}/{key}"] = value.detach().float().cpu().reshape(_shape(parameter)).contiguous().clone()
        if values:
            state[f"{name}/step"] = torch.tensor(step, dtype=torch.float32)
    return state


def restore_optimizer_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, torch.Tensor],
) -> None:
    """Puts what `full_optimizer_state` gave back, under this launch's strategy.

    Raises EagleError when parameters are missing, left over or of another shape.
    """
    named = dict(bare(accelerator, model).named_parameters())
    kept = {name for name in named if f"{name}/step" in state}
    stray = {key.rsplit("/", 1)[0] for key in state} - named.keys()
    wrong = [n for n in kept for key in MOMENTS if tuple(state[f"{n}/{key}"].shape) != tuple(_shape(named[n]))]
    if stray or wrong:
        raise EagleError(
            f"the optimiser's state is of other parameters: {', '.join(sorted(stray)) or 'none'} stray, "
            f"{', '.join(sorted(set(wrong))) or 'none'} of another shape"
        )
    inner = _inner(optimizer)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _restore_deepspeed(accelerator, optimizer, inner, {name: named[name] for name in sorted(kept)}, state)
        return
    for name in kept:
        parameter = named[name]
        inner.state[parameter] = {
            "step": state[f"{name}/step"].clone(),
            **{key: _like(state[f"{name}/{key}"], parameter) for key in MOMENTS},
        }


def _restore_deepspeed(
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    inner: torch.optim.Optimizer,
    named: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
) -> None:
    """ZeRO's optimiser steps flat slices of the parameters: they get blank moments, then each parameter's part of them."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if not named:
        return
    step = max(float(state[f"{name}/step"]) for name in named)
    for flat in _flat_slices(optimizer):
        counted = torch.tensor(step, dtype=torch.float32)
        inner.state[flat] = {"step": counted, **{key: torch.zeros_like(flat.data) for key in MOMENTS}}
    if is_spread(accelerator):
        for name, parameter in named.items():
            for key in MOMENTS:
                part = parameter.ds_tensor.numel()
                padded = state[f"{name}/{key}"].flatten().new_zeros(part * accelerator.num_processes)
                padded[: parameter.ds_numel] = state[f"{name}/{key}"].flatten()
                own = padded[part * accelerator.process_index :][:part]
                safe_set_local_optimizer_state(parameter, own.to(accelerator.device), key)
        return
    _zero(optimizer)._lazy_init_hp_params_optimizer_state()
    for name, parameter in named.items():
        for key in MOMENTS:
            safe_set_full_optimizer_state(parameter, state[f"{name}/{key}"].to(accelerator.device), key)


def _zero(optimizer: torch.optim.Optimizer) -> Any:
    """DeepSpeed's own optimiser inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _flat_slices(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The flat float32 tensors of this process that ZeRO's inner optimiser steps."""
    zero = _zero(optimizer)
    flat = getattr(zero, "fp32_partitioned_groups_flat", None)
    yield from flat if flat is not None else zero.single_partition_of_fp32_groups


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The AdamW inside the wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _like(value: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """`value` on the parameter's device, spread as it is. Every process has the whole value: none is sent."""
    if isinstance(parameter, DTensor):
        on_device = value.to(parameter.to_local().device)
        return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.to(parameter.device, copy=True)
