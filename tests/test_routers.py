"""Mixtures of experts: a tie of two experts is named, at load and where two texts part, and excuses nothing else."""

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder
from eagle.errors import EagleError
from eagle.eval.checks.exactness import divergence
from eagle.eval.checks.found import kind_of, margins_of
from eagle.target.routers import closest, routers_recorded
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.tiny import tiny_model

torch.set_num_threads(1)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]


def tie_experts(target: Target, apart: float = 1e-7) -> None:
    """Experts 0 and 1 of every layer get router rows that are `apart`; what they compute stays different."""
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in target.model.model.layers:
            weight_EH = layer.mlp.gate.weight
            weight_EH[1] = weight_EH[0] + apart * torch.randn(weight_EH.shape[1])


def parted(target: Target, **more: int) -> dict[str, object]:
    """A divergence at the sixth token of an answer, from a token that is not among the best two."""
    decoder = SpeculativeDecoder(target)
    out = decoder.generate(torch.tensor([PROMPT]), max_new_tokens=8, eos_token_id=None, do_sample=False)
    reference = out.sequences[0, len(PROMPT) :].tolist()
    logits_V = target.logits(target.features(torch.tensor([[*PROMPT, *reference[:5]]]))[0][0, -1])
    tokens = [*reference[:5], int(logits_V.argmin()), *reference[6:]]
    found = divergence(target, prompt_ids=PROMPT, tokens=tokens, reference=reference, versus="plain", **more)
    assert found is not None
    return found


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def target(request: pytest.FixtureRequest) -> Target:
    return Target.from_pretrained(tiny_model(request.param))


def test_margins_are_those_of_the_routers_logits(target: Target) -> None:
    ids_1T = torch.tensor([PROMPT])
    with routers_recorded(target.model) as found:
        target.features(ids_1T)
    assert list(found) == ROUTERS
    logits = target.model(ids_1T, output_router_logits=True).router_logits
    for name, logits_TE in zip(ROUTERS, logits):
        top_T4 = logits_TE.topk(4)
        for one, values, experts in zip(found[name], top_T4.values.tolist(), top_T4.indices.tolist()):
            assert one.margin == pytest.approx(values[1] - values[2], abs=1e-5)
            assert one.experts == (experts[1], experts[2])
            assert not one.tie
    nearest = closest(found)
    assert nearest is not None
    ratios = [one.margin / one.tie_below for margins in found.values() for one in margins]
    assert nearest.margin / nearest.tie_below == min(ratios), "nearest to a tie there"


def test_texts_that_part_behind_tied_experts_are_a_router_tie_and_else_different(target: Target) -> None:
    apart = parted(target)
    assert (apart["tie"], kind_of(apart)) == (False, "DIFFERENT")
    assert apart["router"]["margin"] > apart["router"]["tie_below"]
    tie_experts(target)
    tied = parted(target)
    assert (tied["tie"], kind_of(tied)) == (True, "router tie")
    assert tied["margin"] > tied["tie_below"], "the logits are no tie"
    assert tied["router"]["margin"] < tied["router"]["tie_below"] < 1e-3
    assert ".mlp.gate: experts " in margins_of(tied)
    unseen = parted(target, alike=len(PROMPT) + 5)
    assert kind_of(unseen) == "DIFFERENT", "what both computed in one forward is no excuse"


@pytest.mark.slow
def test_drafting_over_tied_experts_leaves_plain_decoding_at_router_ties_alone() -> None:
    """Which of these texts part depends on the processor's rounding; that they do is what ties bring."""
    for seed in range(1, 4):
        model = tiny_model("mixtral", seed=seed)
        target, draft = Target.from_pretrained(model), Target.from_pretrained(tiny_model("mixtral", seed=seed))
        tie_experts(target)
        decode = decode_config(drafter="model", budget=8, top_k=2, depth=3)
        decoder = SpeculativeDecoder.from_pretrained(target, draft_model=draft, decode=decode)
        answers = [
            one.generate(torch.tensor([PROMPT]), max_new_tokens=20, eos_token_id=None, do_sample=False)
            for one in (decoder, decoder.plain())
        ]
        tokens, reference = (out.sequences[0, len(PROMPT) :].tolist() for out in answers)
        found = divergence(
            target, prompt_ids=PROMPT, tokens=tokens, reference=reference, versus="plain", alike=len(PROMPT)
        )
        assert found is None or kind_of(found) in ("tie", "router tie")


def test_dense_targets_have_no_routers_and_nothing_is_said_of_them() -> None:
    found = parted(Target.from_pretrained(tiny_model("llama")))
    assert "router" not in found
    assert kind_of(found) == "DIFFERENT"


def test_a_target_whose_experts_tie_at_load_is_refused_with_that_reason() -> None:
    """The rows are equal, and summed in another order: rounding alone decides, so every forward may take other experts."""
    said = []
    for seed in range(4):
        model = tiny_model("mixtral", seed=seed)
        with torch.no_grad():
            for layer in model.model.layers:
                weight_EH = layer.mlp.gate.weight
                weight_EH[1:] = weight_EH[0] + 1e-7 * torch.randn(3, weight_EH.shape[1])
        try:
            Target.from_pretrained(model)
        except EagleError as error:
            said.append(str(error))
    assert said
    assert all("its routers cannot tell experts apart" in one and "ALiBi" not in one for one in said)
