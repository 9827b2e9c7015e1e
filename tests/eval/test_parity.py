"""Parity: the training module, the decoder and every file format agree, and a head that does not is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.cli import main as cli
from eagle.cli import parity as module
from eagle.cli.parity import decoder_logits, parity, training_logits
from eagle.config import TargetConfig
from eagle.errors import EagleError
from eagle.eval.checks.rounding import shaken
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.registry import EXPORTED
from eagle.heads.eagle1 import DraftHead, EagleHead, EagleHeadConfig
from eagle.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle.heads.vocabulary import DraftVocabulary
from eagle.target.target import Target
from tests.exact import TOLERANCE, head_in_float64, in_float64, same
from tests.tiny import VOCAB, save_tiny_target

DEPTH = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    save_tiny_target(folder, num_hidden_layers=8)
    return Target.from_config(TargetConfig(model=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"question_id": i, "category": "a", "turns": [text]} for i, text in enumerate(("hello to the cat", "1 + 1 = 2"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_head(version: str, target: Target) -> DraftHead:
    torch.manual_seed(1)
    kinds: dict[str, Any] = {"eagle1": (EagleHead, EagleHeadConfig), "eagle3": (Eagle3Head, Eagle3HeadConfig)}
    make, config = kinds[version]
    head: DraftHead = make(config.for_target(target.config, initializer_range=0.2, draft_vocab_size=90)).eval()
    head.set_vocabulary(DraftVocabulary.most_frequent(torch.randperm(VOCAB), 90))
    if isinstance(head, Eagle3Head):
        head.bind(target.num_layers)
    return head


@pytest.mark.slow
@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_all_ways_of_running_a_head_agree(
    version: str, target: Target, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(make_head(version, target), tmp_path / "head")
    arguments = ["lint", str(tmp_path / "head"), "--parity", "--target", target.name, "--prompts", prompts]
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    formats = {"eagle", *EXPORTED} - ({"speculators", "trtllm"} if version == "eagle1" else set())
    assert set(result["difference"]) == {"decoder", *formats}
    assert result["not_compared"].keys() == {"eagle", *EXPORTED} - formats
    assert set(result["weights"].values()) == {0.0}
    assert result["within"]
    assert all(0 < most < 0.1 * top for most, top in zip(result["allowed"], result["largest_logit"], strict=True))
    assert result["roots"] > 20
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "within the tolerance of 16 times what rounding alone moves a logit" in out
    assert cli.main([*arguments, "--tolerance", "0.5"]) == 0
    assert "within the tolerance of 0.5 times the largest logit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_what_float32_leaves_between_training_and_decoding_is_rounding(version: str, target: Target) -> None:
    """In float64 they agree; in float32 both lie as far from that as random rounding puts them, at every depth."""
    head, ids = make_head(version, target), torch.randint(3, VOCAB, (24,)).tolist()
    exact, exact_head = in_float64(target), head_in_float64(head)
    judge = training_logits(exact_head, exact, ids, depth=DEPTH)
    assert judge.dtype == torch.float64
    assert same(decoder_logits(exact_head, exact, ids, depth=DEPTH), judge)
    compared = module._Compared(DEPTH)
    ours = training_logits(head, target, ids, depth=DEPTH)
    for seed in range(2):
        with shaken(target.decoder, head, seed=seed):
            compared.shaken(ours, training_logits(head, target, ids, depth=DEPTH))
    compared.add("training", judge, ours.double())
    compared.add("decoder", judge, decoder_logits(head, target, ids, depth=DEPTH).double())
    assert compared.within(compared.allowed(None)), (compared.difference, compared.rounding)


@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_the_decoder_is_compared_at_every_depth_not_with_itself(version: str, target: Target) -> None:
    """Another prediction, position or token at depth k shows in row k - 1 and in no row before it: in float64, where
    rounding does not show."""
    head, ids = make_head(version, target).double(), torch.randint(3, VOCAB, (16,)).tolist()
    target = in_float64(target)
    ours = training_logits(head, target, ids, depth=DEPTH)
    assert ours.shape == (DEPTH, len(ids) - DEPTH, 90)
    other = list(ids)
    other[-1] = 3 if ids[-1] != 3 else 4  # drafted at the last depth behind the last root alone
    theirs = decoder_logits(head, target, other, depth=DEPTH)
    far = (ours - theirs).abs().amax(-1) / ours.abs().max()
    assert float(far[:-1].max()) < TOLERANCE[torch.float64]
    assert float(far[-1, :-1].max()) < TOLERANCE[torch.float64]
    assert float(far[-1, -1]) > 1e-3


def test_a_head_that_decodes_otherwise_is_told(
    target: Target, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(make_head("eagle1", target), tmp_path / "head")

    def rotated_twice(head: DraftHead, target: Target, ids: list[int], *, depth: int) -> torch.Tensor:
        forward = head.forward

        def twice(features: Any, embeddings: Any, positions: Any, attend: Any) -> torch.Tensor:
            return forward(features, embeddings, 2 * positions, attend)

        with monkeypatch.context() as patch:
            patch.setattr(head, "forward", twice)
            return decoder_logits(head, target, ids, depth=depth)

    monkeypatch.setattr(module, "decoder_logits", rotated_twice)
    result = parity(tmp_path / "head", target=target.name, prompts=(prompts,), formats=())
    assert not result["within"]
    assert result["difference"]["decoder"][0] > 10 * result["allowed"][0]


def test_a_format_that_rounds_or_loses_weights_is_told(
    target: Target, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(make_head("eagle3", target), tmp_path / "head")

    def rounds(head: DraftHead, target: Any, format: str, folder: Path) -> DraftHead:
        save_head(head, folder)
        return load_head(folder).to(torch.bfloat16).float()

    monkeypatch.setattr(module, "_round_trip", rounds)
    result = parity(tmp_path / "head", target=target.name, prompts=(prompts,), formats=("vllm",), tolerance=1.0)
    assert result["weights"]["vllm"] > 0
    assert not result["within"], "weights are to be equal whatever the tolerance of logits"


def test_what_was_exported_and_cannot_be_read_back_is_no_refusal(
    target: Target, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that refuses a head is left out; one that loses it on the way is not."""
    save_head(make_head("eagle1", target), tmp_path / "head")
    monkeypatch.setattr(module, "write_export", lambda made, folder: folder.mkdir())
    with pytest.raises(EagleError, match=r"has no config\.json"):
        parity(tmp_path / "head", target=target.name, prompts=(prompts,))


