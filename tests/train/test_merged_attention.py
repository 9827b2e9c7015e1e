"""Merged attention against softmax over an explicit [T, n T] mask: outputs, gradients, dtypes, memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from eagle.errors import EagleError
from eagle.train import merged_attention as module
from eagle.train.merged_attention import document_spans, merged_attention

BACKENDS = ("fused", "blockwise")


def explicit(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    document_BT: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """The definition: all steps' keys side by side under a boolean mask; index i of step n is at position i + n."""
    tokens, groups = query.shape[2], query.shape[1] // keys[0].shape[1]
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    causal_BTT = torch.ones(tokens, tokens, dtype=torch.bool).tril() & same_BTT
    own_BTT = torch.eye(tokens, dtype=torch.bool).expand_as(causal_BTT)
    mask = torch.cat([causal_BTT, *[own_BTT] * (len(keys) - 1)], dim=-1)[:, None]
    if window is not None:
        of_key = torch.cat([torch.arange(tokens) + step for step in range(len(keys))])
        of_query = torch.arange(tokens)[:, None] + len(keys) - 1
        mask = mask & (of_key > of_query - window)
    key = torch.cat(keys, dim=2).repeat_interleave(groups, dim=1)
    value = torch.cat(values, dim=2).repeat_interleave(groups, dim=1)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value


