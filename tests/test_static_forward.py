"""The engine "cudagraph" without its graphs: fixed shapes give the eager engine's text, and nothing asks the host.

capture "none" runs the work that would be recorded, on any device. What only a GPU can show is in the last test.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle.decode import decoder as decode_module
from eagle.decode.decoder import SpeculativeDecoder, SpeculativeOutput
from eagle.draft.by_head import HeadDrafter
from eagle.draft.by_level import TreeShape
from eagle.draft.by_model import ModelDrafter
from eagle.draft.dynamic_tree import DynamicTree
from eagle.draft.published_tree import StaticTree
from eagle.draft.tree import DraftTree
from eagle.errors import EagleError
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.sample.row import Row
from eagle.sample.sampling import RowSampler, Sampling
from eagle.target.cuda_graph import Recorder
from eagle.target.fixed_cache import StaticCache
from eagle.target.fixed_forward import FixedStep, StaticForward
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.exact import LOG_Q, in_float64, same
from tests.oracles import with_oracle
from tests.tiny import tiny_model

GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 5}


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 300, (3, 21), generator=torch.Generator().manual_seed(8))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[2, :13] = 0, 0
    return ids, mask


def static(family: str = "llama", **overrides: Any) -> Target:
    target = Target(tiny_model(family, **overrides))
    target.use_engine("cudagraph", capture="none")
    return target


def head_of(target: Target, version: str = "eagle1") -> DraftHead:
    torch.manual_seed(1)
    if version == "eagle3":
        head = Eagle3Head(Eagle3HeadConfig.for_target(target.config, initializer_range=0.2, aux_layers=[0, 1, 2]))
        return head.eval()
    return EagleHead(EagleHeadConfig.for_target(target.config, initializer_range=0.2)).eval()


def taus(out: SpeculativeOutput) -> list[float]:
    assert out.stats is not None
    return [stats.tau for stats in out.stats]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_accepted_blocks_of_ragged_trees_give_the_eager_engines_text(family: str, sampling: dict[str, Any]) -> None:
    """Trees of every size, with the answer hidden in them: steps, walks and commits; windows, soft caps, position tables."""
    ids, mask = ragged()
    arguments: dict[str, Any] = dict(max_new_tokens=24, eos_token_id=[], **sampling)
    expected = SpeculativeDecoder(Target(tiny_model(family))).generate(ids, mask, **arguments).sequences
    plain, drafted = with_oracle(static(family), ids, mask, **arguments)
    assert torch.equal(plain.sequences, expected)
    assert torch.equal(drafted.sequences, expected)
    assert max(taus(drafted)) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "decode",
    [
        dict(budget=20, top_k=4, depth=4),
        dict(budget=20, top_k=4, depth=4, level_cost=0.3),
        dict(drafter="static"),
        dict(drafter="chain", depth=4),
        dict(drafter="model", budget=12, top_k=3, depth=4),
        dict(rule="rejection", budget=12, top_k=3, depth=3),
    ],
    ids=lambda decode: "-".join(str(value) for value in decode.values()),
)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_drafter_drafts_and_says_the_same_in_fixed_shapes(
    rows: int, decode: dict[str, Any], sampling: dict[str, Any]
) -> None:
    ids, mask = (one[:rows] for one in ragged())
    outs = []
    for target, engine in ((Target(tiny_model()), "eager"), (static(), "cudagraph")):
        model = tiny_model("qwen2", seed=4, num_hidden_layers=1) if decode.get("drafter") == "model" else None
        head = None if model is not None else head_of(target)
        settings = decode_config(**{**decode, "engine": engine})
        decoder = SpeculativeDecoder.from_pretrained(target, head, decode=settings, draft_model=model)
        outs.append(decoder.generate(ids, mask, max_new_tokens=24, eos_token_id=[], **sampling))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert taus(outs[0]) == taus(outs[1])


@pytest.mark.parametrize("shape", [DynamicTree(budget=40, top_k=4, depth=5), StaticTree()], ids=["dynamic", "static"])
def test_the_trees_that_a_head_grows_are_the_same(shape: TreeShape) -> None:
    """Text is right whatever is drafted; so the drafts themselves, level behind level, in rows of different lengths."""
    target = in_float64(Target(tiny_model()))
    head = head_of(target).double()
    ids, _ = ragged()
    features_BTH = target.features(ids).features_BNH
    trees: list[list[DraftTree]] = []
    for static_or_none in (None, StaticForward(layers=1, device=torch.device("cpu"), capture="none")):
        drafter = HeadDrafter(head, target.tokens, shape, static=static_or_none)
        rows = [Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)] * 3
        drafter.reset(rows, capacity=32)
        trees.append([])
        for fed, counts in ((0, [9, 5, 7]), (9, [1, 3, 2]), (12, [5, 1, 4])):
            block = slice(fed, fed + max(counts))
            drafter.observe(features_BTH[:, block], ids[:, block], torch.tensor(counts))
            trees[-1].append(drafter.propose())
    for eager, fixed in zip(*trees):
        assert torch.equal(fixed.tokens_BN, eager.tokens_BN)
        assert torch.equal(fixed.parents_BN, eager.parents_BN)
        torch.testing.assert_close(fixed.log_confidence_BN, eager.log_confidence_BN, rtol=0, atol=LOG_Q)


def test_a_chain_longer_than_the_window_forgets_its_beginning() -> None:
    ids, _ = ragged()
    chain = DraftTree.from_parents(ids[:, :20], torch.arange(-1, 19).expand(3, -1))
    found = []
    for target in (Target(tiny_model("mistral-window")), static("mistral-window")):
        cache = target.new_cache(rows=3, capacity=64)
        target.prefill(ids, torch.tensor([21, 9, 14]), cache)
        found.append(target.tree_forward(chain.tokens_BN, chain.depths_BN, chain.ancestors_BNW, cache).features_BNH)
    assert same(found[1], found[0])


def test_an_eagle3_head_gets_its_layers_out_of_the_fixed_step() -> None:
    ids, mask = ragged()
    outs = []
    for target in (Target(tiny_model()), static()):
        decode = decode_config(engine=target.engine, budget=12, top_k=3, depth=3)
        decoder = SpeculativeDecoder.from_pretrained(target, head_of(target, "eagle3"), decode=decode)
        outs.append(decoder.generate(ids, mask, max_new_tokens=24, eos_token_id=[]))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert taus(outs[0]) == taus(outs[1])


class _Count:
    """How often a step, or a commit, was set up (with graphs: recorded)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.made = 0
        before = Recorder.captured

        def captured(recorder: Recorder, work: Callable[..., Any]) -> Any:
            self.made += 1
            return before(recorder, work)

        monkeypatch.setattr(Recorder, "captured", captured)

    def take(self) -> int:
        made, self.made = self.made, 0
        return made