def test_a_head_trained_in_bfloat16_is_compared_in_float32(
    prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its identity is of weights rounded to bfloat16; the checkpoint's are float32."""
    model = str(save_tiny_target(tmp_path / "target", num_hidden_layers=8))
    trained = Target.from_config(TargetConfig(model=model, dtype="bfloat16", device="cpu"))
    head = make_head("eagle1", trained)
    head.config.target_identity = trained.identity()
    save_head(head, tmp_path / "head", extra={"recipe": {"target": {"model": model, "dtype": "bfloat16"}}})
    assert parity(tmp_path / "head", target=model, prompts=(prompts,), limit=1)["within"]
    (tmp_path / "head" / "training.json").unlink()
    with pytest.raises(EagleError, match="weights_sha256"):
        parity(tmp_path / "head", target=model, prompts=(prompts,), limit=1)


def test_a_zero_fc_bias_is_no_difference_between_formats(target: Target, prompts: str, tmp_path: Path) -> None:
    head = EagleHead(EagleHeadConfig.for_target(target.config, fc_bias=True))
    torch.nn.init.zeros_(head.fc.bias)
    save_head(head, tmp_path / "head")
    result = parity(tmp_path / "head", target=target.name, prompts=(prompts,), limit=1)
    assert result["within"]
    assert {"vllm", "sglang", "reference"} <= result["weights"].keys()


def test_infinite_logits_are_never_within_tolerance() -> None:
    compared = module._Compared(1)
    compared.judge(torch.tensor([[[float("inf")]]]))
    compared.add("decoder", torch.tensor([[[float("inf")]]]), torch.tensor([[[1.0]]]))
    assert not compared.within([float("inf")])


def test_mistakes_are_named(target: Target, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_head(make_head("eagle1", target), tmp_path / "head")
    head = tmp_path / "head"
    with pytest.raises(EagleError, match=r"unknown formats gguf; expected some of eagle, reference"):
        parity(head, target=target.name, prompts=(prompts,), formats=("gguf",))
    with pytest.raises(EagleError, match="EAGLE-1/2 heads are not exported --to speculators"):
        parity(head, target=target.name, prompts=(prompts,), formats=("speculators",))
    with pytest.raises(EagleError, match="depth is 0"):
        parity(head, target=target.name, prompts=(prompts,), depth=0)
    with pytest.raises(EagleError, match="depth is 400, expected 1 to 62"):
        parity(head, target=target.name, prompts=(prompts,), depth=400)
    with pytest.raises(EagleError, match="no prompt of"):
        parity(head, target=target.name, prompts=(prompts,), depth=62)
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(EagleError, match="tolerance is"):
            parity(head, target=target.name, prompts=(prompts,), tolerance=tolerance)
    assert cli.main(["lint", str(head), "--parity"]) == 2
    assert "give --target" in capsys.readouterr().err
