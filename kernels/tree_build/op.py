"""Tree links behind two functions: checks, choice of implementation, call. B rows, N nodes."""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, Path, choose, on
from eagle.kernels.tree_build import reference
from eagle.kernels.tree_build.reference import TreeLinks

NAME = "tree_build"


def ancestry(parents_BN: torch.Tensor, *, backend: Backend | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 parents [B, N], as for `tree_links` -> depths [B, N] and ancestor bits [B, N, W] alone: what a decode cycle needs."""
    if _chosen(parents_BN, backend) == "triton":
        from eagle.kernels.tree_build.triton import launch_ancestry

        with on(parents_BN.device):
            return launch_ancestry(parents_BN.contiguous())
    return reference.ancestry(parents_BN)


def tree_links(parents_BN: torch.Tensor, lengths_B: torch.Tensor, *, backend: Backend | None = None) -> TreeLinks:
    """int64 parents [B, N] (parents come before children, -1: none) and committed tokens [B] -> all of a tree's links.

    On the Triton path the host waits for nothing. Raises EagleError on other shapes and dtypes and when "triton" was
    asked for and cannot run.
    """
    if parents_BN.ndim != 2 or parents_BN.dtype != torch.int64 or lengths_B.shape != parents_BN.shape[:1]:
        raise EagleError(
            f"tree build: got {parents_BN.dtype} parents of shape {tuple(parents_BN.shape)} and lengths of shape "
            f"{tuple(lengths_B.shape)}; expected int64 [B, N] and [B]"
        )
    if _chosen(parents_BN, backend) == "triton":
        from eagle.kernels.tree_build.triton import launch

        with on(parents_BN.device):
            depths, positions, ancestors, first_child, next_sibling = launch(
                parents_BN.contiguous(), lengths_B.contiguous()
            )
        return TreeLinks(
            depths_BN=depths,
            positions_BN=positions,
            ancestors_BNW=ancestors,
            first_child_BN=first_child,
            next_sibling_BN=next_sibling,
        )
    return reference.tree_links(parents_BN, lengths_B)


def _chosen(parents_BN: torch.Tensor, backend: Backend | None) -> Path:
    traced = isinstance(parents_BN, FakeTensor) or torch.compiler.is_compiling()
    refusal = "the call is traced, not run" if traced else None
    return choose(NAME, parents_BN.device, backend=backend, refusal=refusal)