@pytest.mark.slow
def test_the_next_call_finds_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    count = _Count(monkeypatch)
    target = static()
    count.take()  # the target's check
    decoder = SpeculativeDecoder.from_pretrained(
        target, head_of(target), decode=decode_config(engine="cudagraph", budget=20, top_k=4, depth=4)
    )
    ids, mask = ragged()
    plain = decoder.plain().generate(ids, mask, max_new_tokens=20, eos_token_id=[]).sequences
    eos = [int(plain[0, 21 + 5])]  # a row leaves early: steps of fewer rows follow
    first = decoder.generate(ids, mask, max_new_tokens=20, eos_token_id=eos)
    assert first.stats is not None
    assert len({stats.new_tokens for stats in first.stats}) > 1
    assert count.take() > 5
    again = decoder.generate(ids.flip(0), mask.flip(0), max_new_tokens=22, eos_token_id=eos)
    assert count.take() <= 2  # other rows may be left, but nothing is recorded anew
    assert torch.equal(again.sequences.flip(0)[:, : first.sequences.shape[1]], first.sequences)


def test_what_was_recorded_with_other_kernels_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    count = _Count(monkeypatch)
    target = static()
    ids, mask = ragged()
    for kernels, records in (("auto", True), ("auto", False), ("reference", True), ("reference", False)):
        count.take()
        decoder = SpeculativeDecoder(target, kernels=kernels)  # type: ignore[arg-type]
        decoder.generate(ids, mask, max_new_tokens=6, eos_token_id=[])
        assert (count.take() > 0) == records, kernels


def test_a_draft_models_next_batch_takes_the_last_ones_buffers() -> None:
    drafter = ModelDrafter(static(), Target(tiny_model()), DynamicTree(budget=6, top_k=2, depth=3))
    row = Row(prompt_length=1, tokens=[1], sampler=RowSampler(sampling=Sampling()), max_new_tokens=9)
    drafter.reset([row], capacity=32)
    assert isinstance(drafter.cache, StaticCache)
    buffers = drafter.cache.buffers
    drafter.reset([row], capacity=32)
    assert drafter.cache.buffers is buffers


@pytest.mark.slow
def test_growing_beyond_the_bucket_keeps_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = ragged()
    arguments: dict[str, Any] = dict(max_new_tokens=40, eos_token_id=[], **SAMPLED)
    expected = SpeculativeDecoder(Target(tiny_model())).generate(ids, mask, **arguments).sequences
    monkeypatch.setattr("eagle.target.fixed_cache.SMALLEST", 8)
    monkeypatch.setattr(decode_module, "TREE_ROOM", -60)
    target = static()
    decoder = SpeculativeDecoder.from_pretrained(
        target, head_of(target), decode=decode_config(engine="cudagraph", budget=12, top_k=3, depth=3)
    )
    assert torch.equal(decoder.generate(ids, mask, **arguments).sequences, expected)
    assert target.static is not None
    assert {32, 64, 128} <= set(target.static.pool._free)  # the buckets it went through


