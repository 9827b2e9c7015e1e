"""Engines: the same numbers, the user's model untouched, clear refusals."""

import pytest
import torch
from torch import nn

from eagle import engine
from eagle.config import DecodeConfig
from eagle.decode import SpeculativeDecoder
from eagle.engine import PackedLinear, packed_copy
from eagle.errors import EagleError
from eagle.head_drafter import HeadDrafter
from eagle.heads import EagleHead, EagleHeadConfig
from eagle.target import Target
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("everything_is_packed")
IDS = torch.randint(3, 300, (1, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have no layer that is large enough by itself."""
    monkeypatch.setattr(engine, "PACK_FROM", 0)


def test_small_layers_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    sizes = sorted({m.weight.numel() for m in model.modules() if type(m) is nn.Linear})
    monkeypatch.setattr(engine, "PACK_FROM", sizes[-1])
    packed = [m for m in packed_copy(model).modules() if isinstance(m, PackedLinear)]
    assert packed
    assert all(m.weight.numel() == sizes[-1] for m in packed)


@pytest.mark.parametrize("rows", [1, 3, 4, 17, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_plain_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    inputs = torch.randn(2, rows, 48)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(inputs), linear(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_same_under_both_engines(family: str) -> None:
    model = tiny_model(family)
    target = Target(model)
    torch.manual_seed(1)
    head = EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()
    expected = SpeculativeDecoder(target).generate(IDS, max_new_tokens=40, eos_token_id=[]).sequences
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=DecodeConfig(engine="compiled"))
    assert torch.equal(decoder.plain().generate(IDS, max_new_tokens=40, eos_token_id=[]).sequences, expected)
    assert torch.equal(decoder.generate(IDS, max_new_tokens=40, eos_token_id=[]).sequences, expected)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_packed_lm_head_gives_the_same_logits_whole_and_restricted(family: str, rows: int) -> None:
    tokens = Target(tiny_model(family)).tokens
    packed = tokens.packed()
    features = torch.randn(rows, tokens.hidden_size, generator=torch.Generator().manual_seed(rows))
    ids_D = torch.tensor([250, 3, 17, 42, 5])
    torch.testing.assert_close(packed.logits(features), tokens.logits(features), rtol=1e-5, atol=1e-5)
    expected = tokens.logits(features)[:, ids_D]
    torch.testing.assert_close(packed.restricted(ids_D).logits(features), expected, rtol=1e-5, atol=1e-5)
    assert packed.lm_head_VH.data_ptr() == tokens.lm_head_VH.data_ptr()
    assert packed.row_share < tokens.row_share, "more nodes are worth computing ahead"


def test_going_back_to_the_eager_engine_goes_back_to_the_plain_lm_head() -> None:
    target = Target(tiny_model())
    plain = target.tokens
    target.use_engine("compiled")
    assert target.tokens is not plain
    target.use_engine("eager")
    assert target.tokens is plain


def test_the_copy_shares_its_weights() -> None:
    model = tiny_model()
    copied = packed_copy(model)
    assert any(isinstance(module, PackedLinear) for module in copied.modules())
    assert {p.data_ptr() for p in copied.parameters()} == {p.data_ptr() for p in model.parameters()}


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(EagleError, match=r'bfloat16 on cpu.*use engine "eager"'):
        packed_copy(tiny_model().to(torch.bfloat16))


def test_a_shared_target_keeps_its_engine_unless_another_is_asked_for() -> None:
    target = Target(tiny_model())
    target.use_engine("compiled")
    head = EagleHead(EagleHeadConfig.for_target(target.config)).eval()
    decoder = SpeculativeDecoder.from_pretrained(target, head)
    assert target.engine == "compiled"
    assert isinstance(decoder.drafter, HeadDrafter)
    assert isinstance(decoder.drafter.head.fc, PackedLinear), "the head runs on the target's engine"
    other = SpeculativeDecoder.from_pretrained(target, head, decode=DecodeConfig(engine="eager"))
    assert (other.target.engine, target.engine) == ("eager", "compiled")
