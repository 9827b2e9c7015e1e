"""The estimate of a GPU cycle: its parts against counts made by hand, and what it says of itself."""

import dataclasses
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle.errors import EagleError
from eagle.kernels.cycle_estimate import SHAPES, Cycle, Shape, decoder_layer, estimate, gemm, main, parts
from eagle.kernels.roofline import DEVICES, Cost, Device
from eagle.kernels.tree_attention import model as tree_attention

LLAMA, H200 = SHAPES["llama-3.1-8b-shape"], DEVICES["H200"]


def part(shape: Shape, cycle: Cycle, name: str, device: Device = H200) -> Cost:
    (one,) = [part for part in parts(shape, cycle, device) if part.name.startswith(name)]
    return sum(one.launches, Cost(bytes=0))


def test_the_weights_are_those_of_a_model_of_that_shape() -> None:
    """Read once per cycle; two FLOP per weight and node."""
    config = LlamaConfig(
        num_hidden_layers=LLAMA.layers, hidden_size=LLAMA.hidden, intermediate_size=LLAMA.intermediate,
        num_attention_heads=LLAMA.heads, num_key_value_heads=LLAMA.kv_heads, vocab_size=LLAMA.vocab_size,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
    for nodes in (1, 60):
        cost = part(LLAMA, Cycle(nodes=nodes), "target: matrix products")
        assert cost.flops == 2 * weights * nodes
        assert cost.bytes == pytest.approx(2 * weights, rel=0.03)
        assert cost.bytes > 2 * weights


def test_attention_and_commit_are_the_kernels_models() -> None:
    cycle = Cycle(rows=2, context=4096, nodes=60, tau=3.0)
    whole = part(LLAMA, cycle, "target: tree attention")
    shape = dict(rows=2, heads=32, kv_heads=8, nodes=60, length=4096, head_dim=128, element=2)
    assert whole.flops == 32 * tree_attention.cost(**shape).flops
    assert whole.bytes in {32 * tree_attention.cost(**shape, splits=splits).bytes for splits in range(1, 9)}
    assert part(LLAMA, cycle, "commit").bytes == pytest.approx(2 * 2 * 32 * 2 * 8 * 2 * 128 * 2, rel=0.01)


def test_shares_add_up_and_attention_grows_with_the_context() -> None:
    shares = []
    for context in (128, 8192, 131072):
        told = estimate(LLAMA, Cycle(context=context), H200)
        assert sum(one["share"] for one in told["parts"]) == pytest.approx(1)  # type: ignore[attr-defined]
        assert sum(one["us"] for one in told["parts"]) == pytest.approx(told["us"])  # type: ignore[attr-defined]
        shares.append(told["kernels_share"])
    assert shares == sorted(shares)
    assert shares[0] < 0.05 < shares[2]  # type: ignore[operator]


def test_a_device_twice_as_fast_takes_half_the_time() -> None:
    fast = dataclasses.replace(H200, bandwidth=2 * H200.bandwidth, half=2 * H200.half)
    slow_us, fast_us = (estimate(LLAMA, Cycle(), device)["us"] for device in (H200, fast))
    assert slow_us == pytest.approx(2 * fast_us)  # type: ignore[operator]


def test_a_smaller_draft_vocabulary_makes_the_head_cheaper() -> None:
    whole, reduced = (part(LLAMA, Cycle(draft_vocab=size), "head: matrix").bytes for size in (None, 32000))
    saved = 6 * 2 * 4096 * (LLAMA.vocab_size - 32000)
    assert whole - reduced == pytest.approx(saved, rel=0.01)
    assert part(LLAMA, Cycle(depth=1), "head: matrix").bytes == sum(
        cost.bytes for cost in [gemm(4, 8192, 4096), *decoder_layer(LLAMA, 4), gemm(1, 4096, LLAMA.vocab_size)]
    )


def test_the_command_names_itself_an_estimate_and_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "a100", "--context", "2048", "--rule", "rejection", "--draft-vocab", "32000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ESTIMATE (roofline, not measured): llama-3.1-8b-shape")
    assert "NVIDIA A100 data sheet" in lines[1]
    told = json.loads(lines[-1])
    assert told["estimate"] == "roofline"
    assert [one["part"] for one in told["parts"] if one["ours"]] == [
        "target: tree attention", "head: tree attention", "tree build", "sample", "verify (rejection)", "commit",
    ]  # fmt: skip


def test_mistakes_are_named() -> None:
    with pytest.raises(EagleError, match="--nodes is 0, expected 1 or more"):
        main(["--nodes", "0"])
    with pytest.raises(EagleError, match=r"--tau is 0\.5, expected 1"):
        main(["--tau", "0.5"])