def test_beam_search_reorders_rows_of_pooled_buffers() -> None:
    ids, _ = ragged()
    arguments: dict[str, Any] = dict(num_beams=4, num_return_sequences=2, max_new_tokens=12)
    expected = SpeculativeDecoder(Target(tiny_model())).generate(ids, **arguments).sequences
    target = static()
    for _ in range(2):
        assert torch.equal(SpeculativeDecoder(target).generate(ids, **arguments).sequences, expected)


class _Devices(TorchDispatchMode):
    """Which operations touch a tensor with contents on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        # Scalars are arguments of a kernel, not memory.
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            self.on_cpu.append(str(func))
        return result


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gemma3_text", "qwen3", "phi3"])
def test_what_is_recorded_stays_on_its_device(family: str) -> None:
    """A transfer, or a value read by the host, cannot be recorded. The device is "meta", where tensors have no contents:
    reading one is an error there, and what lies elsewhere was not made where the model is."""
    device = torch.device("meta")
    target = Target(tiny_model(family))
    target.decoder.to(device)
    fixed = StaticForward(layers=3, device=device, capture="none")

    def forward(tokens: Any, positions: Any, step: Any, cache: Any, features: Any) -> Any:
        return target._run(target.decoder, tokens, positions, step, cache)

    step = FixedStep(forward, fixed.recorder, rows=2, nodes=8, offset=0)
    cache = fixed.new_cache(rows=2, capacity=8)
    with torch.inference_mode(), _Devices() as seen:
        (features_BNH,) = step.work(cache)
    assert features_BNH.shape == (2, 8, 32)
    assert seen.operations > 100
    assert seen.on_cpu == []


def test_a_heads_step_stays_on_its_device() -> None:
    target = Target(tiny_model())
    drafter = HeadDrafter(head_of(target).to("meta"), target.tokens.to("meta"), DynamicTree())
    fixed = StaticForward(layers=1, device=torch.device("meta"), capture="none")
    features_BNH = torch.zeros(2, 16, 32, device="meta")
    step = FixedStep(drafter._forward, fixed.recorder, rows=2, nodes=16, offset=10, features_like=features_BNH)
    cache = fixed.new_cache(rows=2, capacity=32)
    with torch.inference_mode(), _Devices() as seen:
        (predictions_BNH,) = step.work(cache)
    assert predictions_BNH.shape == (2, 16, 32)
    assert seen.operations > 30
    assert seen.on_cpu == []


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_forward_that_depends_on_data_is_refused(family: str) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    target = Target(model)
    with pytest.raises(EagleError, match=r'aten\.nonzero.*batched_mm.*engine "eager"'):
        target.use_engine("cudagraph", capture="none")
    assert target.engine == "eager"
    model.set_experts_implementation("batched_mm")
    ids, mask = ragged()
    expected = SpeculativeDecoder(target).generate(ids, mask, max_new_tokens=8, eos_token_id=[]).sequences
    target.use_engine("cudagraph", capture="none")
    assert torch.equal(
        SpeculativeDecoder(target).generate(ids, mask, max_new_tokens=8, eos_token_id=[]).sequences, expected
    )


def test_without_a_cuda_device_the_engine_is_refused() -> None:
    target = Target(tiny_model())
    with pytest.raises(EagleError, match=r'"cudagraph" got a model on cpu, expected a CUDA device.*"eager"'):
        SpeculativeDecoder.from_pretrained(target, decode=decode_config(engine="cudagraph"))


def test_a_model_on_several_devices_is_refused() -> None:
    target = Target(tiny_model())
    target.decoder.get_submodule("layers.2").to("meta")
    with pytest.raises(EagleError, match=r"on the devices cpu, meta, expected one"):
        target.use_engine("cudagraph", capture="none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_graphs_replay_the_same_text(sampling: dict[str, Any]) -> None:
    ids, mask = ragged()
    target = Target(tiny_model().cuda())
    settings: dict[str, Any] = dict(budget=20, top_k=4, depth=4)
    expected = SpeculativeDecoder.from_pretrained(target, head_of(target), decode=decode_config(**settings)).generate(
        ids, mask, max_new_tokens=40, eos_token_id=[], **sampling
    )
    decoder = SpeculativeDecoder.from_pretrained(
        target, head_of(target), decode=decode_config(engine="cudagraph", **settings)
    )
    for _ in range(2):  # recorded, then found again
        out = decoder.generate(ids, mask, max_new_tokens=40, eos_token_id=[], **sampling)
        assert torch.equal(out.sequences, expected.sequences)
        assert taus(out) == taus(expected)
