"""What every supported family promises, on one tiny random model of each: the README's table of families is this file's list."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eagle.decode.decoder import SpeculativeDecoder
from eagle.draft.tree import DraftTree
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.target.products import PackedLinear
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.exact import same
from tests.kernels.test_tree_attention import random_parents
from tests.oracles import with_oracle
from tests.tiny import FAMILIES, tiny_model

ENGINES = ("eager", "compiled", "cudagraph")
LAYERS = (0, 2)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, and its target on every engine."""

    name: str
    model: PreTrainedModel
    target: Callable[[str], Target]
    expected: torch.Tensor
    """int64 [1, 59]: what Hugging Face's generate says to `PROMPT`."""


PROMPT = torch.randint(3, 300, (1, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    model = tiny_model(request.param)

    @cache
    def target(engine: str) -> Target:
        made = Target(model)
        made.use_engine(engine, capture="none")  # type: ignore[arg-type]
        return made

    expected = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=36, eos_token_id=[])
    return Family(name=request.param, model=model, target=target, expected=expected)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_plain_decoding_and_trees_say_what_hugging_face_says(family: Family, engine: str) -> None:
    if engine == "cudagraph" and family.name in ("mixtral", "qwen3_moe"):
        pytest.skip("experts are chosen by reading what the router says: no fixed shapes")
    plain, drafted = with_oracle(family.target(engine), PROMPT, max_new_tokens=36, eos_token_id=[])
    assert torch.equal(plain.sequences, family.expected)
    assert torch.equal(drafted.sequences, family.expected)
    assert drafted.stats is not None
    assert drafted.stats[0].tau > 1.5  # drafts were accepted: the equality above is about trees, not about single steps


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_head_of_the_targets_shape_does_not_change_the_text(family: Family, engine: str) -> None:
    target, config = family.target(engine), family.model.get_decoder().config
    made = EagleHeadConfig.for_target(target.config, initializer_range=0.2)
    assert made.num_key_value_heads == getattr(config, "num_key_value_heads", 4)
    assert made.head_dim == getattr(config, "head_dim", 8)
    assert made.num_hidden_layers == 1
    torch.manual_seed(1)
    head = EagleHead(made).eval()
    assert head(torch.randn(1, 3, 32), torch.randn(1, 3, 32)).shape == (1, 3, 32)
    sizes = dict(budget=20, top_k=4, depth=4)
    decoder = SpeculativeDecoder.from_pretrained(target, head, decode=decode_config(engine=engine, **sizes))
    out = decoder.generate(PROMPT, max_new_tokens=36, eos_token_id=[])
    assert torch.equal(out.sequences, family.expected)
    assert not any(isinstance(module, PackedLinear) for module in family.model.modules()), "the model stays as it is"


@pytest.mark.slow
def test_beam_search_says_what_hugging_face_says(family: Family) -> None:
    arguments: dict[str, Any] = dict(num_beams=3, max_new_tokens=16, eos_token_id=[], num_return_sequences=3)
    mask = torch.ones_like(PROMPT)
    expected = family.model.generate(
        PROMPT, attention_mask=mask, output_scores=True, return_dict_in_generate=True, **arguments
    )
    ours = SpeculativeDecoder(family.target("eager")).generate(PROMPT, **arguments)
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_layer_states_of_every_forward_are_hugging_faces(
    family: Family, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle.target.target.PREFILL_CHUNK", 5)
    target = family.target(engine)
    ids = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = family.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    expected = torch.cat([states[layer] for layer in LAYERS], dim=-1)
    cache = target.new_cache(rows=2, capacity=32)
    found = target.prefill(ids[:, :13], torch.tensor([13, 11]), cache, LAYERS)
    assert found.aux_BNA is not None
    assert same(found.aux_BNA[0], expected[0, :13])
    assert same(found.aux_BNA[1, :11], expected[1, :11])
    # A tree: tokens 13, 14 of row 0 (11, 12 of row 1) as one path, a decoy beside the second.
    tokens = torch.stack([torch.stack([row[n], torch.tensor(7), row[n + 1]]) for row, n in zip(ids, (13, 11))])
    depths, ancestors = torch.tensor([[0, 1, 1]] * 2), torch.tensor([[[0b1], [0b11], [0b101]]] * 2)
    tree = target.tree_forward(tokens, depths, ancestors, cache, LAYERS)
    assert tree.aux_BNA is not None
    assert same(tree.aux_BNA[0, [0, 2]], expected[0, 13:15])
    assert same(tree.aux_BNA[1, [0, 2]], expected[1, 11:13])
    assert target.tree_forward(tokens, depths, ancestors, cache).aux_BNA is None


def test_a_padded_trees_features_are_the_eager_engines(family: Family) -> None:
    """5 nodes in a step of 8, in rows of different lengths: what the 3 others write and see touches nothing."""
    if family.name in ("mixtral", "qwen3_moe"):
        pytest.skip("no fixed shapes")
    ids = torch.randint(3, 300, (3, 21), generator=torch.Generator().manual_seed(2))
    lengths_B = torch.tensor([21, 9, 14])
    tree = DraftTree.from_parents(ids[:, :5], random_parents(3, 5, 3))
    found = []
    for target in (family.target("eager"), family.target("cudagraph")):
        cache = target.new_cache(rows=3, capacity=64)
        target.prefill(ids, lengths_B, cache)
        first = target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, cache, aux_layers=(1,))
        cache.commit(torch.tensor([[0, 1], [0, 3], [0, 4]]), torch.tensor([2, 2, 1]))
        second = target.tree_forward(tree.tokens_BN, tree.depths_BN, tree.ancestors_BNW, cache)
        assert first.aux_BNA is not None
        found.append((first.features_BNH, first.aux_BNA, second.features_BNH))
    assert all(map(same, found[1], found[0]))
