"""Engines: the same numbers, the user's model untouched, clear refusals."""

from pathlib import Path

import pytest
import torch
from torch import nn

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.by_head import HeadDrafter
from eagle.errors import EagleError
from eagle.eval.checks import bitwise
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target import machine_file
from eagle.target.engine import packed_copy, packed_layers
from eagle.target.products import JointPart, PackedLinear, decide
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model

IDS = torch.randint(3, 300, (1, 23), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rows", [1, 3, 4, 17, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_computes_what_the_plain_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    inputs = torch.randn(2, rows, 48)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(inputs), linear(inputs), rtol=1e-5, atol=1e-5)


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


def test_the_copy_shares_what_is_not_packed_and_keeps_no_second_original() -> None:
    model = tiny_model()
    copied = packed_copy(model)
    layers = list(packed_layers(copied))
    assert layers
    assert all(layer.weight.numel() == 0 for layer in layers)
    assert {p.data_ptr() for p in copied.parameters()} < {p.data_ptr() for p in model.parameters()}


def test_layers_on_one_tensor_are_one_product_and_give_what_each_gives_alone() -> None:
    model = tiny_model("qwen2")  # biases on q, k and v
    copied = packed_copy(model)
    attention, mlp = copied.model.layers[0].self_attn, model.model.layers[0].self_attn
    inputs, others = torch.randn(2, 1, 5, 32).unbind(0)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert isinstance(getattr(attention, name), JointPart)
        torch.testing.assert_close(getattr(attention, name)(inputs), getattr(mlp, name)(inputs), rtol=1e-5, atol=1e-5)
    q, k = attention.q_proj(inputs), attention.k_proj(others)
    torch.testing.assert_close((q, k), (mlp.q_proj(inputs), mlp.k_proj(others)), rtol=1e-5, atol=1e-5)


def test_a_product_is_exchanged_where_that_alone_makes_all_a_tenth_faster() -> None:
    def cost(packed: float, torch_: float) -> dict[str, list[float]]:
        return {"packed": [packed], "torch": [torch_]}

    large, small = (100, 100), (10, 10)
    assert decide({large: (cost(1.0, 0.85), 1)}) == {large: "torch"}
    assert decide({large: (cost(1.0, 0.95), 1)}) == {large: "packed"}
    assert decide({large: (cost(1.0, 1.5), 1), small: (cost(0.1, 0.01), 1)}) == {large: "packed", small: "packed"}
    assert decide({large: (cost(1.0, 1.5), 1), small: (cost(0.1, 0.01), 9)}) == {large: "packed", small: "torch"}


def test_what_was_timed_is_read_again_and_a_damaged_file_is_timed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_file, "HF_HOME", tmp_path)
    asked: list[str] = []

    def measure(key: str) -> float:
        asked.append(key)
        return 1.5

    assert machine_file.remembered("products", ["a", "b"], measure) == {"a": 1.5, "b": 1.5}
    assert machine_file.remembered("products", ["b", "c"], measure) == {"b": 1.5, "c": 1.5}
    assert asked == ["a", "b", "c"]
    machine_file.timings_file("products").write_text("{", encoding="utf-8")
    assert machine_file.remembered("products", ["a"], measure) == {"a": 1.5}
    assert asked == ["a", "b", "c", "a"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral-window"])
def test_a_nodes_features_are_the_same_bits_alone_in_trees_and_in_batches(family: str) -> None:
    target = Target(tiny_model(family))
    assert not bitwise.find(target).holds, "library products round by shape"
    target.use_engine("compiled")
    assert str(bitwise.find(target)) == "bitwise"


def test_what_breaks_the_equality_of_bits_is_named() -> None:
    target = Target(tiny_model("gpt2"))  # its layers are no nn.Linear
    target.use_engine("compiled")
    assert str(bitwise.find(target)) == "not bitwise: h.0.attn.c_attn (Conv1D)"
    target = Target(tiny_model())
    target.use_engine("compiled")
    for layer in packed_layers(target.running.layers[1].mlp.down_proj):
        layer.weight, layer.product = target.decoder.layers[1].mlp.down_proj.weight, "torch"
    assert bitwise.find(target).culprit == "layers.1.mlp.down_proj (PackedLinear)"


def test_auto_takes_the_fastest_engine_there_is() -> None:
    target = Target(tiny_model())
    target.use_engine("auto")
    assert target.engine == "compiled"
    halves = Target(tiny_model().to(torch.bfloat16))
    halves.use_engine("auto")
    assert halves.engine == "eager"


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(EagleError, match=r'bfloat16 on cpu.*use engine "eager"'):
        packed_copy(tiny_model().to(torch.bfloat16))


def test_a_shared_target_keeps_its_engine_unless_another_is_asked_for() -> None:
    target = Target(tiny_model())
    target.use_engine("compiled")
    head = EagleHead(EagleHeadConfig.for_target(target.config)).eval()
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(budget=8))
    assert target.engine == "compiled"
    assert isinstance(decoder.drafter, HeadDrafter)
    assert isinstance(decoder.drafter.head.fc, PackedLinear), "the head runs on the target's engine"
    other = SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(engine="eager"))
    assert (other.target.engine, target.engine) == ("eager", "compiled")


def test_what_is_gone_on_with_keeps_its_engine_and_products() -> None:
    target = Target(tiny_model())
    facts = target.on_engine("compiled").engine_facts
    chosen = dict.fromkeys(facts["products"], "torch")
    again = target.as_before({"engine": "compiled", "products": chosen})
    assert again.engine_facts == {"engine": "compiled", "products": chosen, "packed_bytes": 0}
    assert target.as_before({"engine": "eager"}).engine_facts == {"engine": "eager"}
