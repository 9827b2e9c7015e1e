"""A cycle whose sampling, walks, trees, noise, commits and attention are all kernels says what the host's rules say."""

from typing import Any

import pytest
import torch

from eagle.decode.decoder import SpeculativeDecoder, SpeculativeOutput
from eagle.errors import EagleError
from eagle.heads.eagle1 import EagleHead, EagleHeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.kernels.dispatch import Backend
from eagle.target.target import Target
from tests.decoding import decode_config
from tests.head_drafters import static_drafter
from tests.kernels.interpreted import INTERPRETED
from tests.tiny import tiny_model

pytestmark = INTERPRETED

torch.set_num_threads(1)

IDS = torch.randint(3, 300, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
FILTERED: dict[str, Any] = dict(
    do_sample=True, temperature=[0.8, 1.0], top_k=[20, 0], top_p=[0.9, 1.0], min_p=[0.0, 0.02], seed=5
)
PLAIN: dict[str, Any] = dict(do_sample=True, temperature=[0.0, 1.0], top_k=0, seed=5)
CYCLE = {"tree_attention", "sample", "verify", "tree_build"}
"""What every cycle is made of; commits come where a path leaves the first nodes."""


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=1))


@pytest.fixture(scope="module")
def draft() -> Target:
    """The target, a little off: some drafts are accepted, some are not."""
    model = tiny_model(num_hidden_layers=1)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return Target(model)


def decode(decoder: SpeculativeDecoder, kernels: Backend, **arguments: Any) -> SpeculativeOutput:
    decoder.kernels = kernels
    return decoder.generate(IDS, attention_mask=MASK, max_new_tokens=5, eos_token_id=[], **arguments)


def same(decoder: SpeculativeDecoder, *, accepts: bool = True, **arguments: Any) -> set[str]:
    """Decodes both ways; the kernels that ran, each by Triton alone."""
    expected, got = decode(decoder, "reference", **arguments), decode(decoder, "triton", **arguments)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.stats is not None
    assert expected.stats is not None
    assert [row.accepted for row in got.stats] == [row.accepted for row in expected.stats]
    assert all(list(paths) == ["triton"] for row in got.stats for paths in row.kernels.values())
    assert all(list(paths) == ["reference"] for row in expected.stats for paths in row.kernels.values())
    kernels = set().union(*(row.kernels for row in got.stats))
    assert kernels >= CYCLE
    if accepts:
        assert any(sum(row.accepted) for row in got.stats)
    return kernels


TREE = dict(drafter="model", budget=5, top_k=2, depth=2)
CHAIN = dict(drafter="model", budget=3, top_k=1, depth=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        pytest.param(TREE, FILTERED, id="coupled tree, filters"),
        pytest.param(CHAIN, PLAIN, id="coupled chain, a greedy row and a sampled one"),
        pytest.param(dict(TREE, rule="rejection"), FILTERED, id="sampled tree, filters"),
        pytest.param(dict(CHAIN, rule="rejection"), PLAIN, id="sampled chain, a greedy row and a sampled one"),
        pytest.param(dict(TREE, rule="rejection", children="top"), PLAIN, id="top tree"),
    ],
)
def test_every_kernel_together_decodes_as_the_reference(
    target: Target, draft: Target, settings: dict[str, Any], arguments: dict[str, Any]
) -> None:
    decoder = SpeculativeDecoder.from_pretrained(target, draft_model=draft, decode=decode_config(**settings))
    kernels = same(decoder, **arguments)
    assert ("noise" in kernels) == (settings.get("children") != "top")
    assert "commit" in kernels or settings["top_k"] == 1  # a chain's nodes lie where they belong


@pytest.mark.slow
def test_a_head_s_static_tree_over_a_part_of_the_vocabulary(target: Target) -> None:
    """The draft vocabulary's noise is the target tokens'."""
    torch.manual_seed(1)
    half = DraftVocabulary(target_ids_D=torch.arange(0, target.vocab_size, 2), target_size=target.vocab_size)
    config = EagleHeadConfig.for_target(target.config, initializer_range=0.2, draft_vocab_size=half.size)
    head = EagleHead(config).eval()
    head.set_vocabulary(half)
    drafter = static_drafter(head, target.tokens, ((0,), (1,), (0, 0)))
    kernels = same(SpeculativeDecoder(target, drafter), accepts=False, **PLAIN)
    assert "noise" in kernels


@pytest.mark.parametrize(
    ("rule", "arguments", "reason"),
    [
        (
            "coupled",
            dict(repetition_penalty=1.3),
            r"processors \(RepetitionPenaltyLogitsProcessor\).*'auto' or 'reference'",
        ),
        ("rejection", dict(output_scores=True), "output_scores wants the scores"),
    ],
)
def test_what_kernels_cannot_express_is_refused_or_left_to_the_host(
    target: Target, monkeypatch: pytest.MonkeyPatch, rule: Any, arguments: dict[str, Any], reason: str
) -> None:
    """Asked for: an error before anything is computed. By auto, on a device on which kernels run: the host's rules."""
    decoder = SpeculativeDecoder.from_pretrained(target, decode=decode_config(drafter="ngram", rule=rule, depth=2))
    expected = decode(decoder, "reference", **arguments)
    with monkeypatch.context() as patch:
        patch.setattr(target, "prefill", None)
        with pytest.raises(EagleError, match=reason):
            decode(decoder, "triton", **arguments)
    asked: list[tuple[str, str | None]] = []

    def as_on_a_gpu(kernel: str, device: torch.device, *, refusal: str | None = None) -> str:
        asked.append((kernel, refusal))
        return "triton" if refusal is None else "reference"

    monkeypatch.setattr("eagle.verify.verifier.chosen", as_on_a_gpu)
    out = decode(decoder, "auto", **arguments)
    assert {kernel for kernel, refusal in asked if refusal} == {"sample", "verify"}
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.stats is not None
    for stats in out.stats:
        assert stats.kernels["verify"] == {"reference": stats.verify_steps}
        assert stats.kernels["sample"] == {"reference": stats.verify_steps + 1}


@pytest.mark.parametrize("rule", ["typical", "top_k", "block"])
def test_rules_without_a_kernel_are_refused_at_once(target: Target, rule: str) -> None:
    with pytest.raises(EagleError, match=f'cannot run: the rule "{rule}" runs on the host only; set it to auto'):
        SpeculativeDecoder(target, rule=rule, kernels="triton")


@pytest.mark.slow
def test_rows_are_verified_in_parts_that_their_logits_fit_into(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part with its own rows' seeds and settings."""
    decoder, sampled = SpeculativeDecoder(target), dict(PLAIN, temperature=[1.0, 0.7])
    monkeypatch.setattr("eagle.verify.verifier.MOST_LOGITS", 1)
    expected, got = decode(decoder, "reference", **sampled), decode(decoder, "triton", **sampled)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.stats is not None
    assert got.stats[0].kernels["verify"]["triton"] == 2 * got.stats[0].verify_steps