def case(
    rows: int, heads: int, key_heads: int, tokens: int, size: int, steps: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """The query, then `steps` keys, then as many values."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(rows, heads, tokens, size), *[(rows, key_heads, tokens, size)] * (2 * steps)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def ours(
    tensors: list[torch.Tensor], document_BT: torch.Tensor, backend: module.Backend, window: int | None = None
) -> torch.Tensor:
    steps = len(tensors) // 2
    keys, values = tensors[1 : 1 + steps], tensors[1 + steps :]
    spans = document_spans(document_BT)
    return merged_attention(tensors[0], keys, values, spans=spans, window=window, backend=backend)


PACKED = torch.tensor([[0] * 5 + [1] + [2] * 6 + [-1], [0] * 13])
ONE = torch.zeros(2, 13, dtype=torch.int64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("document_BT", [ONE, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 8), (6, 2, 5), (3, 1, 16)])
def test_outputs_and_gradients_equal_the_explicit_mask(
    backend: module.Backend, steps: int, document_BT: torch.Tensor, heads: int, key_heads: int, size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "QUERY_BLOCK", 4)
    tensors = case(2, heads, key_heads, 13, size, steps)
    out = ours(tensors, document_BT, backend)
    expected = explicit(tensors[0], tensors[1 : 1 + steps], tensors[1 + steps :], document_BT)
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for mine, reference in zip(
        torch.autograd.grad((out * weights).sum(), tensors),
        torch.autograd.grad((expected * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("document_BT", [ONE, PACKED], ids=["one", "packed"])
@given(steps=st.integers(1, 6), window=st.integers(1, 15))
@settings(max_examples=25, deadline=None)
def test_a_window_is_one_of_positions_in_every_step(
    backend: module.Backend, document_BT: torch.Tensor, steps: int, window: int
) -> None:
    """Windows narrower than the steps (no step-0 key is seen), than a block of queries, and wider than a document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERY_BLOCK", 4)
        tensors = case(2, 4, 2, 13, 6, steps)
        out = ours(tensors, document_BT, backend, window)
        expected = explicit(tensors[0], tensors[1 : 1 + steps], tensors[1 + steps :], document_BT, window)
        torch.testing.assert_close(out, expected)
        weights = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        mine = torch.autograd.grad((out * weights).sum(), tensors, materialize_grads=True)
        for one, other in zip(mine, torch.autograd.grad((expected * weights).sum(), tensors), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
def test_odd_lengths(backend: module.Backend, tokens: int) -> None:
    tensors = case(1, 2, 1, tokens, 7, 3)
    document_BT = torch.zeros(1, tokens, dtype=torch.int64)
    out, expected = ours(tensors, document_BT, backend), explicit(tensors[0], tensors[1:4], tensors[4:], document_BT)
    torch.testing.assert_close(out, expected)
    for mine, reference in zip(
        torch.autograd.grad(out.square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(backend: module.Backend) -> None:
    document_BT = torch.tensor([[0, 0, 1, 1, 1]])
    tensors = case(1, 2, 1, 5, 3, 3)
    assert gradcheck(lambda *tensors: ours(list(tensors), document_BT, backend), tensors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_loses_only_the_rounding_of_inputs_and_output(
    backend: module.Backend, dtype: torch.dtype
) -> None:
    """Scores of thousands would be off by whole units if they were summed in bfloat16."""
    tensors = case(2, 4, 2, 40, 16, 4, dtype)
    document_BT = torch.zeros(2, 40, dtype=torch.int64)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, expected = ours(tensors, document_BT, backend), explicit(exact[0], exact[1:5], exact[5:], document_BT)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # bfloat16 keeps 8 bits: 2^-8 of values up to 3
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(
        torch.autograd.grad(out.double().square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        scale = float(reference.abs().max())
        torch.testing.assert_close(mine.double(), reference, rtol=tolerance, atol=2 * tolerance * scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_takes_mixed_inputs_and_leaves_gradients_in_their_dtypes(backend: module.Backend) -> None:
    """A head's rotated keys are float32 under autocast, its values bfloat16."""
    tensors = case(1, 2, 2, 9, 8, 2, torch.float32)
    tensors[3:] = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors[3:]]
    document_BT = torch.zeros(1, 9, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(tensors, document_BT, backend)
        gradients = torch.autograd.grad(out.float().sum(), tensors)
    low = [tensor.detach().bfloat16() for tensor in tensors]
    torch.testing.assert_close(out, ours(low, document_BT, backend))
    assert [gradient.dtype for gradient in gradients] == [tensor.dtype for tensor in tensors]


def test_documents_of_a_row_do_not_see_each_other() -> None:
    tensors = case(2, 2, 2, 13, 4, 2)
    out = ours(tensors, PACKED, "auto")
    with torch.no_grad():
        for tensor in tensors[1:]:
            tensor[0, :, :5] += 1.0
    changed = ours(tensors, PACKED, "auto")
    torch.testing.assert_close(out[0, :, 5:], changed[0, :, 5:], rtol=0, atol=0)
    assert not torch.equal(out[0, :, :5], changed[0, :, :5])


def _saved_elements(tokens: int, steps: int) -> int:
    """Elements of the distinct tensors that `steps` unrolled attentions keep for the backward, and of the largest one."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    tensors = case(1, 2, 1, tokens, 4, steps, torch.float32)
    keys, values = tensors[1 : 1 + steps], tensors[1 + steps :]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = [merged_attention(tensors[0] * n, keys[:n], values[:n]) for n in range(1, steps + 1)]
    assert len(outs) == steps
    return sum(sizes.values())


def test_saved_memory_grows_linearly_in_tokens_and_steps() -> None:
    base = _saved_elements(128, 2)
    assert _saved_elements(256, 2) == 2 * base
    assert _saved_elements(1024, 2) == 8 * base
    assert _saved_elements(128, 4) == 2 * base
    assert _saved_elements(128, 8) == 4 * base


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tensor_of_tokens_times_tokens_is_ever_made(backend: module.Backend) -> None:
    """Every tensor that any operator returns, forward and backward, is counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    self.elements = max(self.elements, value.numel())
            return result

    largest = []
    for tokens in (1024, 2048):
        tensors = case(1, 2, 1, tokens, 4, 4, torch.float32)
        with Largest() as mode:
            out = ours(tensors, torch.zeros(1, tokens, dtype=torch.int64), backend)
            torch.autograd.grad(out.sum(), tensors)
        largest.append(mode.elements)
    assert largest[1] == 2 * largest[0]
    assert largest[1] < 2048 * 2048


def test_a_fused_operator_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(EagleError, match=r"no fused attention for torch.float32 .* on meta"):
        module.choose_block("fused", torch.zeros(1, 1, 1, 8, device="meta"))
    assert module.choose_block("auto", torch.zeros(1, 1, 1, 8, device="meta")) is module.BLOCKWISE


def test_the_cuda_backward_gets_contiguous_tensors_also_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel takes logsumexp for contiguous, whatever its strides; a stand-in looks at what it is handed."""
    handed: list[torch.Tensor] = []

    def flash(*arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        handed.extend(arguments[:6])
        return arguments[1:4]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_backward", flash)
    block = module.Block(module.BLOCKWISE.forward, module.FUSED_CUDA.backward)
    monkeypatch.setattr(module, "choose_block", lambda backend, query: block)
    tensors = case(2, 4, 2, 13, 8, 2)
    ours(tensors, PACKED, "auto").sum().backward()
    assert [tensor.shape[2] for tensor in handed[5::6]] == [5, 1, 6, 1, 13]
    assert all(tensor.is_contiguous() for tensor in handed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("document_BT", [ONE, PACKED], ids=["one", "packed"])
def test_flash_attention_on_a_gpu_equals_the_blockwise_form(document_BT: torch.Tensor) -> None:
    tensors = [tensor.detach().cuda().requires_grad_() for tensor in case(2, 4, 2, 13, 16, 4, torch.bfloat16)]
    fused, plain = ours(tensors, document_BT.cuda(), "fused"), ours(tensors, document_BT.cuda(), "blockwise")
    torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-2)
    for mine, reference in zip(
        torch.autograd.grad(fused.float().square().sum(), tensors),
        torch.autograd.grad(plain.float().square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, reference, rtol=2e-2, atol=5e-2)
