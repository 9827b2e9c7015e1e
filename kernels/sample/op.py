"""Sampling behind two functions: checks, choice of implementation, call.

R rows of logits, V vocabulary, B rows of settings: row r has the settings of row r // (R / B), so that the nodes of a tree,
[B, N, V] flattened, share their row's.
"""

import torch

from eagle.errors import EagleError
from eagle.kernels.dispatch import Backend, choose, on
from eagle.kernels.sample.reference import Choice, sample_reference
from eagle.kernels.sample.settings import RowSettings

NAME = "sample"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPACITY = 4096
"""Candidates of a filtered row kept in scratch memory; see triton.py."""


def sample(
    logits_RV: torch.Tensor, *, positions_R: torch.Tensor, settings: RowSettings, backend: Backend | None = None
) -> torch.Tensor:
    """The token that plain sampling emits after each row, NOTHING (-1) where none can be chosen (see `Choice`). int64 [R].

    logits_RV: fp16, bf16 or fp32, processors applied, temperature not; the vocabulary contiguous. positions_R: int64
    index of the emitted token in its unpadded row, below 2^32. All on one device. backend: None takes the enclosing `using`
    block's. Raises EagleError on shapes or dtypes that do not belong together and when "triton" was asked for and cannot run.
    """
    return _run(logits_RV, positions_R, settings, backend=backend, described=False, capacity=CAPACITY).tokens_R


def sample_and_describe(
    logits_RV: torch.Tensor,
    *,
    positions_R: torch.Tensor,
    settings: RowSettings,
    backend: Backend | None = None,
    capacity: int = CAPACITY,
) -> Choice:
    """As `sample`, with what gives every token's probability (see `Choice`). capacity: for tests: fewer candidates."""
    return _run(logits_RV, positions_R, settings, backend=backend, described=True, capacity=capacity)


def _run(
    logits_RV: torch.Tensor,
    positions_R: torch.Tensor,
    settings: RowSettings,
    *,
    backend: Backend | None,
    described: bool,
    capacity: int,
) -> Choice:
    rows = check_rows(NAME, logits_RV, positions_R, settings)
    refusal = why_not_triton(logits_RV)
    if choose(NAME, logits_RV.device, backend=backend, refusal=refusal) == "triton" and rows:
        from eagle.kernels.sample.triton import launch

        with on(logits_RV.device):
            return launch(
                logits_RV,
                positions_R=positions_R.contiguous(),
                settings=settings,
                described=described,
                capacity=capacity,
            )
    return sample_reference(logits_RV, positions_R=positions_R, settings=settings)


def check_rows(kernel: str, logits_RV: torch.Tensor, positions_R: torch.Tensor, settings: RowSettings) -> int:
    """The number of rows. Raises EagleError unless logits, positions and settings belong together."""
    if logits_RV.ndim != 2 or logits_RV.shape[1] == 0:
        raise EagleError(f"{kernel}: logits have shape {tuple(logits_RV.shape)}, expected [rows, vocabulary]")
    rows = len(logits_RV)
    if positions_R.shape != (rows,) or positions_R.dtype != torch.int64:
        raise EagleError(
            f"{kernel}: positions are {positions_R.dtype} {tuple(positions_R.shape)}, expected int64 [{rows}], one per row"
        )
    if settings.rows == 0 or rows % settings.rows:
        raise EagleError(f"{kernel}: {rows} rows of logits for {settings.rows} rows of settings; expected a multiple")
    if not logits_RV.device == positions_R.device == settings.seed_B.device:
        raise EagleError(
            f"{kernel}: logits on {logits_RV.device}, positions on {positions_R.device}, settings on "
            f"{settings.seed_B.device}; put them on one device"
        )
    return rows


def why_not_triton(logits_RV: torch.Tensor) -> str | None:
    """Why the Triton version does not take these logits; None when it does."""
    if logits_RV.dtype not in DTYPES:
        return f"logits are {logits_RV.dtype}, not fp16, bf16 or fp32"
    if logits_RV.stride(1) != 1:
        return "the vocabulary is not the contiguous dimension of the logits"
    if logits_RV.shape[1] > 2**30:
        return f"{logits_RV.shape[1]} tokens are more than 2^30"
    return None
