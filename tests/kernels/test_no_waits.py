"""A cycle by kernels reads the device once: where nothing can be read at all, everything but that read goes through.

PyTorch's meta device holds no data: whatever asks for a number of one of its tensors fails. Launches are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle.decode.decoder import SpeculativeDecoder
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.kernels import dispatch
from eagle.kernels.commit import triton as commit
from eagle.kernels.noise import triton as noise
from eagle.kernels.sample import triton as sample
from eagle.kernels.sample.reference import Choice
from eagle.kernels.tree_attention import triton as tree_attention
from eagle.kernels.tree_build import triton as tree_build
from eagle.kernels.verify import triton as verify
from eagle.kernels.verify.reference import Decisions, Tree, Walks
from eagle.target.target import Target
from eagle.verify import verifier
from eagle.verify.coupled import Walk
from eagle.verify.verifier import Verifier
from tests.decoding import decode_config
from tests.tiny import tiny_model

SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=[0.8, 0.0], top_p=0.9, seed=1)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch gives tensors of the right shapes without contents."""
    monkeypatch.setattr(dispatch, "missing", lambda device: None)
    monkeypatch.setattr("eagle.decode.decoder.missing", lambda device: None)
    monkeypatch.setattr(tree_attention, "launch", lambda query, key, value, **rest: torch.empty_like(query))
    monkeypatch.setattr(commit, "launch", lambda group, **rest: None)
    monkeypatch.setattr(
        noise, "launch", lambda seeds, positions, cycles, tokens, **rest: seeds.new_empty(len(seeds), tokens).float()
    )
    monkeypatch.setattr(sample, "launch", lambda logits_RV, **rest: _choice(logits_RV))
    monkeypatch.setattr(
        tree_build, "launch_ancestry", lambda p: (torch.empty_like(p), p.new_empty(*p.shape, -(-p.shape[1] // 64)))
    )
    monkeypatch.setattr(verify, "launch_walk", _walks)
    monkeypatch.setattr(
        verify,
        "launch_decide",
        lambda logits, *, tree, **rest: Decisions(torch.empty_like(tree.tokens_BN), torch.empty_like(tree.tokens_BN)),
    )


def _choice(logits_RV: torch.Tensor) -> Choice:
    floats = [logits_RV.new_empty(len(logits_RV), dtype=torch.float32) for _ in range(3)]
    return Choice(logits_RV.new_empty(len(logits_RV), dtype=torch.int64), *floats)


def _walks(*, tree: Tree, emitted_BN: torch.Tensor, followers_BN: torch.Tensor | None, width: int) -> Walks:
    path_BK = emitted_BN.new_empty(len(emitted_BN), width)
    return Walks(path_BK, path_BK[:, 0], torch.empty_like(path_BK), path_BK[:, 0] > 0)


class Watched(TorchDispatchMode):
    """Fails where tensors of two devices meet, and where something is sent to the device and waited for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.ndim]
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            sent = tensors[0].device.type == "cpu" and kwargs.get("device", torch.device("cpu")).type == "meta"
            assert not sent or kwargs.get("non_blocking"), "sent and waited for"
        elif name == "copy_":
            assert len({one.device for one in tensors}) == 1 or args[2:3] == (True,) or kwargs.get("non_blocking")
        else:
            assert len({one.device for one in tensors}) <= 1, f"{name} of tensors on two devices"
        return func(*args, **kwargs)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The blocks that were read; every row accepts a draft and emits two tokens."""
    blocks: list[torch.Tensor] = []

    def unpacked(block_BX: torch.Tensor) -> list[Walk]:
        blocks.append(block_BX)
        # The second row is not as long as the first; of a chain, the last node is its second.
        paths = [[0, 1], [0]][: len(block_BX)]
        return [Walk(path=path, tokens=[5, 6][: len(path)], at_leaf=False) for path in paths]

    monkeypatch.setattr(verifier, "unpacked", unpacked)
    monkeypatch.setattr(Verifier, "first", lambda self, features_BH: [5] * len(features_BH))
    return blocks


def meta_target() -> Target:
    return Target(tiny_model(num_hidden_layers=1).to("meta"), probe=False)


def meta_head(target: Target, monkeypatch: pytest.MonkeyPatch) -> EagleHead:
    """Over a part of the vocabulary, which is told, as the buffers that hold it cannot be read."""
    vocabulary = DraftVocabulary(target_ids_D=torch.arange(0, 384, 2), target_size=384)
    monkeypatch.setattr(EagleHead, "vocabulary", vocabulary)
    return EagleHead(EagleHeadConfig.for_target(target.config, draft_vocab_size=vocabulary.size)).eval()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(drafter="none"),
        dict(drafter="ngram", depth=2),
        dict(drafter="eagle2", budget=5, top_k=2, depth=3),
        dict(drafter="eagle2", budget=5, top_k=2, depth=3, rule="rejection"),
        dict(drafter="eagle2", budget=5, top_k=2, depth=3, rule="rejection", children="top"),
        dict(drafter="chain", depth=3),
        dict(drafter="static"),
        dict(drafter="model", budget=5, top_k=2, depth=3),
        dict(drafter="eagle2", budget=5, top_k=2, depth=3, engine="cudagraph"),
        dict(drafter="eagle2", budget=5, top_k=2, depth=3, engine="cudagraph", rule="rejection"),
    ],
    ids=lambda settings: " ".join(str(value) for value in settings.values()),
)
def test_a_cycle_reads_one_block(
    read: list[torch.Tensor], settings: dict[str, Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = meta_target()
    if "engine" in settings:
        target.use_engine("cudagraph", capture="none")
    decode = decode_config(kernels="triton", **settings)
    drafter = settings["drafter"]
    decoder = SpeculativeDecoder.from_pretrained(
        target,
        meta_head(target, monkeypatch) if drafter in ("eagle2", "chain", "static") else None,
        draft_model=meta_target() if drafter == "model" else None,
        decode=decode,
    )
    whole = decoder._cycle

    def watched(batch: Any) -> Any:
        with Watched():
            return whole(batch)

    monkeypatch.setattr(decoder, "_cycle", watched)
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    out = decoder.generate(ids, attention_mask=mask, max_new_tokens=5, eos_token_id=[], **arguments)
    assert out.stats is not None
    assert len(read) == max(row.verify_steps for row in out.stats) > 1
    assert all(block.device.type == "meta" for block in read)
    for row in out.stats:
        assert all(list(paths) == ["triton"] for paths in row.kernels.values())
