"""Commit behind two functions: checks, choice of implementation, call.

B rows, K nodes to move, k key/value heads, S cache slots, d head dim.
"""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from eagle.errors import EagleError
from eagle.kernels.commit import reference
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.placement import sent

NAME = "commit"


def commit(
    buffers_BkSd: Sequence[torch.Tensor],
    *,
    path_BK: torch.Tensor,
    counts_B: torch.Tensor,
    lengths_B: torch.Tensor,
    backend: Backend | None = None,
) -> None:
    """Moves tree node path_BK[b, i] of every buffer's row b to slot lengths_B[b] + i, for i < counts_B[b], in place.

    buffers: keys and values of all layers, [B, k, S, d] each, any strides. path_BK int64, ascending in its valid part
    (parents come before children), so that no slot is read after it was overwritten; the rest may hold anything.
    counts_B, lengths_B: int64 [B]. All on the buffers' device; the host reads none of them. Nothing else is touched.
    Raises EagleError on shapes that do not belong together and when "triton" was asked for and cannot run.
    """
    rows = path_BK.shape[0]
    if counts_B.shape != (rows,) or lengths_B.shape != (rows,):
        raise EagleError(
            f"commit: a path of shape {tuple(path_BK.shape)} wants counts and lengths of shape {(rows,)}, got "
            f"{tuple(counts_B.shape)} and {tuple(lengths_B.shape)}"
        )
    for group in _groups(buffers_BkSd, rows):
        if choose(NAME, group[0].device, backend=backend, refusal=_why_not_triton(group[0])) == "triton":
            from eagle.kernels.commit.triton import launch

            with on(group[0].device):
                launch(
                    group,
                    source_BK=path_BK.contiguous(),
                    target_BK=None,
                    counts_B=counts_B.contiguous(),
                    lengths_B=lengths_B.contiguous(),
                )
        else:
            source_BK, target_BK = reference.slots_of_path(path_BK, counts_B, lengths_B)
            reference.move_slots(group, source_BK=source_BK, target_BK=target_BK)


def move_slots(
    buffers_BkSd: Sequence[torch.Tensor],
    *,
    source_BK: torch.Tensor,
    target_BK: torch.Tensor,
    backend: Backend | None = None,
) -> None:
    """Slots target_BK of every buffer's rows take what slots source_BK hold, in place. int64 [B, K].

    Both ascend along K, and source >= target: what a commit does, with its slots already worked out.
    Raises EagleError as `commit` does.
    """
    if source_BK.shape != target_BK.shape:
        raise EagleError(
            f"commit: {tuple(source_BK.shape)} source slots and {tuple(target_BK.shape)} targets; expected as many of each"
        )
    for group in _groups(buffers_BkSd, source_BK.shape[0]):
        device = group[0].device
        if choose(NAME, device, backend=backend, refusal=_why_not_triton(group[0])) == "triton":
            from eagle.kernels.commit.triton import launch

            with on(device):
                launch(
                    group,
                    source_BK=sent(source_BK, device).contiguous(),
                    target_BK=sent(target_BK, device).contiguous(),
                    counts_B=None,
                    lengths_B=None,
                )
        else:
            reference.move_slots(group, source_BK=source_BK, target_BK=target_BK)


def _groups(buffers_BkSd: Sequence[torch.Tensor], rows: int) -> list[list[torch.Tensor]]:
    """Buffers that one launch can serve together: all of them, unless layers differ in shape or device."""
    groups: dict[tuple[object, ...], list[torch.Tensor]] = {}
    for buffer in buffers_BkSd:
        if buffer.ndim != 4 or buffer.shape[0] != rows:
            raise EagleError(
                f"commit: a buffer of shape {tuple(buffer.shape)}; expected [B, k, S, d] with the {rows} rows of the path"
            )
        groups.setdefault((buffer.shape, buffer.stride(), buffer.dtype, buffer.device), []).append(buffer)
    return list(groups.values())


def _why_not_triton(buffer: torch.Tensor) -> str | None:
    if isinstance(buffer, FakeTensor) or torch.compiler.is_compiling():
        return "the call is traced, not run"
    return None if buffer.stride(-1) == 1 else "the head dim of the buffers is not contiguous"
